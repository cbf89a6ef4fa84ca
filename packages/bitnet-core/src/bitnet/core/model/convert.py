"""Conversion of models to GGUF with I2_S weights: from Hugging Face folders, and from other GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import BitNetError, InvalidInputError, ModelFileError
from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource, i2s_bytes, unpack_ternary, write_gguf
from bitnet.core.gguf.ternary import I2SLayout
from bitnet.core.gguf.writer import Tensor
from bitnet.core.hal import TernaryWeight
from bitnet.core.model.file import ModelFile, open_model
from bitnet.core.model.hf_checkpoint import read_folder
from bitnet.core.model.hf_config import FILE_TYPE_I2S


def convert_model(
    source: str | Path,
    target: str | Path,
    *,
    i2s_layout: I2SLayout = "official",
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Convert a model to a GGUF file with I2_S weights.

    Args:
        source: A Hugging Face folder (``config.json``, a tokenizer, safetensors with packed or master weights), or a
            GGUF file whose ternary weights have another encoding or I2_S layout.
        target: The file to write; whole or not at all.
        i2s_layout: Layout of I2_S tensors in a GGUF source.
        name: What the new file calls the model; None: the folder's name, or what the GGUF source calls it.
        progress: Called with bytes written and in all.

    Raises:
        ModelFileError: The source is not a model bitnet can run.
        InvalidInputError: Source and target are the same file.
        BitNetError: The target cannot be written.
    """
    source, target = Path(source), Path(target)
    if target.exists() and source.exists() and target.samefile(source):
        raise InvalidInputError(f"{target} is the model to convert; name another file to write.")
    model = None if source.is_dir() else open_model(source, i2s_layout=i2s_layout)
    metadata, tensors = read_folder(source) if model is None else _read_gguf(model)
    if name is not None:
        metadata["general.name"] = name
    try:
        write_gguf(target, metadata, tensors, progress=progress, check=partial(_check, source))
    except BitNetError:
        if model is not None:  # where the file has changed, that is the error
            model.gguf.check()
        raise


def _check(source: Path, path: Path) -> None:
    """Open what was written as the engine will; where it refuses, the source is at fault."""
    try:
        made = open_model(path)
        made.tokenizer, made.chat_template  # noqa: B018
    except ModelFileError as error:
        raise ModelFileError(
            f"makes a model that cannot be run: {error.reason}", path=source, field=error.field
        ) from error


def _read_gguf(model: ModelFile) -> tuple[dict[str, MetadataValue], dict[str, Tensor]]:
    metadata = dict(model.metadata) | {
        "general.file_type": FILE_TYPE_I2S,
        f"{model.config.architecture}.hidden_activation": model.config.activation,
    }
    tensors: dict[str, Tensor] = {}
    for name, info in model.gguf.tensors.items():
        weight = model.weights.get(name.removesuffix(".weight"))
        if isinstance(weight, TernaryWeight):
            if weight.group is not None:
                raise model.gguf.error(
                    f"has a scale for each {weight.group} columns; I2_S has one for all.",
                    tensor=name,
                    hint="The file can be run as it is.",
                )
            tensors[name] = TensorSource(weight.shape, GGMLType.I2_S, partial(_recode, model, name, weight))
        elif not name.endswith(".scale"):  # those are in the scales of I2_S now
            tensors[name] = TensorSource(info.shape, info.type, model.gguf.data(info))
    return metadata, tensors


def _recode(model: ModelFile, name: str, weight: TernaryWeight) -> Iterator[npt.NDArray[np.uint8]]:
    data = weight.load()
    codes = unpack_ternary(data.codes, weight.shape[1])
    if codes.max() > 1:
        raise model.gguf.error(
            "holds the code 3, which stands for no weight.", tensor=name, hint="Another I2_S layout may fit."
        )
    try:
        yield i2s_bytes(codes, float(data.scale[0]))
    except ValueError as error:
        raise model.gguf.error(str(error), tensor=name) from None
    weight.release()
