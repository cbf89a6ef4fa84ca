"""Vectors of texts: what they are of the model's own answers, alone and among others, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bitnet.core import ContextFullError, Embedder, InvalidInputError, Model, load_embedder, load_model
from bitnet.core.embedder import plan
from bitnet.core.errors import BitNetError
from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import open_model

STEP = 16
TOOLS = Path(__file__).parents[4] / "tools"


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def embedder() -> Iterator[Embedder]:
    """The demo model, with steps so short that texts take several."""
    with load_embedder(device="cpu", kv_dtype="f32", step_tokens=STEP) as made:
        yield made


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model(device="cpu", kv_dtype="f32") as made:
        yield made


def texts(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    vocabulary = open_model(default_model_path()).config.vocab_size
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


def test_the_last_vector_tells_the_next_token(embedder: Embedder, model: Model, rng: np.random.Generator) -> None:
    """In float64, the head's product with it gives the model's own log-probabilities."""
    file = open_model(default_model_path())
    head = np.asarray(file.weights["output"].load(), np.float64)
    for text in texts(rng, 1, 9, STEP, STEP + 1, 100):
        (vector,) = embedder.embed([text], pooling="last", normalize=False)
        logits = head @ vector.astype(np.float64) * file.config.logit_scale
        wanted = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        (step,) = model.generate(text, max_tokens=1, logprobs=5, ignore_eos=True).logprobs or ()
        for token, logprob in step.top:
            assert abs(wanted[token] - logprob) < 1e-3


def test_poolings_are_of_the_same_vectors(embedder: Embedder, rng: np.random.Generator) -> None:
    """What a causal model knows after each token is the last vector of the text up to there."""
    (text,) = texts(rng, 2 * STEP + 5)
    each = embedder.embed([text[: i + 1] for i in range(len(text))], pooling="last", normalize=False)
    (first,) = embedder.embed([text], pooling="cls", normalize=False)
    (mean,) = embedder.embed([text], pooling="mean", normalize=False)
    np.testing.assert_array_equal(first, each[0])
    np.testing.assert_allclose(mean, each.astype(np.float64).mean(axis=0), rtol=0, atol=1e-5 * abs(each).max())


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_texts_get_the_vectors_they_get_alone(embedder: Embedder, rng: np.random.Generator, pooling: str) -> None:
    several = texts(rng, *rng.integers(1, 3 * STEP, 20))
    together = embedder.embed(several, pooling=pooling)  # type: ignore[arg-type]
    alone = np.concatenate([embedder.embed([text], pooling=pooling) for text in several])  # type: ignore[arg-type]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    assert len(np.unique(together.round(4), axis=0)) > 15


def test_recurrent_layers(tmp_path: Path, rng: np.random.Generator) -> None:
    """A text of several steps goes on from its state; texts that share a step do not share states."""
    file = tmp_path / "hybrid.gguf"
    made = (sys.executable, TOOLS / "make_random_model.py", "--preset", "bonsai-27b-small", file)
    subprocess.run(made, check=True, capture_output=True)
    several = rng.permutation([1, 3, 40, 40, 150, 20]).tolist()
    given = [rng.integers(0, 256, length).tolist() for length in several]
    with load_embedder(file, device="cpu", step_tokens=STEP, context=256) as embedder:
        together = embedder.embed(given)
        np.testing.assert_array_equal(together, np.concatenate([embedder.embed([text]) for text in given]))
    with load_embedder(file, device="cpu", step_tokens=256, context=256) as embedder:
        whole = embedder.embed(given)
    np.testing.assert_allclose(together, whole, rtol=0, atol=0.02)


def test_a_loaded_model_has_the_same_vectors(embedder: Embedder, model: Model) -> None:
    given = ["What is BitNet?", "Weather", "a " * 100]
    np.testing.assert_array_equal(model.embed(given), embedder.embed(given))
    assert model.embed([]).shape == (0, embedder.dimensions)


def test_a_closed_model_has_none() -> None:
    model = load_model(device="cpu")
    model.embed(["a"])
    model.close()
    with pytest.raises(BitNetError, match="closed"):
        model.embed(["a"])


def test_every_part_is_planned_once(rng: np.random.Generator) -> None:
    lengths = rng.integers(1, 4 * STEP, 300).tolist()
    steps = list(plan(lengths, STEP, 5))
    for step in steps:
        assert sum(part.stop - part.start for part in step) <= STEP
        assert len(step) <= 5
    covered = dict.fromkeys(range(len(lengths)), 0)
    for part in (part for step in steps for part in step):
        assert part.start == covered[part.text]  # in order
        covered[part.text] = part.stop
    assert list(covered.values()) == lengths


def test_long_texts_are_refused_or_cut(embedder: Embedder) -> None:
    long = "word " * 5000
    with pytest.raises(ContextFullError, match=r"text 1 has \d+ tokens; the context holds") as refused:
        embedder.embed(["short", long])
    assert refused.value.context == embedder.context
    cut = embedder.tokens(long, truncate=True)
    whole = embedder.tokenizer.encode(long)
    ends = whole[-1] in embedder.tokenizer.eos_ids
    assert len(cut) == embedder.context
    assert cut == [*whole[: embedder.context - ends], *whole[-1:] * ends]
    assert embedder.embed([long], truncate=True).shape == (1, embedder.dimensions)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("one text", "must be several"),
        ([[]], "text 0 has no tokens"),
        (["a", [5, 10**6]], r"text 1 has the token 1000000; there are \d+"),
        (["a", [-1]], "text 1 has the token -1"),
        (["a", 5], "text 1 is 5, neither text nor token ids"),
        ([["a"]], "neither text nor token ids"),
    ],
)
def test_bad_texts(embedder: Embedder, given: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        embedder.embed(given)  # type: ignore[arg-type]


def test_bad_options(embedder: Embedder) -> None:
    with pytest.raises(InvalidInputError, match="pooling is 'max'; it must be one of mean, cls, last"):
        embedder.embed(["a"], pooling="max")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="context is 1; for"):
        load_embedder(device="cpu", context=1)
    with pytest.raises(InvalidInputError, match="step_tokens is 0"):
        load_embedder(device="cpu", step_tokens=0)
