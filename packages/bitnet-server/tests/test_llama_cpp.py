"""llama.cpp's own endpoints: completions, gaps, properties, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import Model, load_model
from bitnet.core.gguf import GGUFFile, TensorSource, write_gguf
from bitnet.core.hal.sampling import survivors
from bitnet.server.api import infill

PROMPT = "Once upon a time"
GREEDY = {"prompt": PROMPT, "temperature": 0}


def complete(server: Any, path: str = "/completion", **fields: Any) -> Any:
    answer = server.client.post(path, json={"n_predict": 12, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: Any, path: str = "/completion", **fields: Any) -> list[dict[str, Any]]:
    answer = server.client.post(path, json={"n_predict": 12, **GREEDY, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion_is_the_engines(demo: Any, path: str) -> None:
    tokens = demo.model.tokenizer.encode(PROMPT)
    expected = demo.model.generate(tokens, max_tokens=12)
    for found in (complete(demo, path, return_tokens=True), complete(demo, path, prompt=tokens, return_tokens=True)):
        assert (found["content"], found["tokens"]) == (expected.text, [*expected.tokens])
        assert found["prompt"] == demo.model.tokenizer.decode(tokens, skip_special=False)
        assert (found["tokens_predicted"], found["tokens_evaluated"]) == (12, len(tokens))
        assert (found["stop"], found["stop_type"], found["truncated"]) == (True, "limit", False)
        assert found["timings"]["predicted_n"] == 12
        assert found["timings"]["prompt_n"] + found["timings"]["cache_n"] == len(tokens)
    assert complete(demo, path)["tokens"] == []
    *events, last = streamed(demo, path, timings_per_token=True)
    assert "".join(event["content"] for event in events) == expected.text
    assert [token for event in events for token in event["tokens"]] == [*expected.tokens]
    assert [event["timings"]["predicted_n"] for event in events] == [event["tokens_predicted"] for event in events]
    assert not any(event["stop"] for event in events)
    assert (last["stop"], last["content"], last["tokens"], last["timings"]["predicted_n"]) == (True, "", [], 12)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_counted(demo: Any, stream: bool) -> None:
    """Programs shorten a conversation by these numbers. The type is llama.cpp's on its own paths only."""
    text = "a " * random.randrange(demo.model.context, 2 * demo.model.context)
    tokens = len(demo.model.tokenizer.encode(text))
    own = {"/completion", "/completions", "/chat/completions"}
    for path in (*own, "/v1/completions", "/v1/chat/completions"):
        body: dict[str, Any] = {"prompt": text, "messages": [{"role": "user", "content": text}], "stream": stream}
        body.pop("messages" if path.endswith("/completion") or "chat" not in path else "prompt")
        answer = demo.client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["n_ctx"]) == (
            400,
            "context_length_exceeded",
            demo.model.context,
        )
        assert error["type"] == ("exceed_context_size_error" if path in own else "invalid_request_error")
        if "chat" in path:
            assert tokens < error["n_prompt_tokens"] < tokens + 50
        else:
            assert error["n_prompt_tokens"] == tokens


@pytest.mark.parametrize("tokens", [1, 2])
def test_timings_are_numbers_however_short_the_answer_is(demo: Any, tokens: int) -> None:
    """The first token is the prompt's, so an answer of one token has no rate."""
    found = [complete(demo, n_predict=tokens)["timings"], demo.chat(max_tokens=tokens).json()["timings"]]
    for whole in found:
        assert whole["predicted_per_second"] * whole["predicted_ms"] / 1e3 == pytest.approx(tokens - 1)
    found += [event["timings"] for event in streamed(demo, n_predict=tokens, timings_per_token=True)]
    for timings in found:
        assert all(isinstance(value, int | float) and value >= 0 for value in timings.values()), timings
        if timings["predicted_n"] == 1:
            assert timings["predicted_per_second"] == timings["predicted_per_token_ms"] == 0


def test_prompts_are_counted(demo: Any) -> None:
    asked = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    expected = demo.model.chat(asked["messages"]).timings.prompt_tokens
    for path, body in (
        ("/chat/completions/input_tokens", asked),
        ("/v1/chat/completions/input_tokens", asked),
        ("/v1/responses/input_tokens", {"input": "What is 17 + 25?"}),
    ):
        answer = demo.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"object": "response.input_tokens", "input_tokens": expected}
        assert demo.client.post(path, json={}).status_code == 400


def test_prompts_of_every_kind(demo: Any) -> None:
    tokens = demo.model.tokenizer.encode(PROMPT)
    expected = complete(demo)["content"]
    for several in ([PROMPT, tokens], [tokens, {"prompt_string": PROMPT}], [tokens, [*tokens[:2], *tokens[2:]]]):
        found = complete(demo, prompt=several)
        assert [entry["index"] for entry in found] == [0, 1]
        assert [entry["content"] for entry in found] == [expected, expected]
    assert complete(demo, prompt={"prompt_string": PROMPT})["content"] == expected
    at = random.randrange(1, len(tokens))
    rest = demo.model.tokenizer.decode(tokens[at:])
    if demo.model.tokenizer.encode(rest, add_special=False) == tokens[at:]:
        assert complete(demo, prompt=[*tokens[:at], rest])["content"] == expected
    assert len(complete(demo, n=2, temperature=1)) == 2
    bad: list[Any] = [
        "",
        [],
        [""],
        [[]],
        [1, True],
        [1, ""],
        {"prompt_string": ""},
        {},
        {"x": "y"},
        3,
        [1.5],
        [{"a": 1}],
    ]
    for wrong in bad:
        answer = demo.client.post("/completion", json={"prompt": wrong})
        assert answer.status_code == 400, (wrong, answer.text)
        assert "prompt" in answer.json()["error"]["message"]
    images = {"prompt_string": "x", "multimodal_data": ["iVBORw0KGgo="]}
    assert demo.client.post("/completion", json={"prompt": images}).status_code == 400


def test_how_an_answer_ended(demo: Any) -> None:
    text = complete(demo)["content"]
    word = text[3:6]
    found = complete(demo, stop=[word])
    assert (found["content"], found["stop_type"], found["stopping_word"]) == (text[: text.index(word)], "word", word)
    end = demo.model.generate(demo.model.tokenizer.encode(PROMPT), max_tokens=12).tokens[2]
    assert complete(demo, stop_token_ids=[end])["stop_type"] == "eos"
    whole = complete(demo, n_predict=-1, ignore_eos=True)
    assert (whole["truncated"], whole["stop_type"]) == (True, "limit")
    assert whole["tokens_predicted"] + whole["tokens_evaluated"] == demo.model.context
    assert whole["has_new_line"] == ("\n" in whole["content"])
    assert complete(demo, n_predict=0)["tokens_predicted"] == 0


def test_settings_and_chosen_fields(demo: Any) -> None:
    bias = {"logit_bias": [[7, -2], [8, False]], "ignore_eos": True}
    given: dict[str, Any] = {"seed": 5, "top_k": 3, "repeat_penalty": 1.5, "stop": ["x"], "n_probs": 2, **bias}
    found = complete(demo, **given)["generation_settings"]
    assert (found["seed"], found["top_k"], found["n_predict"], found["stop"]) == (5, 3, 12, ["x"])
    assert (found["repeat_penalty"], found["min_p"], found["top_p"], found["n_probs"]) == (1.5, 0.05, 0.95, 2)
    ends = [{"token": token, "bias": None} for token in demo.model.tokenizer.eos_ids]
    listed = [{"token": 7, "bias": -2}, {"token": 8, "bias": None}, *ends]
    assert sorted(found["logit_bias"], key=str) == sorted(listed, key=str)
    assert complete(demo)["generation_settings"]["logit_bias"] == []
    few = complete(demo, response_fields=["content", "generation_settings/n_predict", "none/at/all", "content/x"])
    assert few == {"content": complete(demo)["content"], "generation_settings/n_predict": 12}
    params = demo.client.get("/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"], params["top_p"], params["min_p"]) == (0.8, 40, 0.95, 0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities(demo: Any, stream: bool) -> None:
    def probabilities(**fields: Any) -> list[dict[str, Any]]:
        if not stream:
            return complete(demo, **fields)["completion_probabilities"]  # type: ignore[no-any-return]
        events = streamed(demo, **fields)[:-1]
        assert [len(event["completion_probabilities"]) for event in events] == [1] * len(events)
        return [event["completion_probabilities"][0] for event in events]

    tokens = demo.model.tokenizer.encode(PROMPT)
    expected = demo.model.generate(tokens, max_tokens=12, logprobs=40).logprobs
    found = probabilities(n_probs=4)
    assert [entry["id"] for entry in found] == [entry.token for entry in expected]
    for entry, theirs in zip(found, expected, strict=True):
        assert entry["logprob"] == pytest.approx(theirs.logprob, abs=1e-5)
        assert bytes(entry["bytes"]) == demo.model.tokenizer.token_bytes(entry["id"])
        assert [top["id"] for top in entry["top_logprobs"]] == [token for token, _ in theirs.top[:4]]
    greedy = probabilities(n_probs=4, post_sampling_probs=True)
    assert all((e["prob"], [t["id"] for t in e["top_probs"]]) == (1.0, [e["id"]]) for e in greedy)
    sampling = {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.02}
    seed = random.randrange(2**32)
    drawn = probabilities(n_probs=3, post_sampling_probs=True, seed=seed, **sampling)
    same = demo.model.generate(tokens, max_tokens=12, seed=seed, logprobs=6, **sampling)
    assert [entry["id"] for entry in drawn] == [*same.tokens]
    for entry, theirs in zip(drawn, same.logprobs, strict=True):
        z = np.array([p for _, p in theirs.top]) / 1.7
        weights = np.exp(z) * survivors(z, top_k=6, top_p=0.9, min_p=0.02)
        wanted = dict(zip([token for token, _ in theirs.top], weights / weights.sum(), strict=True))
        assert entry["prob"] == pytest.approx(wanted[entry["id"]], abs=1e-5)
        assert sum(w > 0 for w in wanted.values()) >= len(entry["top_probs"]) > 0
        for top in entry["top_probs"]:
            assert top["prob"] == pytest.approx(wanted[top["id"]], abs=1e-5)


def test_probabilities_that_are_not_known_are_refused(demo: Any) -> None:
    for more in ({"top_k": 0}, {"repeat_penalty": 1.1}, {"grammar": 'root ::= "a"'}, {"allowed_token_ids": [5]}):
        body = {"prompt": PROMPT, "n_probs": 2, "post_sampling_probs": True, **more}
        answer = demo.client.post("/completion", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "post_sampling_probs"), more


def test_grammars(demo: Any) -> None:
    for path in ("/completion", "/v1/completions", "/v1/chat/completions"):
        body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": PROMPT}
        answer = demo.client.post(path, json={**body, "grammar": 'root ::= [a-c]{3} "-" [0-9]{2}', "max_tokens": 40})
        value = answer.json()
        choice = value if path == "/completion" else value["choices"][0]
        text = choice["message"]["content"] if "chat" in path else choice.get("content", choice.get("text"))
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", text), path
        wrong = demo.client.post(path, json={**body, "grammar": 'root ::= "a'})
        assert wrong.status_code == 400
        assert "line 1, column 10" in wrong.json()["error"]["message"]


def test_paths_without_a_version(demo: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 5}
    first, second = (demo.client.post(f"{path}/chat/completions", json=body).json() for path in ("", "/v1"))
    assert first["choices"] == second["choices"]
    assert demo.client.get("/models").json()["data"][0]["id"] == demo.service.names[0]
    assert demo.client.get("/version").json()["version"]
    assert demo.client.get("/lora-adapters").json() == []
    props = demo.client.get("/props").json()
    assert props["model_path"] == demo.model.path.name
    assert props["total_slots"] == len(demo.client.get("/slots").json())
    for action in ("save", "restore", "erase"):
        answer = demo.client.post(f"/slots/0?action={action}", json={"filename": "x.bin"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "unsupported_endpoint")
        assert "--slot-save-path" in answer.json()["error"]["message"]


def with_marks(source: Path, path: Path, names: list[str]) -> None:
    """A copy of the demo model in which the last tokens are marks of gaps."""
    file = GGUFFile(source)
    metadata = file.typed_metadata()
    tokens: Any = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    types: Any = np.array(metadata["tokenizer.ggml.token_type"]).copy()
    ordinary = [i for i, kind in enumerate(types) if kind == 1 and len(tokens[i]) > 5][-len(names) :]
    for i, name in zip(ordinary, names, strict=True):
        tokens[i], types[i] = name, 3
    gone = {metadata["tokenizer.ggml.tokens"][i] for i in ordinary}  # type: ignore[index]
    merges = [m for m in metadata["tokenizer.ggml.merges"] if not gone & {*m.split(" "), m.replace(" ", "")}]  # type: ignore[union-attr]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges}
    tensors = {
        name: TensorSource(tensor.shape, tensor.type, file.data(tensor).copy()) for name, tensor in file.tensors.items()
    }
    write_gguf(path, {**metadata, **changed}, tensors)


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory, running: Any, demo_model: Model) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("filler") / "filler.gguf"
    with_marks(
        demo_model.path, path, ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
    )
    with load_model(path, device="cpu", max_seqs=2, threads=1) as model, running(model) as server:
        yield server


def fill(server: Any, **fields: Any) -> Any:
    body = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n\nprint(add(1, 2))", "n_predict": 4, **fields}
    return server.client.post("/infill", json=body)


def test_gaps(filler: Any) -> None:
    found = fill(filler, prompt="    return ").json()
    begin = filler.model.tokenizer.bos_token
    expected = "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n\nprint(add(1, 2))<|fim_middle|>"
    assert found["prompt"] == begin + expected
    assert found["tokens_predicted"] <= 4
    files = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y = 2\n"}]
    found = fill(filler, input_extra=files).json()
    before = "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>tmp\ny = 2\n<|file_sep|>file\n"
    assert found["prompt"] == begin + before + expected.replace("    return ", "")
    assert [event["stop"] for event in stream_of(fill(filler, stream=True))][-1] is True


def stream_of(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def test_texts_around_a_gap_are_cut_to_the_context(filler: Any) -> None:
    context = filler.model.context
    before, after = (" ".join(random.choices("abcdefgh", k=context)) for _ in range(2))
    extra = [{"filename": f"{i}", "text": "z " * context} for i in range(3)]
    for fields, room in (({"n_predict": 16}, context - 16), ({"n_predict": None}, context - context // 8)):
        found = fill(filler, input_prefix=before, input_suffix=after, input_extra=extra, **fields).json()
        assert room - 4 <= found["tokens_evaluated"] <= room
        prompt = found["prompt"]
        kept, rest = prompt.split("<|fim_prefix|>")[1].split("<|fim_suffix|>")
        assert before.endswith(kept)
        assert len(kept) > len(before) // 2
        assert after.startswith(rest.removesuffix("<|fim_middle|>"))
        assert len(rest) > len(after) // 8
    found = fill(filler, input_prefix="a", input_suffix="b", input_extra=extra, n_predict=16).json()
    assert found["prompt"].endswith("z <|file_sep|>file\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>")
    assert context - 17 <= found["tokens_evaluated"] <= context - 16


def test_gaps_that_cannot_be_filled(filler: Any, demo: Any) -> None:
    answer = fill(demo)
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "unsupported_endpoint")
    extra: list[Any] = [{}, [{}], [{"filename": "x"}], [{"text": 4}], [7], [{"filename": 1, "text": "x"}]]
    bad: list[dict[str, Any]] = [{"input_prefix": None}, {"input_suffix": None}, {"prompt": 3}]
    for fields in (*bad, *({"input_extra": wrong} for wrong in extra)):
        assert fill(filler, **fields).status_code == 400, fields


def test_marks_of_vocabularies() -> None:
    class Some:
        names: tuple[str, ...]

        def encode(self, text: str, **_: Any) -> list[int]:
            return [self.names.index(text)] if text in self.names else [1, 2]

    found: Any = Some()
    found.names = ("<PRE>", "<SUF>", "<MID>")
    assert infill.marks_of(found) == infill.Marks(0, 1, 2, None, None, (0, 1, 2))
    found.names = ("<PRE>", "<SUF>")
    assert infill.marks_of(found) is None
