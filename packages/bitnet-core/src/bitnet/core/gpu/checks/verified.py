"""Remembers which devices have computed a correct product on this machine, by a file for each in the cache folder.

A backend untested on hardware passes its probe's devices through :func:`marked`. Opening such a device with its
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
VERIFIED = "verified"


def marked(info: DeviceInfo) -> DeviceInfo:
    """The device, with a detail ``verified`` until its self-check has passed, and a note if it is not a GPU."""
    if info.vendor == TEST_DRIVER:
        note = "; ".join(filter(None, (info.details.get("note"), ON_CPU)))
        return replace(info, details={**info.details, "note": note})
    if _is_verified(info):
        return info
    return replace(info, details={**info.details, VERIFIED: NOT_VERIFIED})


def remember(info: DeviceInfo) -> None:
    """Record that the device's self-check has passed. Disk errors are not raised."""
    try:
        path = _marker(info)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch()
    except (OSError, RuntimeError) as error:
        logger.debug("%s: the result of its self-check cannot be saved: %s", info.name, error)


def _is_verified(info: DeviceInfo) -> bool:
    try:
        return _marker(info).exists()
    except (OSError, RuntimeError):
        return False


def _marker(info: DeviceInfo) -> Path:
    """The file for a device, its driver, and its other details, such as the compiler's version."""
    details = [f"{name}={text}" for name, text in sorted(info.details.items()) if name != VERIFIED]
    facts = "\0".join((info.id, info.description, info.driver_version, *details))
    return cache_folder() / "verified" / f"{info.backend}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
