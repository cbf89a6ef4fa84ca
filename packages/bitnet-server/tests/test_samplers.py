"""``samplers`` and ``logit_bias``, as llama.cpp's server takes them: the options that they become."""

from __future__ import annotations

from typing import Any

import pytest

from bitnet.server.generation.sampling import sampling_options
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

SAMPLING = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2, "presence_penalty": 0.5}
NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}


def options(demo: Any, **fields: Any) -> dict[str, Any]:
    return dict(sampling_options(Fields(fields), demo.model.tokenizer, {}, max_tokens=1))


@pytest.mark.parametrize(
    ("samplers", "kept"),
    [
        (None, set(NEUTRAL)),
        ([], set(NEUTRAL)),
        (["top_k"], {"top_k"}),
        ("kt", {"top_k", "temperature"}),
        ("edkypmxt", set(NEUTRAL)),
        (["temperature", "top_p"], {"top_p", "temperature"}),
        (["dry", "penalties", "xtc"], {"repetition_penalty", "presence_penalty"}),
        (["dry"], set()),
    ],
)
def test_a_sampler_that_is_left_out_is_off(demo: Any, samplers: Any, kept: set[str]) -> None:
    found = options(demo, samplers=samplers, **SAMPLING)
    given = {**SAMPLING, "repetition_penalty": SAMPLING["repeat_penalty"]}
    assert {name: found[name] for name in NEUTRAL} == {n: given[n] if n in kept else NEUTRAL[n] for n in NEUTRAL}


@pytest.mark.parametrize(
    "samplers", [["top_p", "top_k"], ["min_p", "penalties"], ["top_k", "top_k"], "mt?", ["infill"]]
)
def test_other_orders_and_unknown_samplers_are_refused(demo: Any, samplers: Any) -> None:
    with pytest.raises(RequestError, match="samplers"):
        options(demo, samplers=samplers)


def test_biases_of_ids_and_texts(demo: Any) -> None:
    tokenizer = demo.model.tokenizer
    words = tokenizer.encode("hello there", add_special=False)
    never = -float("inf")
    assert options(demo, logit_bias=[[7, -1.5], ["hello there", False]])["logit_bias"] == {
        7: -1.5,
        **dict.fromkeys(words, never),
    }
    assert options(demo, logit_bias={"7": 2, "hello there": -100})["logit_bias"] == {
        7: 2,
        **dict.fromkeys(words, -100),
    }
    (dash,) = options(demo, logit_bias={"-": 3})["logit_bias"].items()
    assert (tokenizer.token_bytes(dash[0]), dash[1]) == (b"-", 3)
    for wrong in (
        [7],
        [[7]],
        [[7, "x"]],
        [[7, True]],
        [[-1, 1]],
        [["", 1]],
        [[1.5, 1]],
        {"-7": 1},
        {"": 1},
        [["x" * 300, 1]],
    ):
        with pytest.raises(RequestError, match="logit_bias"):
            options(demo, logit_bias=wrong)


def test_a_forbidden_token_never_comes(demo: Any) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 1}
    seen: list[int] = []
    for _ in range(3):
        answer = demo.client.post("/v1/completions", json={**body, "logit_bias": [[t, False] for t in seen]}).json()
        (token,) = demo.model.tokenizer.encode(answer["choices"][0]["text"], add_special=False)
        assert token not in seen
        seen.append(token)
