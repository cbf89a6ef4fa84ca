"""``prediction`` of chats: it changes no answer, and usage says what it gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from bitnet.core import Model
from bitnet.core.engine.prompt_lookup import Draft

QUESTION: Any = [{"role": "user", "content": "Tell me a story about a cat."}]


class Always:
    """Drafts three tokens wherever it can, whatever that costs."""

    stale, token = False, 0.0

    def choose(self, drafts: Sequence[Draft], room: int) -> int:
        return 3 if any(draft.tokens for draft in drafts) and room >= 3 * len(drafts) else 0

    def plain(self, seqs: int, seconds: float) -> None: ...

    def drafted(self, tokens: int, seconds: float) -> None: ...


@pytest.fixture
def server(script_model: Model, running: Any) -> Iterator[Any]:
    engine: Any = script_model._worker.engine
    engine._pace.drafts = Always()
    with running(script_model, names=("m",)) as found:
        yield found


def test_a_prediction_is_exact_and_counted(server: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(content: Any) -> tuple[str | None, Any]:
        more: Any = {} if content is None else {"prediction": {"type": "content", "content": content}}
        answer = client.chat.completions.create(
            model="m", messages=QUESTION, temperature=0, max_completion_tokens=80, **more
        )
        assert answer.usage is not None
        return answer.choices[0].message.content, answer.usage.completion_tokens_details

    said, without = ask(None)
    assert said
    assert (without.accepted_prediction_tokens, without.rejected_prediction_tokens) == (0, 0)
    half = len(said) // 2
    other = said[:half] + " 17 + 25 = 42." + said[half:]
    for prediction, accepted, rejected in (
        (said, True, False),
        ([{"type": "text", "text": said[:half]}, {"type": "text", "text": said[half:]}], True, False),
        (other, True, True),
        ("17 + 25 = 42.", False, False),
    ):
        again, counted = ask(prediction)
        assert again == said
        assert bool(counted.accepted_prediction_tokens) == accepted, prediction
        assert rejected <= bool(counted.rejected_prediction_tokens), prediction


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "diff", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
    ],
)
def test_what_is_no_prediction_is_refused(demo: Any, prediction: Any, field: str) -> None:
    refused = demo.chat(prediction=prediction)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
