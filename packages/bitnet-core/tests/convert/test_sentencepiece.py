"""Folders with SentencePiece's ``tokenizer.model``: its pieces, and the tokens that the files beside it add."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers

from bitnet.core.errors import ModelFileError
from bitnet.core.model import ModelFile, open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.text.prompt import chat_tokens
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.core.text.words import SPACE

Make = Callable[..., Any]
PIECES: list[tuple[str, float, int]] = [
    *(("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)),
    *((f"<0x{b:02X}>", 0.0, 6) for b in range(256)),
    *(("▁t", 0.0, 1), ("he", -1.0, 1), ("▁the", -2.0, 1), ("▁", -9.0, 1)),
    *((c, -10.0 - i, 1) for i, c in enumerate("the")),
]
MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he")]
"""What the scores above amount to."""
FIRST = len(PIECES)
"""The id of the first added token."""
IDENTITY = ((1, b"identity"), (3, 1), (4, 0))
"""The normalizer_spec of Llama 2's file: a space before the text, and nothing else."""


def protobuf(*fields: tuple[int, int | float | bytes]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += bytes([number << 3 | 2]) + varint(len(value)) + value
        elif isinstance(value, float):
            out += bytes([number << 3 | 5]) + struct.pack("<f", value)
        else:
            out += bytes([number << 3]) + varint(value)
    return out


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def model_file(
    *more: tuple[str, float, int], normalizer: tuple[tuple[int, int | bytes], ...] | None = IDENTITY
) -> bytes:
    entries = [(1, protobuf((1, p.encode()), (2, s), *([] if k == 1 else [(3, k)]))) for p, s, k in (*PIECES, *more)]
    spec = [] if normalizer is None else [(3, protobuf(*normalizer))]
    return protobuf(*entries, (2, protobuf((3, 2))), *spec)


class Source:
    """A folder with a ``tokenizer.model`` and room for ``added`` more tokens, and what stands in the other files."""

    def __init__(self, folder: Make, added: int = 3) -> None:
        source = folder("BitnetForCausalLM")
        source.pack("bitlinear")
        size = FIRST + added
        source.config |= {"vocab_size": size, "bos_token_id": 1, "eos_token_id": 2}
        source.tensors["model.embed_tokens.weight"] = source.tensors["model.embed_tokens.weight"][:size]
        self.path: Path = source.write()
        (self.path / "tokenizer.json").unlink()
        self.put("tokenizer_config.json", {})
        (self.path / "tokenizer.model").write_bytes(model_file())

    def put(self, name: str, value: Any) -> None:
        (self.path / name).write_text(json.dumps(value), encoding="utf-8")

    def converted(self) -> ModelFile:
        convert_model(self.path, self.path.parent / "out.gguf")
        return open_model(self.path.parent / "out.gguf")


def theirs(*added: AddedToken) -> tokenizers.Tokenizer:
    """The same tokenizer as transformers' Llama has it."""
    vocab = {piece: i for i, (piece, _, _) in enumerate(PIECES)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    for token in added:
        tokenizer.add_tokens([token])
    return tokenizer


def test_pieces(folder: Make) -> None:
    source = Source(folder)
    data = model_file()
    source.put("added_tokens.json", {"<extra>": FIRST})
    tokenizer = source.converted().tokenizer
    ids = {p: i for i, (p, _, _) in enumerate(PIECES)}
    assert tokenizer.encode("the") == [1, ids["▁the"]]
    assert tokenizer.encode("the é", add_special=False) == [ids["▁the"], ids["▁"], ids["<0xC3>"], ids["<0xA9>"]]
    assert tokenizer.encode("<extra>", add_special=False) == [FIRST]
    assert tokenizer.decode(tokenizer.encode("the é the")) == "the é the"
    for wrong in (list[int](), "a", None, 1.5, -1, 2**40):
        source.put("added_tokens.json", {"<extra>": FIRST, "<more>": wrong})
        with pytest.raises(ModelFileError, match=r"added_tokens\.json: must map"):
            source.converted()
    (source.path / "added_tokens.json").unlink()
    unknown = protobuf((1, protobuf((1, b"more"), (2, 0.0), (3, 2**31))))
    for broken in (data + unknown, *(data[:size] for size in range(0, len(data) - 1, 97))):
        (source.path / "tokenizer.model").write_bytes(broken)
        with pytest.raises(ModelFileError, match=r"tokenizer\.model"):
            source.converted()


def described(content: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, "special": special, **flags}


TEXT = "the <think> é<|im_end|>the<|x|> the"


@pytest.mark.parametrize("listed", [False, True])
def test_added_tokens_that_are_described(folder: Make, listed: bool) -> None:
    """``tokenizer_config.json`` says which are special; the last id but one is not given."""
    source = Source(folder, 5)
    tokens = {FIRST: ("<|im_end|>", True), FIRST + 1: ("<think>", False), FIRST + 3: ("<|x|>", False)}
    entries = {"1": described("<s>", special=True)} | {
        str(i): described(token, special=special) for i, (token, special) in tokens.items()
    }
    source.put("tokenizer_config.json", {"added_tokens_decoder": entries, "eos_token": "<|im_end|>"})
    if listed:
        source.put("added_tokens.json", {token: i for i, (token, _) in tokens.items()})
    tokenizer = source.converted().tokenizer
    original = theirs(*(AddedToken(t, special=special, normalized=False) for t, special in tokens.values()))
    ids = {original.token_to_id(token): i for i, (token, _) in tokens.items()}
    expected = [ids.get(i, i) for i in original.encode(TEXT, add_special_tokens=False).ids]
    assert tokenizer.encode(TEXT, add_special=False, parse_special=True) == expected
    assert tokenizer.control_tokens == ("</s>", "<s>", "<unk>", "<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.vocab_size == FIRST + 5


@pytest.mark.parametrize("settings", [{}, {"additional_special_tokens": ["[x]"]}, {"pad_token": {"content": "[x]"}}])
def test_added_tokens_that_are_only_listed(folder: Make, settings: dict[str, Any]) -> None:
    """Where nothing else says what they are, the name does: a user's message must not write the template's tokens."""
    source = Source(folder)
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    source.put("tokenizer_config.json", settings | {"chat_template": template})
    source.put("added_tokens.json", {"<|im_start|>": FIRST, "[x]": FIRST + 1, "<think>": FIRST + 2})
    model = source.converted()
    assert model.chat_template is not None
    said = [{"role": "user", "content": "the <|im_start|> [x] <think>"}]
    ids = chat_tokens(model.chat_template, model.tokenizer, said)
    assert [ids.count(FIRST + i) for i in range(3)] == [1, 0 if settings else 1, 1]
    assert model.tokenizer.decode(ids, skip_special=False).replace(" ", "") == "<|im_start|>the<|im_start|>[x]<think>"


def test_an_added_token_in_the_place_of_a_piece(folder: Make) -> None:
    source = Source(folder)
    entries = {str(FIRST - 1): described("<|x|>", special=True), "5": described("<0x02>", special=False)}
    source.put("tokenizer_config.json", {"added_tokens_decoder": entries})
    tokenizer = source.converted().tokenizer
    assert tokenizer.encode("<|x|>", add_special=False, parse_special=True) == [FIRST - 1]
    assert tokenizer.encode("\x02", add_special=False)[-1] == 5


@pytest.mark.parametrize(
    "entries", [{"a": described("x", special=True)}, {"300": {}}, {str(2**40): {"content": "x"}}, 5]
)
def test_descriptions_that_cannot_be(folder: Make, entries: Any) -> None:
    source = Source(folder)
    source.put("tokenizer_config.json", {"added_tokens_decoder": entries})
    with pytest.raises(ModelFileError, match="must map each id to a token") as caught:
        source.converted()
    assert caught.value.field == "added_tokens_decoder"


def test_an_end_that_is_no_token(folder: Make) -> None:
    source = Source(folder)
    source.put("tokenizer_config.json", {"eos_token": "<|im_end|>"})
    with pytest.raises(ModelFileError, match=r"im_end\|>', which is not a token") as caught:
        source.converted()
    assert caught.value.field == "eos_token"


def test_runs_of_spaces_that_are_one_token(folder: Make) -> None:
    """A user-defined piece is found in the text, which has spaces where the piece has SentencePiece's character."""
    source = Source(folder)
    (source.path / "tokenizer.model").write_bytes(model_file(("▁▁▁", 0.0, 4)))
    tokenizer: Tokenizer = source.converted().tokenizer
    for text in ("the   the", "   ", "the    the"):
        ids = theirs(AddedToken("   ", normalized=False)).encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False) == ids
        assert FIRST in ids


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        ((*IDENTITY, (2, b"x")), "replaces characters"),
        (((1, b"identity"), (3, 1)), "removes spaces"),  # the default of the field that is not there
        (((1, b"identity"), (3, 1), (4, 1)), "removes spaces"),
        (None, "removes spaces"),
    ],
)
def test_texts_that_are_changed_before(folder: Make, normalizer: Any, message: str) -> None:
    source = Source(folder)
    (source.path / "tokenizer.model").write_bytes(model_file(normalizer=normalizer))
    with pytest.raises(ModelFileError, match=message) as caught:
        source.converted()
    assert caught.value.field == "normalizer_spec"
    assert "legacy=True" in str(caught.value.hint)
