"""The shape of a model's mixtures of experts, and which of its layers attend to a window."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bitnet.core.errors import brief
from bitnet.core.model.keys import Keys

MAX_EXPERTS = 4096
"""Maximum experts of a layer; models have up to 512."""
MAX_USED = 64
"""Maximum experts of a token; models have up to 16."""
MAX_WINDOWED = 1024
"""Maximum layers of a model whose layers attend to windows; models have 24."""
CLAMP = 7.0
"""The limit of Maple's gates and values, which files need not name."""
EXPERTS = "_exps"
"""End of the names of weights that have a matrix for each expert."""
SOFTMAX = 1
"""llama.cpp's number of the softmax among the functions of routers."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forward layers of which a router chooses some for each token.

    Attributes:
        count: Experts of a layer.
        used: Experts of a token.
        clamps: For each layer, the limit of gates and values before the activation; 0: none.
    """

    count: int
    used: int
    clamps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers that attend to a window of positions, with rotary embeddings; the others attend in full and have no
    positions.

    Attributes:
        size: Positions that a token attends to, its own among them.
        slides: Whether each layer attends to a window.
    """

    size: int
    slides: tuple[bool, ...]


def expert_faults(experts: Experts, ffn: int, width: int) -> Iterator[tuple[str, str]]:
    """Yield invalid attributes and the reasons; ``width`` is the maximum for all chosen experts together."""
    if experts.count > MAX_EXPERTS:
        yield "count", f"is {experts.count}; the limit is {MAX_EXPERTS}."
    if experts.used > min(experts.count, MAX_USED):
        yield "used", f"is {experts.used} of {experts.count} experts; the limit is {min(experts.count, MAX_USED)}."
    if experts.used * ffn > width:
        yield "used", f"makes a width of {experts.used * ffn} for a token; the limit is {width}."


_KEYS = {"count": "expert_count", "used": "expert_used_count"}


def read_experts(keys: Keys, layers: int, ffn: int, width: int) -> Experts:
    """The experts of a GGUF file with ``layers`` layers; see :func:`expert_faults` for ``width``.

    Raises:
        ModelFileError: A key is missing, of another type or out of range, or asks for what is not implemented.
    """
    for key, only in (
        ("expert_gating_func", SOFTMAX),
        ("expert_weights_norm", True),
        ("expert_weights_scale", 1),
        ("expert_shared_count", 0),
        ("expert_group_count", 1),
        ("leading_dense_block_count", 0),
    ):
        value = keys.get(key)
        if value is not None and value != only:
            raise keys.error(key, f"is {brief(value)}; only {only} is supported.")
    experts = Experts(keys.integer("expert_count"), keys.integer("expert_used_count"), _clamps(keys, layers))
    for wrong, message in expert_faults(experts, ffn, width):
        raise keys.error(_KEYS[wrong], message)
    return experts


def _clamps(keys: Keys, layers: int) -> tuple[float, ...]:
    """The limits, one a layer or one for all; llama.cpp takes those below 1e-6 as none."""
    key = "swiglu_clamp_exp"
    found = keys.raw(key)
    values = np.full(layers, CLAMP) if found is None else np.asarray(found)
    if values.ndim == 0:
        values = np.full(layers, values)
    if values.shape != (layers,) or values.dtype.kind not in "iuf":
        raise keys.error(key, f"is {brief(found)}; it must be a number, or one for each of the {layers} layers.")
    limits = tuple(map(float, values.tolist()))
    if not all(0 <= limit < math.inf for limit in limits):
        raise keys.error(key, f"is {brief(found)}; a limit is not negative and finite.")
    return tuple(limit if limit > 1e-6 else 0.0 for limit in limits)


def read_windows(keys: Keys, layers: int) -> Windows:
    """Which layers of a GGUF file attend to a window.

    Raises:
        ModelFileError: A key is missing, of another type or out of range.
    """
    which = "attention.sliding_window_pattern"
    listed = keys.raw(which)
    if listed is None:
        raise keys.error(which, "is missing: it says which layers attend to a window.")
    if not (isinstance(listed, np.ndarray) and listed.ndim == 1 and listed.dtype.kind in "biu"):
        raise keys.error(which, f"is {brief(listed)}, not a list of one truth value for each layer.")
    if len(listed) != layers or not ((listed == 0) | (listed == 1)).all():
        raise keys.error(which, f"has {len(listed)} values for {layers} layers, or others than 0 and 1.")
    return Windows(keys.integer("attention.sliding_window"), tuple(map(bool, listed.tolist())))
