"""The index of merges on disk changes no token, is made again where it is damaged, and helps no broken file."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError, ModelFileError
from bitnet.core.gguf import GGUFFile
from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import open_model
from bitnet.core.support.cache import KernelCache
from bitnet.core.text import merge_index, merges, tokenizer
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.core.text.vocabulary import Vocabulary, vocabulary_from_metadata

AWKWARD = ["", " ", "\n\n", "a\x00b", "é", "e\u0301", "🎉", "日本語", "ffi ﬁ", "\u200b\ufeff", "x" * 300, "<|eot_id|>"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, for small vocabularies, too."""
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(merge_index, "MIN_MERGES", 1)
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def vocabulary() -> Vocabulary:
    return vocabulary_from_metadata(GGUFFile(default_model_path()).metadata, lambda key, message: AssertionError(key))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many merges were checked, each time that they were."""
    counts: list[int] = []

    def counted(listed: Any, ids: Any) -> Any:
        counts.append(len(listed))
        return merges.made_tokens(listed, ids)

    monkeypatch.setattr(merge_index, "made_tokens", counted)
    return counts


def digest() -> bytes:
    return b"of this metadata"


def test_an_index_changes_no_token(
    vocabulary: Vocabulary, random_text: Callable[[], str], folder: Path, made: list[int]
) -> None:
    whole = Tokenizer(vocabulary)
    assert whole.prepare()
    made.clear()
    writes = Tokenizer(vocabulary, digest=digest)
    assert len(list(folder.iterdir())) == 1
    for text in [*AWKWARD, *(random_text() for _ in range(20))]:
        reads = Tokenizer(vocabulary, digest=digest)  # anew, so that it builds what this text alone needs
        assert reads.encode(text) == writes.encode(text) == whole.encode(text), ascii(text)
    assert made == [len(vocabulary.merges)]  # by the first alone


def test_a_damaged_index_is_made_again(vocabulary: Vocabulary, folder: Path, made: list[int]) -> None:
    right = Tokenizer(vocabulary, digest=digest).encode("There are tokens here.")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    key = KernelCache.key(source=digest(), device="", driver="", options="", compiler=merge_index.SCHEMA)
    assert path.stem == key
    at = random.randrange(len(whole))
    size = len(vocabulary.merges)
    wrong = [
        whole[:-1],
        b"",
        whole[:at] + bytes([whole[at] ^ 1 << random.randrange(8)]) + whole[at + 1 :],
    ]
    for content in wrong:
        path.write_bytes(content)
        made.clear()
        assert Tokenizer(vocabulary, digest=digest).encode("There are tokens here.") == right
        assert made == [size]
        assert path.read_bytes() == whole
    for index in (np.zeros(size - 1), np.full(size, -1), np.full(size, len(vocabulary.tokens))):
        KernelCache().keep(key, index.astype("<i4").tobytes())
        made.clear()
        assert Tokenizer(vocabulary, digest=digest).encode("There are tokens here.") == right
        assert made == [size]
        assert path.read_bytes() == whole


def test_wrong_merges_get_no_index(vocabulary: Vocabulary, folder: Path) -> None:
    wrong = replace(vocabulary, merges=[*vocabulary.merges, "no merge at all"])
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="not two tokens"):
            Tokenizer(wrong, digest=digest)
    assert not folder.exists()


def test_other_metadata_have_another_index(tmp_path: Path, folder: Path) -> None:
    original = Path(default_model_path()).read_bytes()
    file = GGUFFile(default_model_path())
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    end = file._parts[0].metadata_end
    name = original.index(b"general.name")
    changed = original[: name + 24] + bytes([original[name + 24] ^ 1]) + original[name + 25 :]
    assert name + 24 < end
    for path, data in zip(paths, (original, changed), strict=True):
        path.write_bytes(data)
        assert open_model(path).tokenizer.encode("A word.")
    assert len(list(folder.iterdir())) == 2
    weights = original[:-1] + bytes([original[-1] ^ 1])
    paths[0].write_bytes(weights)  # the same metadata
    assert open_model(paths[0]).tokenizer.encode("A word.")
    assert len(list(folder.iterdir())) == 2


def test_a_file_written_to_meanwhile_gets_no_index(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(Path(default_model_path()).read_bytes())
    model = open_model(path)
    os.utime(path, (1, 1))
    with pytest.raises(ModelFileError, match="was written to while it was in use"):
        model.tokenizer  # noqa: B018
    assert not folder.exists()


def test_small_vocabularies_get_no_index(vocabulary: Vocabulary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_index, "MIN_MERGES", len(vocabulary.merges) + 1)
    Tokenizer(vocabulary, digest=digest)
    assert not folder.exists()


def test_where_nothing_can_be_kept_nothing_is_said(
    vocabulary: Vocabulary, folder: Path, caplog: pytest.LogCaptureFixture, made: list[int]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("a file in the folder's place")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert Tokenizer(vocabulary, digest=digest).encode("Hi")
    assert made == [len(vocabulary.merges)] * 2
    assert not caplog.records


def test_tokens_that_occur_twice_have_the_last_id_that_is_no_control_token() -> None:
    tokens = ["a", "b", "a", "c", "b", "d"]
    for control in ({4}, {1}, {0, 2}, {2, 3}, set()):
        expected = {token: i for i, token in enumerate(tokens) if i not in control}
        assert tokenizer._ids_without(tokens, control) == expected
        distinct = [f"{token}{i}" for i, token in enumerate(tokens)]
        expected = {token: i for i, token in enumerate(distinct) if i not in control}
        assert tokenizer._ids_without(distinct, control) == expected
