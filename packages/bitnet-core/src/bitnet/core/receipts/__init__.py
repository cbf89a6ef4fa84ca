"""Receipts: JSON documents that record what computed an answer, how fast and with which model, to be checked later.

The schema is ``receipt.schema.json`` in this package. What a receipt proves depends on how it is checked:

- by itself (:func:`verify`): only that nothing in it contradicts itself. Anyone can make one up;
- with a key (:func:`sign`, ``verify(keys=…)``): that the holder of the key wrote every field of it;
- with prompt, answer and model: that it belongs to these;
- by rerunning it (:func:`bitnet.core.evaluation.replay.rerun`): that this model gives these tokens for this prompt.
"""

from __future__ import annotations

from bitnet.core.receipts.checks import Verdict, verify
from bitnet.core.receipts.document import SCHEMA_VERSION, digest, load, write
from bitnet.core.receipts.record import Prompt, build, is_conversation
from bitnet.core.receipts.signing import keygen, private_key, sign

__all__ = [
    "SCHEMA_VERSION",
    "Prompt",
    "Verdict",
    "build",
    "digest",
    "is_conversation",
    "keygen",
    "load",
    "private_key",
    "sign",
    "verify",
    "write",
]
