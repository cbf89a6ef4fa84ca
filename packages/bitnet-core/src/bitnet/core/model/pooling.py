"""How a model's vectors of tokens become one vector of their text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from bitnet.core.errors import brief

if TYPE_CHECKING:
    from bitnet.core.model.file import ModelFile

Pooling: TypeAlias = Literal["mean", "cls", "last"]
"""The mean of all tokens' vectors, the first token's, or the last token's."""
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")
_BY_NUMBER: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}
"""Values of the key ``pooling_type``: llama.cpp's ``llama_pooling_type``."""


def pooling_of(file: ModelFile) -> Pooling | None:
    """The pooling that the file names; None if it names none.

    Raises:
        ModelFileError: It is not supported.
    """
    key = f"{file.config.architecture}.pooling_type"
    value = file.metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or value not in _BY_NUMBER:
        raise file.gguf.error(f"is {brief(value)}; supported are 0 (none), 1 (mean), 2 (cls) and 3 (last).", key=key)
    return _BY_NUMBER[value]
