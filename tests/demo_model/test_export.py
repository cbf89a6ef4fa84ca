"""The demo model's tokenizer and its export: what was trained is what the file holds, without PyTorch."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.gguf.ternary import unpack_ternary
from bitnet.core.hal import TernaryWeight
from bitnet.core.model import ModelFile, open_model
from demo_model import tokens
from demo_model.corpus import Message, documents
from demo_model.export import export
from demo_model.shape import Shape

SHAPE = Shape(layers=2)
SIZES = {
    "attn_q": (384, 384),
    "attn_k": (128, 384),
    "attn_v": (128, 384),
    "attn_output": (384, 384),
    "ffn_gate": (1024, 384),
    "ffn_up": (1024, 384),
    "ffn_down": (384, 1024),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training leaves, with random weights and a tokenizer learnt from little text."""
    path = tmp_path_factory.mktemp("trained")
    tokens.train(SHAPE.vocab_size, seed=1, count=4_000).save(str(path / "tokenizer.json"))
    rng = np.random.default_rng()
    arrays: dict[str, Any] = {
        "token_embd": rng.standard_normal((SHAPE.vocab_size, 384)).astype(np.float16),
        "output_norm": rng.random(384, np.float32),
    }
    for layer in range(SHAPE.layers):
        for name, size in SIZES.items():
            arrays[f"blk.{layer}.{name}.codes"] = rng.integers(-1, 2, size, np.int8)
            arrays[f"blk.{layer}.{name}.scale"] = rng.random((), np.float32)
        for name, width in (("attn_norm", 384), ("attn_sub_norm", 384), ("ffn_norm", 384), ("ffn_sub_norm", 1024)):
            arrays[f"blk.{layer}.{name}"] = rng.random(width, np.float32)
    np.savez(path / "weights.npz", **arrays)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelFile:
    export(folder, folder / "model.gguf")
    return open_model(folder / "model.gguf")


def test_the_file_holds_the_weights_exactly(folder: Path, model: ModelFile) -> None:
    config = model.config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 6, 2, 64)
    assert (config.context_length, config.rope_theta, config.rope_style) == (1024, 10_000, "neox")
    assert (config.activation, config.sub_norms, config.tied_embeddings) == ("relu2", True, True)
    with np.load(folder / "weights.npz") as arrays:
        for name, weight in model.weights.items():
            if isinstance(weight, TernaryWeight):
                data = weight.load()
                assert data.scale == float(arrays[f"{name}.scale"])
                np.testing.assert_array_equal(
                    unpack_ternary(data.codes, weight.shape[1]), arrays[f"{name}.codes"], strict=True
                )
            elif name != "output":
                np.testing.assert_array_equal(weight.load(), arrays[name], strict=True)
        held = {name.removesuffix(".codes") for name in arrays.files if not name.endswith(".scale")}
    assert held == set(model.weights) - {"output"}


def test_the_files_tokenizer_is_the_trained_one(folder: Path, model: ModelFile) -> None:
    trained = tokens.load(folder / "tokenizer.json")
    texts = [text for document in islice(documents(2, 0), 400) for _, text in document]
    texts += ["", " ", "12 345", "a  1\n\n 2 ", "naïve “quotes” 日本 😀", "I'll it's\tTAB", "x=-3+ 4"]
    for text in texts:
        assert model.tokenizer.encode(text, add_special=False) == trained.encode(text).ids, text
        assert model.tokenizer.decode(model.tokenizer.encode(text), skip_special=True) == text
    assert tokens.EOT not in model.tokenizer.encode("<|eot_id|>")
    assert not [merge for merge in tokens.merges(trained) if any(c.isdigit() for c in merge)]


def test_a_rendered_conversation_is_what_the_model_was_trained_on(folder: Path, model: ModelFile) -> None:
    document: list[Message] = [
        ("system", "You are a fox."),
        ("user", "What is 17 + 25?"),
        ("assistant", "17 + 25 = 42."),
        ("user", " Thanks! "),
    ]
    (ids,) = tokens.encode(tokens.load(folder / "tokenizer.json"), [[*document[:3], ("user", "Thanks!")]])
    assert model.chat_template is not None
    text = model.chat_template.render([{"role": role, "content": content} for role, content in document])
    rendered = model.tokenizer.encode(text, add_special=False, parse_special=True)
    assert rendered == [i & (tokens.TAUGHT - 1) for i in ids] + [tokens.ASSISTANT]
    assert model.tokenizer.eos_ids == {tokens.EOT}
    assert model.tokenizer.encode("a")[0] == tokens.BOS


def test_only_answers_are_taught(folder: Path) -> None:
    tokenizer = tokens.load(folder / "tokenizer.json")
    (ids,) = tokens.encode(tokenizer, [[("user", "Hello"), ("assistant", "Good day")]])
    taught = [i & (tokens.TAUGHT - 1) for i in ids if i & tokens.TAUGHT]
    assert taught == [*tokenizer.encode("Good day").ids, tokens.EOT]
    (raw,) = tokens.encode(tokenizer, [[("text", "Once upon a time")]])
    assert [i & tokens.TAUGHT > 0 for i in raw] == [False] + [True] * (len(raw) - 1)


def test_rows_hold_whole_documents(folder: Path) -> None:
    tokenizer = tokens.load(folder / "tokenizer.json")
    rows = tokens.packed(tokenizer, documents(0, 0), 512, 40)
    assert rows.shape == (40, 512)
    plain = rows & (tokens.TAUGHT - 1)
    source = {tuple(ids) for ids in tokens.encode(tokenizer, list(islice(documents(0, 0), 2_000)))}
    for row, codes in zip(rows.tolist(), plain.tolist(), strict=True):
        assert codes[0] == tokens.BOS
        used = len(row) - next((i for i, code in enumerate(reversed(codes)) if code != tokens.PAD), len(row))
        begins = [i for i in range(used) if codes[i] == tokens.BOS] + [used]
        for a, b in pairwise(begins):
            assert tuple(row[a:b]) in source
    assert (plain == tokens.PAD).mean() < 0.05
