"""Features: what a device can do that not every device must. They are announced in ``DeviceInfo.features`` only.

Nobody asks a device for anything of a feature that it does not list. A device refuses it nevertheless, with
UnsupportedProgramError.
"""

from __future__ import annotations

BLOCK_TABLES = "block-tables"
"""Programs whose ``Embed`` or ``DenseMatmul`` names a :class:`~bitnet.core.hal.BlockWeight`."""
DETERMINISTIC = "deterministic"
"""Programs with :attr:`~bitnet.core.hal.Program.deterministic`."""
EMBEDDERS = "embedders"
"""Programs with the operations that only models for embeddings have: :class:`~bitnet.core.hal.NormTokens`, GELU, and
products that fill some columns of a tensor."""
EXPERTS = "experts"
"""Programs with the operations of mixtures of experts (:class:`~bitnet.core.hal.ExpertMatmul`)."""
KV_I8 = "kv-i8"
"""Programs with a KV cache of int8 codes (:class:`~bitnet.core.hal.KVSpec`)."""
LOGPROBS = "logprobs"
"""Steps with ``logprobs``, and :meth:`Executable.logprobs <bitnet.core.hal.Executable.logprobs>`."""
LOOK_AHEAD = "look-ahead"
""":meth:`Executable.go_on <bitnet.core.hal.Executable.go_on>`."""
PENALTIES = "penalties"
"""Steps with an :class:`~bitnet.core.hal.Adjustment`, and
:meth:`Executable.fill_slot <bitnet.core.hal.Executable.fill_slot>`."""
PREPARES = "prepares"
""":meth:`Executable.prepare <bitnet.core.hal.Executable.prepare>` saves time: the first step of a size takes longer
than later ones."""
ROTATED_NORMS = "rotated-norms"
"""Programs whose :class:`~bitnet.core.hal.RopeAppend` norms heads of q and k after their rotation."""
STATES = "states"
"""Programs with states of sequences (:class:`~bitnet.core.hal.StateSpec`), and the operations of recurrent layers."""
TERNARY_TABLES = "ternary-tables"
"""Programs whose ``Embed`` or ``DenseMatmul`` names a ternary weight with groups."""
WINDOWS = "windows"
"""Programs with layers that attend to a window of positions (:class:`~bitnet.core.hal.Attention`)."""
KERNEL_FEATURES = (DETERMINISTIC, KV_I8, LOGPROBS, PENALTIES, TERNARY_TABLES)
"""The features of a device that has every kernel of ``kernels/README.md`` but those of recurrent layers, experts,
windows, tables in blocks, models for embeddings and norms after rotations."""
FAMILY_FEATURES = (EMBEDDERS, EXPERTS, ROTATED_NORMS, STATES, WINDOWS)
"""The features of a device that has these kernels, too, but not those of tables in blocks."""
