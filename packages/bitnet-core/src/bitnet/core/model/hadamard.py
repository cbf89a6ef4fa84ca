"""Walsh-Hadamard transforms that are folded into a model's weights (Bonsai 2), as ``prism.hadamard`` keys say it.

A folded weight ``W'`` is ``W S H``: ``S`` are signs and ``H`` is the normalised Sylvester-Walsh-Hadamard matrix of each
``block`` neighbouring columns, its own inverse. A product is then ``W' H S x``. Rows of an embedding are folded
likewise, so the embedding of a token is ``S H`` times its row. A program that ignores the keys answers nonsense, so
whatever is missing or unknown among them is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import brief
from bitnet.core.gguf import GGUFFile
from bitnet.core.model.keys import Keys

PREFIX = "prism.hadamard"
VERSION = 1
TRANSFORM = "normalized-sylvester-walsh-hadamard"
AXIS = "input-last-dimension"
_KEYS = (
    "version",
    "block_size",
    "transform",
    "axis",
    "sign_mode",
    "sign_widths",
    "sign_values",
    "weight_names",
    "inverse_weight_names",
    "gdn_v_grouped",
)
EMBEDDING = "token_embd.weight"
MIN_BLOCK, MAX_BLOCK = 4, 1 << 16

Signs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Hadamard:
    """The transforms of a model.

    Attributes:
        block: Neighbouring elements that one transform mixes: a power of two.
        signs: The signs of rows of each width, ``f32[width]`` of 1 and -1. A width that is missing has no signs.
        weights: Tensors whose inputs are transformed: all ternary products, and the head if it is among them.
        embedding: Whether rows of the embedding are transformed back.
        v_grouped: Whether the columns of ``ssm_out`` are grouped by key heads, as in Hugging Face folders, and not
            tiled as the rows of other weights are (:class:`~bitnet.core.model.delta_net.DeltaNet`).
    """

    block: int
    signs: Mapping[int, Signs]
    weights: frozenset[str]
    embedding: bool
    v_grouped: bool

    @property
    def head(self) -> bool:
        """Whether the input of the head is transformed."""
        return "output.weight" in self.weights


def read_hadamard(file: GGUFFile, widths: Collection[int]) -> Hadamard | None:
    """The transforms of a file whose products have rows of ``widths``; None if it names none.

    Raises:
        ModelFileError: A key is missing, unknown, or has a value whose meaning is not known.
    """
    found = [key.removeprefix(f"{PREFIX}.") for key in file.metadata if key.startswith(f"{PREFIX}.")]
    if not found:
        return None
    keys = Keys(file, PREFIX)
    for key in found:
        if key not in _KEYS:
            raise keys.error(key, f"is not known; bitnet knows {', '.join(_KEYS)}.")
    if keys.integer("version") != VERSION:
        raise keys.error("version", f"is {keys.get('version')}; only {VERSION} is supported.")
    for key, known in (("transform", (TRANSFORM,)), ("axis", (AXIS,)), ("sign_mode", ("explicit", "identity"))):
        if keys.choice(key, known) is None:
            raise keys.error(key, "is missing.")
    block = keys.integer("block_size")
    if block & (block - 1) or not MIN_BLOCK <= block <= MAX_BLOCK:
        raise keys.error("block_size", f"is {block}; it must be a power of two in {MIN_BLOCK} … {MAX_BLOCK}.")
    for width in widths:
        if width % block:
            raise keys.error("block_size", f"{block} does not divide rows of {width} columns.")
    weights, inverse = _names(keys, "weight_names"), _names(keys, "inverse_weight_names", required=False)
    if not weights:
        raise keys.error("weight_names", "names no weight.")
    if inverse - {EMBEDDING}:
        raise keys.error("inverse_weight_names", f"is {brief(sorted(inverse))}; only {EMBEDDING} is supported.")
    grouped = keys.raw("gdn_v_grouped")
    if grouped is None and any(name.endswith(".ssm_out.weight") for name in weights):
        raise keys.error("gdn_v_grouped", "is missing: it says in which order ssm_out has its value heads.")
    if type(grouped) not in (bool, type(None)):
        raise keys.error("gdn_v_grouped", f"is {brief(grouped)}, not a truth value.")
    return Hadamard(block, _signs(keys, widths), frozenset(weights), bool(inverse), bool(grouped))


def _names(keys: Keys, key: str, *, required: bool = True) -> set[str]:
    names = keys.raw(key)
    if names is None and not required:
        return set()
    if isinstance(names, np.ndarray) and not names.size:
        return set()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise keys.error(key, "is missing." if names is None else f"is {brief(names)}, not a list of tensors' names.")
    if len(set(names)) < len(names):
        raise keys.error(key, "names a tensor twice.")
    return set(names)


def _signs(keys: Keys, widths: Collection[int]) -> dict[int, Signs]:
    if keys.get("sign_mode") == "identity":
        for key in ("sign_widths", "sign_values"):
            if keys.raw(key) is not None:
                raise keys.error(key, "is not allowed with the sign_mode identity.")
        return {}
    sizes, values = (keys.raw(key) for key in ("sign_widths", "sign_values"))
    for key, numbers, kinds in (("sign_widths", sizes, "iu"), ("sign_values", values, "iuf")):
        if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in kinds:
            kind = "numbers" if "f" in kinds else "integers"
            problem = "is missing." if numbers is None else f"is {brief(numbers)}, not a list of {kind}."
            raise keys.error(key, problem)
    listed = sizes.tolist()
    if len(set(listed)) < len(listed) or set(listed) != set(widths):
        raise keys.error("sign_widths", f"is {brief(listed)}; rows of products have {sorted(set(widths))} columns.")
    if sum(listed) != len(values):
        raise keys.error("sign_values", f"has {len(values)} signs for rows of {brief(listed)} columns.")
    signs = values.astype(np.float32)
    if not (np.abs(signs) == 1).all():
        raise keys.error("sign_values", "has values other than 1 and -1.")
    return dict(zip(listed, np.split(signs, np.cumsum(listed)[:-1]), strict=True))
