"""Files that would become another model without a word: a warning or an error says so. What others load is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGUFFile
from bitnet.core.model import open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.support import log
from bombs.base import GGUF


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Warnings, each as if it were the first."""
    monkeypatch.setattr(log, "_said", set())
    caplog.set_level(logging.WARNING, "bitnet")
    return caplog


@pytest.fixture
def packed(folder: Callable[..., Any]) -> Any:
    source = folder()
    source.pack("bitlinear")
    return source


def converted(source: Any, tmp_path: Path) -> GGUFFile:
    convert_model(source.write(), tmp_path / "out.gguf")
    return GGUFFile(tmp_path / "out.gguf")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_take_blanks(packed: Any, tmp_path: Path, said: Any, flag: str) -> None:
    converted(packed, tmp_path)
    assert said.text == ""
    packed.tokenizer.add_tokens([AddedToken("<mask>", special=True, **{flag: True})])
    packed.config["vocab_size"] = packed.size
    converted(packed, tmp_path)
    assert (
        "GGUF files have no key for lstrip, rstrip and single_word of added tokens. Blanks beside <mask>" in said.text
    )


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
OTHER = {"rope_type": "default", "rope_theta": 1_000_000.0}


def test_rotary_embeddings_by_layer(packed: Any, tmp_path: Path) -> None:
    """As transformers 5 writes them: a mapping for each type of layer."""
    packed.config["rope_parameters"] = LINEAR
    expected = converted(packed, tmp_path)
    packed.config["rope_parameters"] = {"full_attention": LINEAR}
    again = converted(packed, tmp_path)
    key = "bitnet-b1.58.rope.freq_base"
    assert (again.metadata[key], "rope_freqs.weight" in again.tensors) == (expected.metadata[key], True)
    for key in ("rope_parameters", "rope_scaling"):
        packed.config.pop("rope_parameters", None)
        for different in (
            {"full_attention": LINEAR, "sliding_attention": OTHER},
            {"full_attention": LINEAR, "factor": 2},
        ):
            packed.config[key] = different
            with pytest.raises(ModelFileError, match="differs between layers") as raised:
                converted(packed, tmp_path)
            assert raised.value.field == key


@pytest.mark.parametrize("kinds", [["full_attention", "sliding_attention"], ["linear_attention"], "full_attention", 5])
def test_layers_of_other_kinds(packed: Any, tmp_path: Path, kinds: Any) -> None:
    packed.config["layer_types"] = ["full_attention"] * 2
    converted(packed, tmp_path)
    packed.config["layer_types"] = kinds
    with pytest.raises(ModelFileError, match="only full_attention is supported") as raised:
        converted(packed, tmp_path)
    assert raised.value.field == "layer_types"


@pytest.mark.parametrize("template", ["", " \n\t"])
def test_an_empty_chat_template_is_none(packed: Any, tmp_path: Path, template: str) -> None:
    packed.settings["chat_template"] = template
    assert "tokenizer.chat_template" not in converted(packed, tmp_path).metadata
    bomb = GGUF()
    bomb.metadata["tokenizer.chat_template"] = template
    assert open_model(bomb.write(tmp_path)).chat_template is None


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n[INST]{% endfor %}<->"


@pytest.mark.parametrize(
    ("kind", "warned"), [(3, False), (4, False), (1, True), (None, True)], ids=["control", "user", "normal", "no types"]
)
def test_a_template_of_tokens_that_text_never_becomes(
    tmp_path: Path, said: Any, kind: int | None, warned: bool
) -> None:
    bomb = GGUF()
    bomb.vocabulary(["<|im_start|>", "<|im_end|>", "[INST]", "<|other|>"], kind=kind or 1)
    if kind is None:
        del bomb.metadata["tokenizer.ggml.token_type"]
    bomb.metadata["tokenizer.chat_template"] = TEMPLATE
    assert open_model(bomb.write(tmp_path)).chat_template is not None
    assert ("the chat template writes <|im_start|>, [INST], but token_type marks them neither" in said.text) == warned
    assert "other" not in said.text


def test_a_word_that_merges_make_is_no_matter(tmp_path: Path, said: Any) -> None:
    bomb = GGUF()
    bomb.vocabulary(["<-", "<->"], merges=["< -", "<- >"])
    bomb.metadata["tokenizer.chat_template"] = TEMPLATE
    assert open_model(bomb.write(tmp_path)).chat_template is not None
    assert said.text == ""


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "eom"])
@pytest.mark.parametrize("value", [258, 2**31, 2**32 - 1, -1, -7])
def test_an_id_of_no_token_counts_as_none(tmp_path: Path, said: Any, key: str, value: int) -> None:
    bomb = GGUF()
    bomb.metadata[f"tokenizer.ggml.{key}_token_id"] = value
    tokenizer = open_model(bomb.write(tmp_path)).tokenizer
    assert tokenizer.bos_id == (None if key == "bos" else 256)
    assert tokenizer.eos_ids == (set() if key == "eos" else {257})
    ignored = f"tokenizer.ggml.{key}_token_id is {value}, but there are 258 tokens: it is ignored" in said.text
    assert ignored == (value not in (-1, 2**32 - 1))


NAMES = [f"general.{key}" for key in ("name", "author", "organization", "description", "license", "tags")]


@pytest.mark.parametrize("key", NAMES)
def test_names_that_are_not_utf_8(tmp_path: Path, key: str) -> None:
    """As other programs, which do not look; what has a meaning must be UTF-8."""
    bomb = GGUF()
    bomb.metadata[key] = ["Gr@@e", "good"] if key == "general.tags" else "Gr@@e"
    path = bomb.write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"Gr@@e", b"Gr\xf6\xdfe"))
    model = open_model(path)
    assert model.metadata[key] == (["Gr\ufffd\ufffde", "good"] if key == "general.tags" else "Gr\ufffd\ufffde")
    convert_model(path, tmp_path / "out.gguf", dtype="q2_0")
    assert GGUFFile(tmp_path / "out.gguf").metadata[key] == model.metadata[key]
    for meaning in ("general.architecture", "tokenizer.ggml.pre", "tokenizer.chat_template"):
        other = GGUF()
        other.metadata[meaning] = "Gr@@e"
        path = other.write(tmp_path)
        path.write_bytes(path.read_bytes().replace(b"Gr@@e", b"Gr\xf6\xdfe"))
        with pytest.raises(ModelFileError, match="is not valid UTF-8"):
            GGUFFile(path)


@pytest.mark.parametrize(("fast", "slow", "warnings"), [(32.0, 1.0, 0), (24.0, 1.0, 1), (32.0, 2.0, 1), (24.0, 2.0, 2)])
def test_yarn_that_llama_cpp_reads_otherwise(
    packed: Any, tmp_path: Path, said: Any, fast: float, slow: float, warnings: int
) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
    packed.config["rope_parameters"] = yarn | {"beta_fast": fast, "beta_slow": slow}
    made = converted(packed, tmp_path)
    assert made.metadata["bitnet-b1.58.rope.scaling.yarn_beta_fast"] == fast
    assert said.text.count("llama.cpp ignores yarn_beta_") == warnings
    said.clear()
    convert_model(tmp_path / "out.gguf", tmp_path / "again.gguf")  # from GGUF, too
    assert said.text.count("llama.cpp ignores yarn_beta_") == warnings


def test_a_name_of_a_pre_tokenizer_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    bomb = GGUF()
    bomb.metadata["tokenizer.ggml.pre"] = "falcon_e"
    convert_model(bomb.write(tmp_path), tmp_path / "out.gguf", dtype="q2_0")
    assert GGUFFile(tmp_path / "out.gguf").metadata["tokenizer.ggml.pre"] == "llama-bpe"
    text = "1234567 It's naïve"
    models = [open_model(path).tokenizer.encode(text) for path in (tmp_path / "bomb.gguf", tmp_path / "out.gguf")]
    assert models[0] == models[1]
    assert np.all(np.array(models[0]) < 300)


@pytest.mark.parametrize("value", [np.arange(3, dtype=np.int32), np.full(2, 7, np.float32), ["a", "b"], "x", True, 7])
@pytest.mark.parametrize("key", ["tokenizer.ggml.pre", "split.no", "split.count", "rope.scaling.yarn_beta_fast"])
def test_a_value_of_any_kind_is_an_error_or_none(tmp_path: Path, key: str, value: Any) -> None:
    """An array compares with a value by element, which is no truth value."""
    bomb = GGUF()
    if key.startswith("rope."):
        key = f"{bomb.metadata['general.architecture']}.{key}"
    bomb.metadata |= {"split.count": 2 if key == "split.no" else 0, key: value}
    path = bomb.write(tmp_path)
    with suppress(ModelFileError):
        convert_model(path, tmp_path / "out.gguf")
