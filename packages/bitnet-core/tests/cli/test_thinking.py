"""Thoughts at the command line and in Python: a small random model of Qwen3's shape, whose template opens a thought."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bitnet.core import load_model
from bitnet.core.cli.console import DIM, PLAIN, Shown
from bitnet.core.evaluation.replay import rerun

Bitnet = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "Hello"}]
BUDGET = 5
"""Tokens after which a thought is ended."""


@pytest.fixture(scope="module")
def thinker(random_model: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "thinker.gguf"
    shape = random_model.Shape(
        layers=1, hidden=128, heads=2, kv_heads=1, head_dim=64, ffn=128, vocab=512, context=2048, group=64
    )
    metadata = random_model.metadata(shape) | {"tokenizer.chat_template": TEMPLATE}
    # Some seeds think in white space and control tokens alone, or end within the thought: those have nothing to cut.
    for seed in (int.from_bytes(os.urandom(4), "little") for _ in range(100)):
        print(f"seed {seed}")
        random_model.write_gguf(path, metadata, dict(random_model.tensors(shape, seed)))
        with load_model(path, device="cpu") as model:
            thought = model.chat(ASKED, max_tokens=BUDGET + 1)
            if thought.reasoning_tokens == BUDGET + 1 and model.tokenizer.decode(thought.tokens[:BUDGET]).strip():
                return path
    pytest.fail("no seed thinks")


@pytest.fixture(autouse=True)
def cpu(on_the_cpu: None) -> None: ...


def test_run_prints_the_answer_alone_into_a_pipe(bitnet: Bitnet, thinker: Path) -> None:
    options = ("-m", thinker, "-n", "30", "--reasoning-budget", str(BUDGET), "Hello")
    with load_model(thinker, device="cpu") as model:
        done = model.chat(ASKED, max_tokens=30, reasoning_budget=BUDGET)
        end = model.tokenizer.encode("</think>", add_special=False)
        assert (done.reasoning_tokens, list(done.tokens[BUDGET : BUDGET + len(end)])) == (BUDGET, end)
        assert done.text.strip() == model.tokenizer.decode(done.tokens[BUDGET + len(end) :]).strip()
        chunks = list(model.chat_stream(ASKED, max_tokens=30, reasoning_budget=BUDGET))
        assert "".join(c.reasoning for c in chunks) == done.reasoning
        assert "".join(c.text for c in chunks) == done.text
        off = model.chat(ASKED, max_tokens=30, reasoning_budget=0)
        assert (off.reasoning, off.reasoning_tokens) == ("", 0)
        assert model.tokenizer.decode(off.prompt_tokens).endswith("<think>\n\n</think>\n\n")
    ran = bitnet("run", *options)
    assert (ran.status, ran.out) == (0, f"{done.text}\n"), ran.err
    assert f"{BUDGET} of them thinking" in ran.err
    printed = json.loads(bitnet("run", *options, "--json").out)
    assert (printed["text"], printed["reasoning"]) == (done.text, done.reasoning)
    assert printed["timings"]["reasoning_tokens"] == BUDGET
    assert bitnet("run", "-m", thinker, "-n", "30", "--no-think", "Hello").out == f"{off.text}\n"


@pytest.mark.parametrize("budget", [None, 0, BUDGET])
def test_a_receipt_of_a_thought_is_rerun(bitnet: Bitnet, thinker: Path, budget: int | None) -> None:
    more = [] if budget is None else ["--reasoning-budget", str(budget)]
    ran = bitnet("run", "-m", thinker, "-n", "20", *more, "--receipt", "r.json", "Hello")
    assert ran.status == 0, ran.err
    receipt = json.loads(Path("r.json").read_text())
    rerun(receipt, ASKED, model=thinker)
    with load_model(thinker, device="cpu") as model:
        tokens = list(model.chat_tokens(ASKED, thinks=False if budget == 0 else None))
    rerun(receipt, tokens, model=thinker)  # as of a server, whose receipts bind token ids alone


def test_chat_gives_thoughts_back_to_the_template(
    bitnet: Bitnet, thinker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitnet.core.api import Model

    asked: list[Any] = []
    stream = Model.chat_stream

    def noted(self: Model, messages: Any, **options: Any) -> Any:
        asked.append(messages)
        return stream(self, messages, **options)

    monkeypatch.setattr(Model, "chat_stream", noted)
    options = ("-m", thinker, "-n", "30", "--reasoning-budget", str(BUDGET), "--temperature", "0")
    ran = bitnet("chat", *options, stdin="Hello\nMore\n")
    assert ran.status == 0, ran.err
    assert asked[1][1]["reasoning_content"]
    assert asked[1][1]["content"] == ran.out.split("\n")[0] or "\n" in asked[1][1]["content"]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_shows_thoughts_dimmed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    dim, plain = (DIM, PLAIN) if term == "xterm" else ("", "")
    monkeypatch.setenv("TERM", term)
    for terminal, thoughts in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        with Shown(thoughts=thoughts) as shown:
            for reasoning, text in (("Let me", ""), (" see.\x1b[31m", ""), ("", "Yes"), ("", ".")):
                shown.chunk(reasoning, text)
        said = capsys.readouterr().out
        assert said == (f"{dim}Let me see.\\x1b[31m{plain}\n\nYes." if terminal and thoughts else "Yes.")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Shown() as shown:  # and the answer never comes
        shown.chunk("Let", "")
    assert capsys.readouterr().out == f"{dim}Let{plain}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no-think", "--reasoning-budget", "5"], "exclude each other"),
        (["--raw", "--no-think"], "--raw skips"),
        (["--reasoning-budget", "-2"], "--reasoning-budget is -2; it must be an integer ≥ 0, or -1."),
    ],
)
def test_options_that_do_not_fit(bitnet: Bitnet, thinker: Path, options: list[str], said: str) -> None:
    ran = bitnet("run", "-m", thinker, *options, "Hello")
    assert (ran.status, ran.out) == (2, "")
    assert said in " ".join(ran.err.split())
