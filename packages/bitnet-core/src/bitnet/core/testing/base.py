"""The basis of the suite: devices to run on, fresh random numbers, and expected failures."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.gpu import GpuDevice
from bitnet.core.hal import KV_I8, Backend, Device, DeviceInfo, OpenOptions
from bitnet.core.testing import cases, poison
from bitnet.core.testing.tails import Tails

REQUIRED = "BITNET_REQUIRE_DEVICES"


class DeviceTests:
    """Tests that run once for each device of a backend. See :class:`bitnet.core.testing.ConformanceSuite`.

    Attributes:
        backend: The backend whose devices are tested.
        devices: Names of the devices to test; None for all that its probe finds.
        size: Size of a run unless ``BITNET_CONFORMANCE`` overrides it.
    """

    backend: ClassVar[Backend]
    devices: ClassVar[tuple[str, ...] | None] = None
    size: ClassVar[cases.Size] = "quick"

    _opened: ClassVar[dict[str, Device]]
    _tails: ClassVar[dict[str, Tails]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls):
            if name.startswith("test_") and any(hasattr(base, name) for base in cls.__bases__):
                raise TypeError(
                    f"{cls.__name__} replaces {name}. Name it in expected_failures, with the reason, instead."
                )

    def expected_failures(self, info: DeviceInfo) -> Mapping[str, str]:
        """Tests known to fail on a device until a fix, each with the reason. Such a test fails once it passes.

        A key is the name of a test, or of one of its cases: ``test_attention[<case>]``.
        """
        return {}

    def exclusions(self, info: DeviceInfo) -> Mapping[str, str]:
        """Tests that a device can never pass, each with the reason; keys as in :meth:`expected_failures`.

        They do not run, as they might crash the driver; every run reports them as skipped, with the reason.
        """
        return {}

    def hosted(self, driver: Any, memory: npt.NDArray[np.uint8]) -> Any:
        """A buffer of the driver that *is* this host memory and keeps it alive; None where kernels cannot use it.

        Define it for devices that compute in host memory, as CPUs do: the suite then puts an inaccessible page behind
        each buffer, and a kernel that reads past the end of one ends the process, even if no result depends on it.
        """
        return None

    def largest_binding(self, driver: Any) -> int | None:
        """Maximum bytes of a kernel's binding where the driver checks bounds; None where it does not.

        Define it for devices whose drivers answer reads past the end of a buffer with zeros, as those of Vulkan and
        WebGPU may: the suite then puts poison behind each buffer, and fails a test whose kernels read or write it.
        """
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "info" in metafunc.fixturenames:
            metafunc.parametrize("info", self._params())
        if "case" in metafunc.fixturenames:
            made = metafunc.function.conformance_cases(self.run_size)
            metafunc.parametrize("case", made, ids=cases.case_id)

    @property
    def run_size(self) -> cases.Size:
        """The size of this run."""
        return cases.size(self.size)

    def _params(self) -> list[Any]:
        """The devices as parameters. A missing required device fails; any other missing one is skipped."""
        result = self.backend.probe()
        found = {info.name: info for info in result.devices}
        named = (n.strip() for n in os.environ.get(REQUIRED, "").split(","))
        required = [n for n in named if n.startswith(f"{self.backend.name}:")]
        wanted = self.devices if self.devices is not None else tuple(dict.fromkeys([*found, *required]))
        why = f"{self.backend.name} is {result.status.value}: {result.reason or 'it has no such device'}"
        params = [
            pytest.param(found[name], id=name)
            if name in found
            else pytest.param(why, id=name, marks=[] if name in required else pytest.mark.skip(reason=why))
            for name in wanted
        ]
        return params or [pytest.param(why, id="absent", marks=pytest.mark.skip(reason=why))]

    @classmethod
    def setup_class(cls) -> None:
        cls._opened, cls._tails = {}, {}

    @classmethod
    def teardown_class(cls) -> None:
        for device in cls._opened.values():
            device.close()

    @pytest.fixture
    def device(self, info: DeviceInfo | str, request: pytest.FixtureRequest) -> Iterator[Device]:
        """The device under test, open for the whole class."""
        if isinstance(info, str):
            pytest.fail(f"{REQUIRED} names a device that is not there; {info}")
        name, case = request.node.originalname, request.node.callspec.params.get("case")
        keys = (name, f"{name}[{cases.case_id(case)}]")
        needed = [*getattr(request.function, "conformance_needs", ()), *_of_cases(request.node.callspec.params)]
        if lacking := [feature for feature in dict.fromkeys(needed) if feature not in info.features]:
            pytest.skip(f"{info.name} has no {', '.join(lacking)}")
        for reason in self._reasons(self.exclusions(info), keys):
            pytest.skip(f"{info.name} can never do this: {reason}")
        for reason in self._reasons(self.expected_failures(info), keys):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
        if info.name not in self._opened:
            self._opened[info.name] = self.backend.open(info, OpenOptions())
            self._poison(self._opened[info.name])
        yield self._opened[info.name]
        if info.name in self._tails:
            self._tails[info.name].check()

    def _poison(self, device: Device) -> None:
        largest = self.largest_binding(device._driver) if isinstance(device, GpuDevice) else None
        if (tails := poison.poison_memory(device, self.hosted, largest)) is not None:
            self._tails[device.info.name] = tails

    def _reasons(self, named: Mapping[str, str], keys: Sequence[str]) -> list[str]:
        """The reasons for a test's keys; a key that names no test of this class is an error."""
        for key in named:
            if not hasattr(self, key.partition("[")[0]):
                pytest.fail(f"{type(self).__name__} names {key}, which is no test of it")
        return [named[key] for key in keys if key in named]

    @pytest.fixture
    def rng(self) -> np.random.Generator:
        """Random numbers that differ in every run. A failing test prints the seed that reproduces it."""
        seed = int(os.environ.get("BITNET_CONFORMANCE_SEED") or secrets.randbits(32))
        print(f"BITNET_CONFORMANCE_SEED={seed} repeats this test")
        return np.random.default_rng(seed)


def _of_cases(params: Mapping[str, Any]) -> list[str]:
    """The features that a test's parameters need: an int8 cache, as a parameter or in a case."""
    return [KV_I8 for value in params.values() if "i8" in (value, getattr(value, "dtype", None))][:1]
