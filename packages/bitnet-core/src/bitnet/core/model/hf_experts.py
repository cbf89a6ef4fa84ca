"""Reads what only folders of mixtures of experts have (Maple): their configuration, and experts' matrices.

Hugging Face's folders have a matrix of floats for each expert (``mlp.experts.E.up_proj``), which are ternary with one
scale a row. MLX's stack those of a layer (``mlp.switch_mlp.up_proj``), packed as :mod:`bitnet.core.model.mlx` says.
Sources: llama.cpp's converter, whose graph is the one that runs, and public readers of both kinds of folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.gguf import MetadataValue
from bitnet.core.hal import TernaryData, TernaryWeight
from bitnet.core.model.experts import CLAMP, EXPERTS, MAX_WINDOWED, Experts, Windows, expert_faults
from bitnet.core.model.hf_delta_net import Reader
from bitnet.core.model.recode import TernarySource
from bitnet.core.model.safetensors import Stored

NAMES = {"model.word_embeddings": "token_embd"}
LAYER_NAMES = {"mlp.gate": "ffn_gate_inp"} | {
    f"mlp.switch_mlp.{part}_proj": f"ffn_{part}{EXPERTS}" for part in ("gate", "up", "down")
}
"""GGUF names of modules that other families do not have."""
_EXPERT = re.compile(r"mlp\.experts\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj")
_KEYS = {"count": "num_experts", "used": "num_experts_per_tok"}


def expert_name(module: str) -> str | None:
    """``ffn_up_exps.3`` of ``mlp.experts.3.up_proj``; None for other modules of a layer."""
    found = _EXPERT.fullmatch(module)
    return None if found is None else f"ffn_{found[2]}{EXPERTS}.{found[1]}"


def read_folder_experts(config: Reader, layers: int, ffn: int, width: int) -> Experts:
    """The experts of a folder; see :func:`~bitnet.core.model.experts.expert_faults` for ``width``.

    Raises:
        ModelFileError: A value is missing, out of range, or asks for what is not implemented.
    """
    for key, only, default in (
        ("norm_topk_prob", True, True),
        ("num_shared_experts", 0, 0),
        ("routed_scaling_factor", 1, 1),
        ("n_group", 1, 1),
        ("score_function", "softmax", "softmax"),
        ("nope_on_global_attention", True, False),
    ):
        value = config.values.get(key)
        if (default if value is None else value) != only:
            raise config.error(key, f"is {brief(value)}; only {only} is supported.")
    experts = Experts(config.integer(_KEYS["count"]), config.integer(_KEYS["used"]), (CLAMP,) * layers)
    for wrong, message in expert_faults(experts, ffn, width):
        raise config.error(_KEYS[wrong], message)
    return experts


def read_folder_windows(config: Reader, layers: int) -> Windows:
    """Which layers of a folder attend to a window.

    Raises:
        ModelFileError: The layers' types are missing or unknown.
    """
    if layers > MAX_WINDOWED:
        raise config.error("num_hidden_layers", f"is {layers}; the limit is {MAX_WINDOWED}.")
    known = {"sliding_attention": True, "full_attention": False}
    kinds = config.values.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(str(kind) in known for kind in kinds):
        raise config.error("layer_types", f"is {brief(kinds)}; {layers} of {' or '.join(known)} are expected.")
    return Windows(config.integer("sliding_window"), tuple(known[kind] for kind in kinds))


def expert_keys(experts: Experts, windows: Windows, ffn: int) -> dict[str, MetadataValue]:
    """The GGUF keys of a mixture of experts, without the architecture's prefix."""
    return {
        "expert_count": experts.count,
        "expert_used_count": experts.used,
        "expert_feed_forward_length": ffn,
        "swiglu_clamp_exp": np.array(experts.clamps, np.float32),
        "attention.sliding_window": windows.size,
        "attention.sliding_window_pattern": np.array(windows.slides),
    }


def stacked_experts(
    name: str,
    shape: tuple[int, ...],
    stored: dict[str, Stored],
    matrix: Callable[[Stored], TernaryWeight],
    folder: Path,
) -> TernarySource:
    """The matrices of a layer's experts, which are taken out of ``stored``, along the rows.

    Args:
        name: Canonical name, such as ``blk.0.ffn_up_exps``.
        shape: ``(experts, rows, columns)``.
        matrix: Makes the matrix of one expert, which has one scale a row.

    Raises:
        ModelFileError: An expert is missing, or its matrix has another shape.
    """
    count, rows, columns = shape
    weights: list[TernaryWeight] = []
    first: Stored | None = None
    for expert in range(count):
        tensor = stored.pop(f"{name}.{expert}.weight", None)
        if tensor is None:
            raise ModelFileError("is missing.", path=folder, field=f"tensor '{name}', expert {expert}")
        if tensor.shape != (rows, columns):
            why = "according to config.json it must be"
            raise tensor.error(f"has the shape {tensor.shape}; {why} {(rows, columns)}.")
        first = first or tensor
        weights.append(matrix(tensor))
    assert first is not None
    return TernarySource(TernaryWeight((count * rows, columns), _stacked(weights), group=columns), first.error, shape)


def _stacked(weights: Sequence[TernaryWeight]) -> Callable[[], TernaryData]:
    def load() -> TernaryData:
        parts = [weight.load() for weight in weights]
        for weight in weights:
            if weight.release is not None:
                weight.release()
        return TernaryData(np.concatenate([part.codes for part in parts]), np.concatenate([p.scale for p in parts]))

    return load
