"""The messages, structures and constants that the binding declares, against what Apple documents."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from apple_selectors import CONSTANTS, ENCODINGS, ENUMS, SELECTORS, STRUCTURES

from bitnet.metal import archive, backend, compiler, device, objc, recording, residency

MODULES = (archive, backend, compiler, device, objc, recording, residency)
SOURCES = [Path(module.__file__ or "").read_text() for module in MODULES]


def test_every_message_is_as_documented() -> None:
    documented = {
        name: tuple(ENUMS.get(kind, kind) for kind in (message.result, *message.arguments))
        for name, message in SELECTORS.items()
    }
    assert documented == objc.MESSAGES


@pytest.mark.parametrize("selector", objc.MESSAGES)
def test_every_message_has_as_many_arguments_as_colons_and_is_sent(selector: str) -> None:
    assert len(objc.MESSAGES[selector]) - 1 == selector.count(":")
    sent = [source for source in SOURCES if re.search(rf'[("\']{re.escape(selector)}["\'][,)\s]', source)]
    assert sent


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    made, (fields, size) = getattr(objc, name), STRUCTURES[name]
    assert [field[0] for field in made._fields_] == list(fields)
    assert {ctypes.sizeof(field[1]) for field in made._fields_} == {8}
    assert ctypes.sizeof(made) == size


def test_constants() -> None:
    assert CONSTANTS["MTLLanguageVersion2_4"] == compiler.LANGUAGE
    assert CONSTANTS["MTLGPUFamilyApple7"] == backend.APPLE_7
    assert CONSTANTS["MTLGPUFamilyApple9"] == backend.APPLE_9
    assert CONSTANTS["MTLIndirectCommandTypeConcurrentDispatch"] == recording.CONCURRENT_DISPATCH
    assert CONSTANTS["MTLPipelineOptionFailOnBinaryArchiveMiss"] == archive.FAIL_ON_MISS
    assert CONSTANTS["MTLResourceUsageRead"] | CONSTANTS["MTLResourceUsageWrite"] == recording.READ_AND_WRITE
    assert ENCODINGS == objc.ENCODINGS
    assert CONSTANTS["MTLCommandBufferStatusCompleted"] == device.COMPLETED
    codes = {name: value for name, value in CONSTANTS.items() if name.startswith("MTLCommandBufferError")}
    assert {name: code for code, name in device.ERRORS.items()} == codes
    assert device.ERRORS[device.OUT_OF_MEMORY] == "MTLCommandBufferErrorOutOfMemory"
