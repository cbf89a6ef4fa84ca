"""Addresses of models in object stores: ``s3://BUCKET/KEY``, ``gs://…``, ``az://…``."""

from __future__ import annotations

from bitnet.core.errors import InvalidInputError, brief

SCHEMES = ("s3://", "gs://", "az://")


def is_address(text: object) -> bool:
    """Whether a text is an address in an object store, rather than a path."""
    return isinstance(text, str) and text.startswith(SCHEMES)


def check_address(text: str) -> str:
    """The address as it is.

    Raises:
        InvalidInputError: It lacks the bucket or the key, or names a later part of a split model.
    """
    _, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket or not key or key.endswith("/") or not text.isprintable():
        raise InvalidInputError(
            f"{brief(text)} is no address of an object.", hint=f"Write it as {text.partition('://')[0]}://BUCKET/KEY."
        )
    from bitnet.core.gguf.split import part_name

    part = part_name(key)
    if part is not None and part.number != 1:
        raise InvalidInputError(f"{brief(text)} is a later part of a split model; name the first one.")
    return text
