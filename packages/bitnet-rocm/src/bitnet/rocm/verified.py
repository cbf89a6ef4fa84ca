"""Which devices have computed a product rightly here: a file for each, in the cache's folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from bitnet.core.hal import DeviceInfo
from bitnet.core.support.cache import cache_folder
from bitnet.core.support.log import logger


def is_verified(info: DeviceInfo, compiler: str) -> bool:
    """Whether the device's check has passed, with its driver and a version of the compiler."""
    try:
        return _marker(info, compiler).exists()
    except (OSError, RuntimeError):
        return False


def remember(info: DeviceInfo, compiler: str) -> None:
    """Keep that the check has passed. Never raises for the disk."""
    try:
        path = _marker(info, compiler)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch()
    except (OSError, RuntimeError) as error:
        logger.debug("%s: that its check has passed cannot be kept: %s", info.name, error)


def _marker(info: DeviceInfo, compiler: str) -> Path:
    facts = "\0".join((info.id, info.description, info.driver_version, compiler))
    return cache_folder() / "verified" / f"rocm-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
