"""Errors of a request: status, message, and the field at fault. Each API formats them in its own way."""

from __future__ import annotations

from bitnet.core.errors import (
    BitNetError,
    ContextFullError,
    DeviceError,
    InvalidInputError,
    ModelFileError,
    QueueFullError,
)


class RequestError(BitNetError):
    """The error with which a request is answered.

    Args:
        status: HTTP status.
        message: What was wrong, where, and what to do.
        field: The field of the body at fault, such as ``messages[1].role``.
        code: A short word for programs, such as ``model_not_found``.
        retry_after: Seconds after which the client may ask again.
        allow: Methods that the path accepts, if it does not accept the request's.
        lengths: Tokens of a prompt that is too long, and those that the context holds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
        lengths: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.lengths = lengths
        self.status, self.field, self.code, self.retry_after, self.allow = status, field, code, retry_after, allow


def wrong(field: str, message: str) -> RequestError:
    """An error about an invalid field."""
    return RequestError(400, f"{field} {message}", field=field)


def unsupported(field: str, why: str) -> RequestError:
    """An error about a field that would change the answer but is not supported."""
    return RequestError(400, f"{field} is not supported: {why}", field=field, code="unsupported_parameter")


def too_late(seconds: float) -> RequestError:
    """The error for a request that took longer than it may."""
    return RequestError(504, f"The request took longer than {seconds:g} seconds.")


def as_request_error(error: BaseException) -> RequestError:
    """The error to send to the client. Unexpected errors become a message without details, and those about model files
    do not say where these are."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, QueueFullError):
        return RequestError(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, ContextFullError):
        lengths = None if error.tokens is None or error.context is None else (error.tokens, error.context)
        return RequestError(400, str(error), code="context_length_exceeded", lengths=lengths)
    if isinstance(error, InvalidInputError):
        return RequestError(400, str(error))
    if isinstance(error, DeviceError):
        return RequestError(503, str(error), code="device_error", retry_after=5)
    if isinstance(error, ModelFileError):
        return RequestError(503, f"The model's file {error.reason}", code="model_file_error", retry_after=5)
    if isinstance(error, BitNetError):
        return RequestError(500, str(error))
    return RequestError(500, "The server failed; its log says why.", code="internal_error")
