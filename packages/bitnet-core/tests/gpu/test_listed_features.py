"""A backend that lists a feature has the method that the feature needs, or is refused before it runs anything."""

from __future__ import annotations

from typing import Any

import pytest

from bitnet.core.errors import DeviceError
from bitnet.core.hal import PENALTIES, PREPARES, CheckedExecutable, DeviceInfo, DeviceType, Limits, Program


class Plain(CheckedExecutable):
    """Has no method of a feature."""

    kernels = ()

    def on_stats(self) -> Any: ...
    def on_begin(self, step: Any, count: int, done: int) -> Any: ...
    def on_write(self, name: str, array: Any) -> None: ...
    def on_read(self, name: str, shape: tuple[int, ...]) -> Any: ...
    def on_close(self) -> None: ...


class Filling(Plain):
    def on_fill_slot(self, slot: int, marks: Any, biases: Any) -> None: ...


class Preparing(Plain):
    def on_prepare(self, step: Any, count: int, stands_in: bool) -> None: ...


class Both(Filling, Preparing):
    pass


@pytest.mark.parametrize(
    ("kind", "features", "missing"),
    [
        (Plain, (), ""),
        (Plain, (PENALTIES,), "on_fill_slot"),
        (Plain, (PREPARES,), "on_prepare"),
        (Filling, (PENALTIES,), ""),
        (Filling, (PREPARES, PENALTIES), "on_prepare"),
        (Preparing, (PENALTIES, PREPARES), "on_fill_slot"),
        (Both, (PENALTIES, PREPARES), ""),
    ],
)
def test_a_listed_feature_has_its_method(kind: type[Plain], features: tuple[str, ...], missing: str) -> None:
    info = DeviceInfo("acme", "0", "id", "Acme 1", "", DeviceType.CPU, features=features)
    program = Program([], {}, {}, Limits(1))
    if missing:
        with pytest.raises(
            DeviceError, match=rf"^acme:0: it lists the feature .*{kind.__name__} .* {missing}"
        ) as raised:
            kind(info, program)
        assert "backend" in str(raised.value.hint)
    else:
        kind(info, program)
