"""The shape of a model's recurrent layers (Gated DeltaNet), and which of its layers they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import brief
from bitnet.core.hal.operands import MAX_K, MAX_TAPS
from bitnet.core.model.keys import Keys

MAX_STATE_DIM = 1024
"""Maximum elements of a head of q, k or v in a recurrent layer; models have 128."""
MAX_LAYERS = 1024
"""Maximum layers of a model with recurrent ones; models have 64."""
INTERVAL = 4
"""Default of ``full_attention_interval`` in llama.cpp and transformers."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Layers with a recurrent state instead of attention: Gated DeltaNet (Yang et al. 2025).

    Value heads are tiled, as GGUF files have them: value head ``h`` goes with key head ``h % k_heads``. In Hugging
    Face folders they are grouped, ``h // (v_heads / k_heads)``, and conversion reorders them. Where ``k_heads`` is
    ``v_heads``, both orders are the same.

    Attributes:
        recurrent: Whether each layer is recurrent; the others attend in full. There are layers of both kinds.
        k_heads: Heads of q, and of k.
        v_heads: Heads of v, of the gate z, of decays and of strengths; a multiple of ``k_heads``.
        k_dim: Elements of a head of q or k.
        v_dim: Elements of a head of v.
        taps: Width of the causal convolution of q, k and v.
    """

    recurrent: tuple[bool, ...]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int

    @property
    def value_width(self) -> int:
        """Elements of all heads of v."""
        return self.v_heads * self.v_dim

    @property
    def conv_width(self) -> int:
        """Elements of all heads of q, k and v, in this order: columns of the convolution."""
        return 2 * self.k_heads * self.k_dim + self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states, f32: a matrix for each value head and the convolution's last columns."""
        matrix = self.v_heads * self.k_dim * self.v_dim
        return 4 * sum(self.recurrent) * (matrix + self.conv_width * (self.taps - 1))

    @property
    def grouped_heads(self) -> npt.NDArray[np.int64]:
        """Which of the grouped value heads each of the tiled ones is: ``int[v_heads]``."""
        heads: npt.NDArray[np.int64] = np.arange(self.v_heads).reshape(self.k_heads, -1).T.reshape(-1)
        return heads


def recurrent_layers(layers: int, interval: int) -> tuple[bool, ...]:
    """The layers that are recurrent if every ``interval``-th attends in full."""
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def delta_faults(net: DeltaNet, width: int) -> Iterator[tuple[str, str]]:
    """Yield invalid attributes and the reasons; ``width`` is the maximum for all heads together."""
    if all(net.recurrent) or not any(net.recurrent):
        yield "recurrent", "makes all layers of one kind; both recurrent layers and layers that attend are needed."
    for name, size in (("k_dim", net.k_dim), ("v_dim", net.v_dim)):
        if size % 4 or size > MAX_STATE_DIM:
            yield name, f"makes heads of {size} elements; they must be a multiple of 4, at most {MAX_STATE_DIM}."
    if net.v_heads % net.k_heads:
        yield "k_heads", f"{net.v_heads} value heads are not a multiple of {net.k_heads} key heads."
    if net.conv_width > min(width, MAX_K):
        yield "v_heads", f"makes {net.conv_width} columns of q, k and v; the limit is {min(width, MAX_K)}."
    if not 2 <= net.taps <= MAX_TAPS:
        yield "taps", f"is {net.taps}; a convolution has 2 … {MAX_TAPS} taps."


_KEYS = {
    "k_heads": "ssm.group_count",
    "k_dim": "ssm.state_size",
    "v_dim": "ssm.inner_size",
    "v_heads": "ssm.time_step_rank",
    "taps": "ssm.conv_kernel",
}


def read_delta_net(keys: Keys, layers: int, width: int) -> DeltaNet:
    """The recurrent layers of a GGUF file with ``layers`` layers; see :func:`delta_faults` for ``width``.

    Raises:
        ModelFileError: A key is missing, of another type or out of range.
    """
    which = "attention.recurrent_layers"
    listed = keys.raw(which)
    if listed is None:
        which = "full_attention_interval"
        recurrent = recurrent_layers(layers, keys.integer(which, INTERVAL))
    else:
        if not (isinstance(listed, np.ndarray) and listed.ndim == 1 and listed.dtype.kind in "biu"):
            raise keys.error(which, f"is {brief(listed)}, not a list of one truth value for each layer.")
        listed = listed[:layers]  # those that predict further tokens follow, and attend
        if len(listed) != layers or not ((listed == 0) | (listed == 1)).all():
            raise keys.error(which, f"has {len(listed)} values for {layers} layers, or others than 0 and 1.")
        recurrent = tuple(map(bool, listed.tolist()))
    v_heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % v_heads:
        raise keys.error("ssm.inner_size", f"{inner} is not a multiple of the {v_heads} value heads.")
    net = DeltaNet(
        recurrent=recurrent,
        k_heads=keys.integer("ssm.group_count"),
        v_heads=v_heads,
        k_dim=keys.integer("ssm.state_size"),
        v_dim=inner // v_heads,
        taps=keys.integer("ssm.conv_kernel"),
    )
    for wrong, message in delta_faults(net, width):
        raise keys.error(_KEYS.get(wrong, which), message)
    return net
