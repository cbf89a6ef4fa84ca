"""Which devices have computed a product rightly on this machine: a file for each, in the cache's folder.

A backend that nobody has tried on hardware marks what its probe finds by :func:`marked`. Opening such a device with its
self-check (:func:`bitnet.core.gpu.clc.open_device`) calls :func:`remember`.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from bitnet.core.hal import DeviceInfo
from bitnet.core.hal.probe import NOT_VERIFIED, TEST_DRIVER
from bitnet.core.support.cache import cache_folder
from bitnet.core.support.log import logger

ON_CPU = "a test driver: computed on the CPU"
ABOUT_THE_CHECK = ("note", "verified")
"""Details that do not tell one device, driver or compiler from another."""


def marked(info: DeviceInfo) -> DeviceInfo:
    """The device, with a detail ``verified`` while its self-check has not passed, and a note where it is no GPU."""
    if info.vendor == TEST_DRIVER:
        note = "; ".join(filter(None, (info.details.get("note"), ON_CPU)))
        return replace(info, details={**info.details, "note": note})
    if _is_verified(info):
        return info
    return replace(info, details={**info.details, "verified": NOT_VERIFIED})


def remember(info: DeviceInfo) -> None:
    """Keep that the device's self-check has passed. Never raises for the disk."""
    try:
        path = _marker(info)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch()
    except (OSError, RuntimeError) as error:
        logger.debug("%s: that its self-check has passed cannot be kept: %s", info.name, error)


def _is_verified(info: DeviceInfo) -> bool:
    try:
        return _marker(info).exists()
    except (OSError, RuntimeError):
        return False


def _marker(info: DeviceInfo) -> Path:
    """The file of a device with its driver, and all else that its details tell, such as the compiler's version."""
    details = [f"{name}={text}" for name, text in sorted(info.details.items()) if name not in ABOUT_THE_CHECK]
    facts = "\0".join((info.id, info.description, info.driver_version, *details))
    return cache_folder() / "verified" / f"{info.backend}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
