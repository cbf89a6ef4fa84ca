"""Errors that can occur between a name on the hub and a file on this disk."""

from __future__ import annotations

from typing import ClassVar

from bitnet.core.errors import BitNetError


class HubError(BitNetError):
    """A model cannot be downloaded from the hub."""

    exit_code: ClassVar[int] = 4


class HubNotInstalledError(HubError):
    """The package ``huggingface_hub`` is not installed."""


class ModelNotFoundError(HubError):
    """The hub has no such model or file, or hides it from this user."""


class GatedModelError(HubError):
    """The hub denies access to the model: its terms are not accepted, or the token is missing or wrong."""


class HubUnreachableError(HubError):
    """The hub does not answer, or answers with a server error."""


class NotInCacheError(HubError):
    """The file is not in the cache, and ``HF_HUB_OFFLINE`` forbids asking the hub."""


class DownloadInterruptedError(HubError):
    """The connection broke repeatedly. The part received is kept, and the next attempt resumes from it."""


class WrongHashError(HubError):
    """The hash of the downloaded file does not match the hub's."""


class DiskFullError(HubError):
    """The cache's disk has too little space for the file."""


class ConversionNeededError(HubError):
    """The model has weights, but no GGUF file."""
