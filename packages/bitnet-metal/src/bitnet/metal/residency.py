"""Buffers that stay resident between steps: a residency set on the queue, on macOS 15 and newer."""

from __future__ import annotations

import ctypes

from bitnet.core.support.log import logger
from bitnet.metal.objc import Objc

DESCRIPTOR = "MTLResidencySetDescriptor"
"""A class of macOS 15, whose presence shows that residency sets are supported."""


class Resident:
    """The residency set of a queue. On older macOS it does nothing, as Metal makes a step's buffers resident itself.

    A set owns its buffers: one that is released stays until it is removed.
    """

    def __init__(self, objc: Objc, device: int, queue: int, name: str) -> None:
        self._objc, self._set, self._staged = objc, 0, False
        if not objc.has_class(DESCRIPTOR):
            return
        error = ctypes.c_void_p()
        with objc.pool():
            wanted = objc.made(DESCRIPTOR)
            try:
                made = objc.send(device, "newResidencySetWithDescriptor:error:", wanted, ctypes.byref(error))
            finally:
                objc.release(wanted)
            if not made:
                said = objc.text(objc.send(error.value, "localizedDescription")) if error.value else "no reason given"
                logger.warning("%s: buffers are not kept resident: %s", name, said)
                return
        self._set = int(made)
        objc.send(queue, "addResidencySet:", self._set)

    def add(self, buffer: int) -> None:
        """Have a buffer resident from the next :meth:`settle` on."""
        if self._set:
            self._objc.send(self._set, "addAllocation:", buffer)
            self._staged = True

    def settle(self) -> None:
        """Make what was added resident, ahead of the work that needs it."""
        if self._staged:
            self._staged = False
            with self._objc.pool():
                self._objc.send(self._set, "commit")
                self._objc.send(self._set, "requestResidency")

    def remove(self, buffer: int) -> None:
        """Let go of a buffer that nothing uses any more."""
        if self._set:
            with self._objc.pool():
                self._objc.send(self._set, "removeAllocation:", buffer)
                self._objc.send(self._set, "commit")

    def close(self) -> None:
        """Give the set back."""
        self._objc.release(self._set)
        self._set = 0
