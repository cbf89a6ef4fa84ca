"""Converts Hugging Face and MLX folders, and GGUF files, to GGUF files of any ternary encoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from bitnet.core.errors import BitNetError, InvalidInputError, ModelFileError
from bitnet.core.gguf import GGMLType, MetadataValue, TensorInfo, write_gguf
from bitnet.core.gguf.ternary import BLOCK_TYPES, I2SLayout, holds_threes, load_ternary
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.gguf.writer import Tensor, TensorSource
from bitnet.core.hal import TernaryData, TernaryWeight
from bitnet.core.model.file import ModelFile, open_model
from bitnet.core.model.hf_checkpoint import read_folder
from bitnet.core.model.recode import TernarySource, encoded
from bitnet.core.model.rope import BETA_FAST, BETA_SLOW
from bitnet.core.support.log import logger
from bitnet.core.text.vocabulary import LLAMA3

TYPES: Mapping[str, GGMLType] = {dtype.name.lower(): dtype for dtype in (GGMLType.I2_S, *BLOCK_TYPES)}
"""Encodings to which models can be converted."""
TABLES = ("token_embd", "output")
SMALL = (".ssm_alpha", ".ssm_beta")
"""Ends of names of small matrices, which programs take as floats."""
FILE_TYPES = {
    GGMLType.I2_S: 40,
    GGMLType.Q1_0: 40,
    GGMLType.TQ1_0: 36,
    GGMLType.TQ2_0: 37,
    GGMLType.Q2_0: 41,
    GGMLType.Q2_0_G128: 41,
}
"""``general.file_type`` as in the official I2_S file and in llama.cpp (``llama.h``), where Q1_0 has the number of
Microsoft's I2_S; other types have no number."""


def convert_model(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str | None = None,
    i2s_layout: I2SLayout = "official",
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Convert a model to a GGUF file; ternary weights and their scales are preserved exactly.

    Args:
        source: A Hugging Face folder (``config.json``, a tokenizer, safetensors with packed or master weights, or MLX's
            of 2 bits), or a GGUF file.
        target: The file to write, atomically.
        dtype: Encoding of the ternary matrices, one of :data:`TYPES`; None: I2_S if each has one scale, else Q2_0.
        i2s_layout: Layout of I2_S tensors in a GGUF source.
        name: The model's name in the new file; None: the folder's name, or the name in the GGUF source.
        progress: Called with the bytes written and the total bytes.

    Raises:
        ModelFileError: The source is not a model bitnet can run, or the encoding cannot hold one of its matrices.
        InvalidInputError: Source and target are the same file, or there is no such encoding.
        BitNetError: The target cannot be written.
    """
    source, target = Path(source), Path(target)
    if dtype is not None and dtype not in TYPES:
        raise InvalidInputError(f"dtype is {dtype!r}; it must be one of {', '.join(TYPES)}.")
    if target.exists() and source.exists() and target.samefile(source):
        raise InvalidInputError(f"{target} is the model to convert; name another file to write.")
    model = None if source.is_dir() else open_model(source, i2s_layout=i2s_layout)
    metadata, tensors = read_folder(source) if model is None else _read_gguf(model)
    if name is not None:
        metadata["general.name"] = name
    kind = TYPES[dtype] if dtype is not None else _fitting(tensors)
    metadata.pop("general.file_type", None)
    _warn_of_llama_cpp(metadata)
    if kind in FILE_TYPES:
        metadata["general.file_type"] = FILE_TYPES[kind]
    try:
        write_gguf(target, metadata, _written(tensors, kind), progress=progress, check=partial(_check, source))
    except BitNetError:
        if model is not None:  # if the source file has changed, report that instead
            model.gguf.check()
        raise


def _warn_of_llama_cpp(metadata: Mapping[str, MetadataValue]) -> None:
    """Warn of keys that llama.cpp does not read for these architectures, so that it computes another model."""
    for key, default in (("yarn_beta_fast", BETA_FAST), ("yarn_beta_slow", BETA_SLOW)):
        found = np.asarray(metadata.get(f"{metadata['general.architecture']}.rope.scaling.{key}", default)).ravel()
        if found.dtype.kind in "iuf" and len(other := found[found != default]):  # it may have one value a layer
            logger.warning("llama.cpp ignores %s (%g) and takes %g: its answers will differ.", key, other[0], default)


def _check(source: Path, path: Path) -> None:
    """Open the new file as the engine will; if that fails, blame the source."""
    try:
        made = open_model(path)
        made.tokenizer, made.chat_template  # noqa: B018
    except ModelFileError as error:
        raise ModelFileError(
            f"makes a model that cannot be run: {error.reason}", path=source, field=error.field
        ) from error


def _fitting(tensors: Mapping[str, Tensor | TernarySource]) -> GGMLType:
    """The default encoding."""
    grouped = (t.weight.group is not None for n, t in tensors.items() if isinstance(t, TernarySource) and not _table(n))
    return GGMLType.Q2_0 if any(grouped) else GGMLType.I2_S


def _table(name: str) -> bool:
    """Whether a matrix may be in ternary blocks although the program takes it as floats."""
    base = name.removesuffix(".weight")
    return base in TABLES or base.endswith(SMALL)


def _written(tensors: Mapping[str, Tensor | TernarySource], kind: GGMLType) -> dict[str, Tensor]:
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, TernarySource):
            # A ternary embedding or head has a scale for each block, which I2_S cannot hold.
            its_kind = GGMLType.Q2_0 if _table(name) and kind is GGMLType.I2_S else kind
            written |= encoded(name.removesuffix(".weight"), tensor, its_kind)
        else:
            written[name] = tensor
    return written


def _read_gguf(model: ModelFile) -> tuple[dict[str, MetadataValue], dict[str, Tensor | TernarySource]]:
    metadata = model.gguf.typed_metadata() | {f"{model.config.architecture}.hidden_activation": model.config.activation}
    pre = metadata.get("tokenizer.ggml.pre")
    if isinstance(pre, str) and pre == "falcon_e":
        metadata["tokenizer.ggml.pre"] = LLAMA3  # the same, by a name that llama.cpp knows
    tensors: dict[str, Tensor | TernarySource] = {}
    for name, info in model.gguf.tensors.items():
        weight = model.weights.get(name.removesuffix(".weight"))
        if isinstance(weight, TernaryWeight):
            tensors[name] = TernarySource(weight, partial(model.gguf.error, tensor=name), info.shape)
        elif _table(name) and info.type in BLOCK_TYPES and not holds_threes(info.type, model.gguf.data(info)):
            tensors[name] = _read_table(model, info)
        elif not name.endswith((".scale", ".weight_scale")):  # scales are part of their weights' sources
            tensors[name] = TensorSource(info.shape, info.type, model.gguf.data(info))
    return metadata, tensors


def _read_table(model: ModelFile, info: TensorInfo) -> TernarySource:
    """An embedding or output head in ternary blocks."""
    shape, error = (info.shape[0], info.shape[1]), partial(model.gguf.error, tensor=info.name)

    def load() -> TernaryData:
        try:
            return load_ternary(info.type, shape, model.gguf.data(info), "official", master=False, grouped=True)
        except ValueError as wrong:
            raise error(f"{wrong}.") from None

    return TernarySource(TernaryWeight(shape, load, lambda: model.gguf.release(info), BLOCKS[info.type][0]), error)
