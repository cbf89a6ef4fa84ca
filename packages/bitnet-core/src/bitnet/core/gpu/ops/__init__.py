"""What operations launch on every GPU API, for backends that have kernels with these names and arguments."""

from bitnet.core.gpu.ops.rows import (
    MAX_QUANTIZED,
    ROPE_GROUP,
    RowOps,
    activation_defines,
    advance,
    attention_inputs,
    ceil_div,
    head_norm_inputs,
    kv_defines,
    next_power_of_two,
    part_defines,
    positions,
    power_of_two,
    rope_defines,
)

__all__ = [
    "MAX_QUANTIZED",
    "ROPE_GROUP",
    "RowOps",
    "activation_defines",
    "advance",
    "attention_inputs",
    "ceil_div",
    "head_norm_inputs",
    "kv_defines",
    "next_power_of_two",
    "part_defines",
    "positions",
    "power_of_two",
    "rope_defines",
]
