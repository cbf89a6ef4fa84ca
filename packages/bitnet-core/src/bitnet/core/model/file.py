"""Opening a model file: configuration, weights, tokenizer and chat template of a GGUF."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bitnet.core.errors import InvalidInputError
from bitnet.core.gguf import GGUFFile, MetadataValue
from bitnet.core.gguf.ternary import I2S_LAYOUTS, I2SLayout
from bitnet.core.hal import BLOCK_TABLES, TERNARY_TABLES, TernaryWeight, Weight
from bitnet.core.model.config import ModelConfig, read_config
from bitnet.core.model.tables import block_tables, ternary_tables
from bitnet.core.model.weights import bind_weights
from bitnet.core.support import log
from bitnet.core.support.foreign import label
from bitnet.core.support.source import ByteSource

if TYPE_CHECKING:
    from bitnet.core.text.chat import ChatTemplate
    from bitnet.core.text.tokenizer import Tokenizer


class ModelFile:
    """An open model file. Its weights are not read until a device loads them.

    Attributes:
        path: The file.
        i2s_layout: The layout assumed for its I2_S tensors.
        config: The model's shape.
        weights: Every weight by its canonical name: ``token_embd``, ``blk.0.attn_q``, …, ``output_norm``, ``output``
            (the same object as ``token_embd`` if they are tied).
    """

    def __init__(self, file: GGUFFile, layout: I2SLayout) -> None:
        self.gguf = file
        self.path: Path = file.path
        self.i2s_layout: I2SLayout = layout
        self.config: ModelConfig = read_config(file)
        self.weights: Mapping[str, Weight] = bind_weights(file, self.config, layout)

    def weights_for(self, features: Collection[str]) -> Mapping[str, Weight]:
        """The weights for a device with these features: embedding and head stay as the file has them, ternary or in
        blocks of quantised numbers, if the device can.

        Raises:
            ModelFileError: The file has changed, and parts of it are lost.
        """
        tables: dict[str, Weight] = {}
        if BLOCK_TABLES in features:
            tables |= block_tables(self.gguf, self.config)
        if TERNARY_TABLES in features:
            tables |= ternary_tables(self.gguf, self.config)
        return {**self.weights, **tables} if tables else self.weights

    @property
    def metadata(self) -> Mapping[str, MetadataValue]:
        """The metadata of the file."""
        return self.gguf.metadata

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.gguf.size

    @property
    def quantization(self) -> str:
        """The type of most ternary matrices in the file, such as ``I2_S``."""
        names = [f"{name}.weight" for name, weight in self.weights.items() if isinstance(weight, TernaryWeight)]
        return Counter(self.gguf.tensors[name].type.name for name in names).most_common(1)[0][0]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file's metadata.

        Raises:
            ModelFileError: The tokenizer is missing, of an unsupported kind, or does not fit the model.
        """
        from bitnet.core.text.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self.gguf, self.config.vocab_size)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template in the file's metadata, if there is one.

        Raises:
            ModelFileError: It is not a valid template.
        """
        from bitnet.core.text.chat import ChatTemplate

        source = self.metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise self.gguf.error("is not a string.", key="tokenizer.chat_template")
        if not source.strip():
            return None
        if plain := self.tokenizer.plain_markup(source):
            some = ", ".join(map(label, plain[:3]))
            log.once(
                logging.WARNING,
                f"{self.path}: the chat template writes {some}, but token_type marks them neither as control nor as "
                "user-defined tokens: the model sees their letters, and may answer nonsense.",
            )
        try:
            return ChatTemplate(source, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token)
        except InvalidInputError as error:
            raise self.gguf.error(error.message, key="tokenizer.chat_template") from error

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the opened file, even if another file has taken its name since."""
        return self.gguf.sha256()


def open_model(source: str | Path | ByteSource, *, i2s_layout: I2SLayout = "official") -> ModelFile:
    """Open a GGUF model file and check that it holds every weight of its architecture.

    Args:
        source: The file: its path, or where its bytes come from.
        i2s_layout: How its I2_S tensors are laid out; files of some bitnet.cpp builds need ``arm`` or ``columns``.

    Raises:
        ModelFileError: The file is not a model bitnet can run; names the field and its offset.
        InvalidInputError: There is no such layout.
    """
    if i2s_layout not in I2S_LAYOUTS:
        raise InvalidInputError(f"i2s_layout is {i2s_layout!r}; it must be one of {', '.join(I2S_LAYOUTS)}.")
    return ModelFile(GGUFFile(source), i2s_layout)
