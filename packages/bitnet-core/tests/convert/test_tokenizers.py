"""Variants of a folder's tokenizer files: each gives a model that runs, or a clear error during conversion."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from bitnet.core import load_model
from bitnet.core.errors import InvalidInputError, ModelFileError
from bitnet.core.gguf import TensorSource, write_gguf
from bitnet.core.model import ModelFile, open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.text.words import HUNYUAN_WORDS, QWEN2_WORDS, QWEN35_WORDS, SPACE

Make = Callable[..., Any]
TEXT = "The cat's 1234 mats,\n\n  naïve 😀 the rat  <x> "


class Source:
    """A model folder whose ``tokenizer.json`` and ``tokenizer_config.json`` can be changed."""

    def __init__(self, folder: Make, tmp_path: Path) -> None:
        source = folder()
        source.pack("autobitlinear")
        self.path: Path = source.write()
        self.target = tmp_path / "out.gguf"
        self.tokenizer: dict[str, Any] = json.loads((self.path / "tokenizer.json").read_text(encoding="utf-8"))
        self.settings: dict[str, Any] = copy.deepcopy(source.settings)
        self.config: dict[str, Any] = source.config

    def converted(self) -> ModelFile:
        (self.path / "tokenizer.json").write_text(json.dumps(self.tokenizer), encoding="utf-8")
        (self.path / "tokenizer_config.json").write_text(json.dumps(self.settings), encoding="utf-8")
        (self.path / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        convert_model(self.path, self.target)
        return open_model(self.target)

    def theirs(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(json.dumps(self.tokenizer))

    def sentencepiece(self) -> None:
        """A vocabulary with byte fallback in the place of the byte-level one, as Llama 2's."""
        special = ["<unk>", "<s>", "</s>"]
        pieces = [*special, *(f"<0x{b:02X}>" for b in range(256)), SPACE, *"thecarm", f"{SPACE}t", "he", f"{SPACE}the"]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        self.tokenizer |= {
            "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(special)],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]},
            "pre_tokenizer": None,
            "model": {
                "type": "BPE",
                "unk_token": "<unk>",
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": {piece: i for i, piece in enumerate(pieces)},
                "merges": [f"{SPACE} t", "h e", f"{SPACE}t he"],
            },
        }
        self.settings |= {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def source(folder: Make, tmp_path: Path) -> Source:
    return Source(folder, tmp_path)


def no_merges(source: Source) -> None:
    source.tokenizer["model"]["merges"] = []


def cut_and_padded_for_training(source: Source) -> None:
    source.tokenizer["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    source.tokenizer["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }


def a_token_of_the_user(source: Source) -> None:
    added = source.tokenizer["added_tokens"]
    added.append(added[0] | {"id": added[-1]["id"] + 1, "content": "<x>", "special": False})


def an_id_left_out(source: Source) -> None:
    added = source.tokenizer["added_tokens"]
    added.append(added[0] | {"id": added[-1]["id"] + 3, "content": "<x>", "special": False})


def a_name_of_padding(source: Source) -> None:
    """The tokens that fill up a vocabulary are named so."""
    added = source.tokenizer["added_tokens"]
    added.append(added[0] | {"id": added[-1]["id"] + 1, "content": f"[PAD{source.config['vocab_size'] - 1}]"})


def merges_as_text(source: Source) -> None:
    source.tokenizer["model"]["merges"] = [" ".join(pair) for pair in source.tokenizer["model"]["merges"]]


def fallback_to_bytes(source: Source) -> None:
    source.sentencepiece()


def fallback_without_a_prefix(source: Source) -> None:
    source.sentencepiece()
    source.tokenizer["normalizer"] = source.tokenizer["normalizer"]["normalizers"][1]


def fallback_without_unknown(source: Source) -> None:
    source.sentencepiece()
    source.tokenizer["model"]["unk_token"] = None


def like_qwen(source: Source) -> None:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
    source.tokenizer |= {"normalizer": {"type": "NFC"}, "decoder": level}
    source.tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    source.tokenizer["model"]["ignore_merges"] = False


def like_qwen35(source: Source) -> None:
    like_qwen(source)
    source.tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": QWEN35_WORDS}


def like_hunyuan(source: Source) -> None:
    """In the file, the pattern holds the characters of new lines themselves, as DeepSeek V3's does."""
    like_qwen(source)
    level = source.tokenizer["pre_tokenizer"]["pretokenizers"][1]
    patterns = [words.replace(r"\r", "\r").replace(r"\n", "\n") for words in HUNYUAN_WORDS]
    splits = [
        {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False} for words in patterns
    ]
    source.tokenizer["pre_tokenizer"]["pretokenizers"] = [*splits, level]
    source.tokenizer["normalizer"] = {"type": "Sequence", "normalizers": []}


def like_olmo(source: Source) -> None:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    source.tokenizer |= {"normalizer": {"type": "NFC"}, "decoder": level, "pre_tokenizer": level}
    source.tokenizer["model"]["ignore_merges"] = False


def unknown_instead_of_bytes(source: Source) -> None:
    source.sentencepiece()
    vocabulary = source.tokenizer["model"]["vocab"]
    kept = [token for token in vocabulary if not token.startswith("<0x")]
    source.tokenizer["model"]["vocab"] = {token: i for i, token in enumerate(kept)}


@pytest.mark.parametrize(
    "change",
    [
        no_merges,
        cut_and_padded_for_training,
        a_token_of_the_user,
        an_id_left_out,
        a_name_of_padding,
        merges_as_text,
        fallback_to_bytes,
        fallback_without_a_prefix,
        fallback_without_unknown,
        unknown_instead_of_bytes,
        like_qwen,
        like_qwen35,
        like_hunyuan,
        like_olmo,
    ],
)
def test_what_is_converted_runs(source: Source, change: Callable[[Source], None]) -> None:
    change(source)
    model = source.converted()
    theirs = source.theirs()
    theirs.no_truncation()
    theirs.no_padding()
    words = [*TEXT.split(" "), *theirs.get_vocab()]
    for text in (TEXT, *(" ".join(random.choices(words, k=9)) for _ in range(50))):
        if "<|" not in text and "s>" not in text and "<unk" not in text and "[PAD" not in text:
            expected = theirs.encode(text, add_special_tokens=False).ids
            assert model.tokenizer.encode(text, add_special=False) == expected
    assert model.tokenizer.vocab_size == source.config["vocab_size"]
    with load_model(source.target, device="cpu") as loaded:
        assert len(loaded.generate("the cat", max_tokens=3, ignore_eos=True).tokens) == 3


def model_of(kind: str, **values: Any) -> Callable[[Source], None]:
    def change(source: Source) -> None:
        vocabulary = list(source.tokenizer["model"]["vocab"])
        vocab: Any = [[t, -1.0] for t in vocabulary] if kind == "Unigram" else {t: i for i, t in enumerate(vocabulary)}
        source.tokenizer["model"] = {"type": kind, "vocab": vocab, **values}

    return change


def normalizer(**step: Any) -> Callable[[Source], None]:
    def change(source: Source) -> None:
        source.tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [step]}

    return change


def settings(key: str, value: Any) -> Callable[[Source], None]:
    def change(source: Source) -> None:
        source.settings[key] = value

    return change


def config(**values: Any) -> Callable[[Source], None]:
    def change(source: Source) -> None:
        source.config |= values

    return change


def a_merge_that_is_missing(source: Source) -> None:
    """SentencePiece would join what no merge here joins."""
    source.sentencepiece()
    source.tokenizer["model"]["merges"].remove("h e")


def a_byte_misspelt(source: Source) -> None:
    source.sentencepiece()
    source.tokenizer["model"]["vocab"]["<0xzz>"] = len(source.tokenizer["model"]["vocab"])


def merges_that_make_no_token(source: Source) -> None:
    """Tokens that only ``ignore_merges`` reaches, where Llama 3's way to cut words is not said to have it."""
    model = source.tokenizer["model"]
    model |= {"ignore_merges": False, "merges": []}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (model_of("Unigram", unk_id=0), "model"),
        (model_of("WordLevel", unk_token="!"), "model"),
        (model_of("WordPiece", unk_token="!", continuing_subword_prefix="##", max_input_chars_per_word=9), "model"),
        (normalizer(type="NFC"), "normalizer"),
        (normalizer(type="Replace", pattern={"String": "mat"}, content="dog"), "normalizer"),
        (a_merge_that_is_missing, "pre_tokenizer"),
        (a_byte_misspelt, "model"),
        (merges_that_make_no_token, "pre_tokenizer"),
        (settings("bos_token", 5), "bos_token"),
        (settings("bos_token", {"text": "a"}), "bos_token"),
        (settings("eos_token", {"content": ["a"]}), "eos_token"),
        (settings("bos_token", "<nowhere>"), "bos_token"),
        (settings("eos_token", {"content": "<nowhere>"}), "eos_token"),
        (settings("chat_template", "{% for x in %}"), "chat_template"),
        (settings("chat_template", [{"name": "default", "template": "{% if %}"}]), "chat_template"),
        (config(num_key_value_heads=3), "num_key_value_heads"),
        (config(head_dim=15), "head_dim"),
        (config(rms_norm_eps=1e-60), "rms_norm_eps"),
        (config(rope_theta=1e60), "rope_theta"),
        (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ],
)
def test_what_cannot_run_is_refused(source: Source, change: Callable[[Source], None], field: str) -> None:
    change(source)
    source.target.write_bytes(b"what was there")
    with pytest.raises(ModelFileError) as caught:
        source.converted()
    assert caught.value.field == field
    assert caught.value.path.parent == source.path
    assert source.target.read_bytes() == b"what was there"
    assert {p.name for p in source.target.parent.iterdir()} == {"model", "out.gguf"}


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_sentencepiece_without_legacy(source: Source, scheme: str) -> None:
    """GGUF has no key for where these put no space: the error says where, and what to do instead."""
    source.sentencepiece()
    legacy = source.theirs()
    source.tokenizer["normalizer"] = None
    source.tokenizer["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": scheme,
        "split": False,
    }
    with pytest.raises(
        ModelFileError, match="legacy=False" if scheme == "first" else "as saved by transformers 5"
    ) as caught:
        source.converted()
    assert caught.value.field == "pre_tokenizer"
    hint = str(caught.value.hint)
    assert "tokenizer.model" in hint
    differs = {
        text for text in ("the cat", " the cat", "the</s>cat") if ids(legacy, text) != ids(source.theirs(), text)
    }
    assert (" the cat" in differs) == ("begins with a space" in hint)
    assert ("the</s>cat" in differs) == ("follows a special token" in hint)
    assert "the cat" not in differs


def ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def with_ends(source: Source, *names: str) -> set[int]:
    """Let a model's configuration name these end tokens, besides ``<|eot_id|>``, whose name says that it is one."""
    added = source.tokenizer["added_tokens"]
    first = added[-1]["id"] + 1
    source.tokenizer["added_tokens"] += [added[0] | {"id": first + i, "content": name} for i, name in enumerate(names)]
    ends = [*range(first, first + len(names)), added[2]["id"]]
    assert added[2]["content"] == "<|eot_id|>"
    source.config["eos_token_id"] = ends
    source.settings["eos_token"] = names[0]
    return set(ends)


def test_all_ends_are_kept(source: Source) -> None:
    ends = with_ends(source, "<stop1>", "<stop2>", "<stop3>")
    assert source.converted().tokenizer.eos_ids >= ends


def test_more_ends_than_a_file_holds(source: Source) -> None:
    with_ends(source, "<stop1>", "<stop2>", "<stop3>", "<stop4>")
    with pytest.raises(ModelFileError, match="has 5 tokens; GGUF files hold three") as caught:
        source.converted()
    assert caught.value.field == "eos_token_id"


def test_text_that_no_file_can_hold(source: Source) -> None:
    source.settings["chat_template"] = "a\ud800"
    with pytest.raises(InvalidInputError, match=r"'tokenizer\.chat_template'.*not a Unicode character"):
        source.converted()
    assert not source.target.exists()


@pytest.mark.skipif(os.name == "nt", reason="names of files are text on Windows")
def test_a_folder_whose_name_is_no_text(source: Source) -> None:
    try:
        folder = source.path.rename(os.fsdecode(os.fsencode(source.path) + b"-\xff"))
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    convert_model(folder, source.target)
    assert open_model(source.target).config.name == "model-\ufffd"


def test_a_gguf_that_could_not_be_loaded_again(source: Source, tmp_path: Path) -> None:
    """What the source's fault is is found before the target has its name."""
    original = source.converted()
    tensors = {n: TensorSource(t.shape, t.type, original.gguf.data(t)) for n, t in original.gguf.tensors.items()}
    broken = tmp_path / "broken.gguf"
    write_gguf(broken, dict(original.metadata) | {"tokenizer.ggml.pre": "unheard of"}, tensors)
    with pytest.raises(ModelFileError, match="unheard of") as caught:
        convert_model(broken, tmp_path / "again.gguf")
    assert caught.value.path == broken
    assert caught.value.field == "metadata 'tokenizer.ggml.pre'"
    assert not (tmp_path / "again.gguf").exists()
