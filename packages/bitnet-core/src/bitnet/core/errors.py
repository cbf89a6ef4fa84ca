"""Errors of bitnet. Each says what was tried, on which device or file, and what to do about it."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, ClassVar

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def brief(value: object) -> str:
    """How an error shows a value that came from outside: its repr, short and on one line."""
    return " ".join(_SHORT.repr(value).split())


class BitNetError(Exception):
    """Base of every error that bitnet raises on purpose.

    Args:
        message: What went wrong, in one sentence that names the object concerned.
        hint: What the user can do about it; printed after the message.
    """

    exit_code: ClassVar[int] = 1
    """Exit status of the command line when this error ends it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling: subclasses take other arguments than the ones in ``args``."""
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(kind: type[BitNetError], arguments: tuple[Any, ...], state: dict[str, Any]) -> BitNetError:
    error = Exception.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return error


class InvalidInputError(BitNetError, ValueError):
    """An argument, a shape or an option does not fit."""

    exit_code = 2


class ContextFullError(InvalidInputError):
    """The prompt and the tokens asked for do not fit the model's context.

    Args:
        tokens: Number of tokens that do not fit, if known.
        context: Number that the context holds, if known.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, tokens: int | None = None, context: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.tokens, self.context = tokens, context


class QueueFullError(BitNetError):
    """The queue already holds ``max_queue`` requests, or ``max_queue_tokens`` prompt tokens."""


class DeviceUnavailableError(BitNetError):
    """A requested device is not available."""

    exit_code = 3


class ModelFileError(BitNetError):
    """A model file cannot be read.

    Args:
        path: The file.
        field: The part of it that is wrong, such as ``tensor 'blk.0.attn_q.weight' offset``.
        offset: Byte offset of the field in the file, if known.
    """

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        path: str | Path,
        field: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        where = str(path)
        if field is not None:
            where += f": {field}"
        if offset is not None:
            where += f" (at byte {offset})"
        super().__init__(f"{where}: {message}", hint=hint)
        self.reason = message
        self.path = Path(path)
        self.field = field
        self.offset = offset


class DeviceError(BitNetError):
    """A device failed during use. ``device`` is its name, such as ``cuda:0``."""

    exit_code = 5

    def __init__(self, message: str, *, device: str, hint: str | None = None) -> None:
        super().__init__(f"{device}: {message}", hint=hint)
        self.device = device


class DeviceLostError(DeviceError):
    """The device stopped answering; its contents are lost."""


class OutOfMemoryError(DeviceError, MemoryError):
    """The device has too little free memory."""


class KernelCompileError(DeviceError):
    """A kernel did not compile. ``log`` is the compiler's own output."""

    def __init__(self, message: str, *, device: str, log: str = "", hint: str | None = None) -> None:
        super().__init__(f"{message}\n{log}" if log else message, device=device, hint=hint)
        self.log = log


class UnsupportedProgramError(DeviceError):
    """The program is well formed, but the device has no kernel for one of its operations."""


class ReceiptError(BitNetError):
    """A receipt does not hold, or the document is not a receipt."""

    exit_code = 6
