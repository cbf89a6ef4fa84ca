"""What goes wrong between a name on the hub and a file on this disk."""

from __future__ import annotations

from typing import ClassVar

from bitnet.core.errors import BitNetError


class HubError(BitNetError):
    """A model cannot be had from the hub."""

    exit_code: ClassVar[int] = 4


class HubNotInstalledError(HubError):
    """The package ``huggingface_hub`` is not installed."""


class ModelNotFoundError(HubError):
    """The hub has no such model or file, or says so to those who may not see it."""


class GatedModelError(HubError):
    """The hub refuses the model to whoever asks: its terms are not accepted, or the token is missing or wrong."""


class HubUnreachableError(HubError):
    """The hub does not answer, or answers with an error of its own."""


class NotInCacheError(HubError):
    """The hub must not be asked (``HF_HUB_OFFLINE``), and the cache has no such file."""


class DownloadInterruptedError(HubError):
    """The connection broke, several times; what arrived is kept, and the next attempt goes on from there."""


class WrongHashError(HubError):
    """What arrived is not the file that the hub has."""


class DiskFullError(HubError):
    """The cache's disk has no room for the file."""


class ConversionNeededError(HubError):
    """The model has weights, but no GGUF file."""
