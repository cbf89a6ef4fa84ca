"""The Vulkan loader through cffi: structures that keep their pointees alive, errors as bitnet's, and an instance.

The binding is PyPI's ``vulkan``. Only its declarations are loaded: importing the package itself opens the loader and
takes ten times as long.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import weakref
from collections.abc import Iterable
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.drivers.failures import lost, out_of_memory
from bitnet.core.support.dynlib import open_library, without_display

LOADER = {
    "linux": ["libvulkan.so.1", "libvulkan.so"],
    "darwin": ["libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib"],
    "win32": ["vulkan-1.dll"],
}
VERSION_1_1, VERSION_1_2, VERSION_1_3 = (1 << 22 | minor << 12 for minor in (1, 2, 3))
SUCCESS, TIMEOUT, INCOMPLETE = 0, 2, 5
OUT_OF_MEMORY = {-1, -2, -10, -1000069000}
"""Host memory, device memory, too many objects, pool memory."""
DEVICE_LOST, NO_DRIVER = -4, -9
PORTABILITY = "VK_KHR_portability_enumeration"
"""Extension without which MoltenVK's devices are not listed."""

_one_at_a_time = threading.Lock()
_alive: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def binding() -> ModuleSpec | None:
    """The binding, where it is installed."""
    return importlib.util.find_spec("vulkan")


@cache
def api() -> Any:
    """cffi's declarations of Vulkan; :func:`binding` must be there."""
    spec = binding()
    assert spec is not None
    (folder,) = spec.submodule_search_locations or [""]
    path = Path(folder) / "_vulkancache.py"
    if not path.exists():
        from vulkan._vulkan import ffi  # type: ignore[import-untyped]

        return ffi
    made = importlib.util.spec_from_file_location("vulkan._vulkancache", path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module.ffi


@cache
def loader() -> Any:
    """The loader's functions and Vulkan's enumerations; a :class:`NoDriverError` if it does not open."""
    if not (found := open_library(LOADER)):  # without a name, `dlopen` would open this program itself
        raise NoDriverError(f"The Vulkan loader does not open ({'; '.join(found.tried.values())}).", device="vulkan")
    return api().dlopen(found.name)


def make(kind: str, **fields: Any) -> Any:
    """Make a structure (returned as a pointer) with its ``sType`` set, which keeps alive everything it points to.

    A list becomes an array of structures, handles or numbers, and sets the preceding count field, if there is one. Text
    becomes a C string. None is left out.
    """
    ffi = api()
    types = dict(ffi.typeof(kind).fields)
    names = [*types]
    kept: list[Any] = []
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, list) and (count := names[names.index(name) - 1]).endswith("Count"):
            values[count] = len(value)
        if value is not None:
            pointer = types[name].type.kind == "pointer"
            values[name] = _pointed(types[name].type, value, kept) if pointer else value
    if "sType" in types:
        values["sType"] = structure_types()[kind[2:].upper()]
    made = ffi.new(kind + "*", values)
    _alive[made] = kept
    return made


def _pointed(kind: Any, value: Any, kept: list[Any]) -> Any:
    ffi = api()
    if isinstance(value, str):
        value = ffi.new("char[]", value.encode())
    elif isinstance(value, list):
        items = [ffi.new("char[]", item.encode()) if isinstance(item, str) else item for item in value]
        kept += items  # the array gets copies of structures, whose own pointers stay valid with the originals
        value = ffi.new(f"{kind.item.cname}[]", [item[0] for item in items] if kind.item.kind == "struct" else items)
    kept.append(value)
    return value


@cache
def structure_types() -> dict[str, int]:
    """The values of ``VkStructureType`` by name, without ``VK_STRUCTURE_TYPE_`` and underscores."""
    values = api().typeof("VkStructureType").relements
    return {name.removeprefix("VK_STRUCTURE_TYPE_").replace("_", ""): value for name, value in values.items()}


class NoDriverError(DeviceError):
    """The loader finds no driver that it can use."""


def check(device: str, what: str, result: int) -> int:
    """Return the ``result`` of the call ``what`` if it is a success or :data:`TIMEOUT`.

    Raises:
        OutOfMemoryError, DeviceLostError, NoDriverError, DeviceError: It is an error, named as Vulkan names it.
    """
    if result >= SUCCESS:
        return result
    names = dict(api().typeof("VkResult").elements)
    message = f"{what} failed with {names.get(result, result)}."
    if result in OUT_OF_MEMORY:
        raise out_of_memory(message, device)
    if result == DEVICE_LOST:
        raise lost(message, device)
    raise (NoDriverError if result == NO_DRIVER else DeviceError)(message, device=device)


class Functions:
    """Vulkan's calls: ``vk.CreateBuffer(device, …)`` raises what its result says.

    Args:
        device: Name of the device, for errors.
        handle: The ``VkDevice``: it finds functions that the loader does not export.
    """

    _finder = "vkGetDeviceProcAddr"

    def __init__(self, device: str, handle: Any = None) -> None:
        self.device, self.handle, self._lib = device, handle, loader()

    def __getattr__(self, call: str) -> Any:
        name = f"vk{call}"
        try:
            function = getattr(self._lib, name)
        except (AttributeError, api().error):  # a loader that is older than the driver, or an extension's function
            function = self._extension(name)
        if api().typeof(function).result is api().typeof("VkResult"):

            def checked(*args: Any) -> int:
                return check(self.device, name, function(*args))

            setattr(self, call, checked)
            return checked
        setattr(self, call, function)
        return function

    def create(self, kind: str, owner: Any = None, **fields: Any) -> Any:
        """The handle ``Vk<kind>``, of a ``Vk<kind>CreateInfo`` with these fields; ``owner`` is the device unless given.

        Memory is allocated, not created, and is made the same way.
        """
        memory = kind == "DeviceMemory"
        call, info = ("AllocateMemory", "MemoryAllocateInfo") if memory else (f"Create{kind}", f"{kind}CreateInfo")
        handle = api().new(f"Vk{kind}*")
        getattr(self, call)(owner or self.handle, make(f"Vk{info}", **fields), api().NULL, handle)
        return handle[0]

    def destroy(self, kind: str, handle: Any) -> None:
        """Destroy, or free, a handle of :meth:`create` whose owner is the device."""
        call = "FreeMemory" if kind == "DeviceMemory" else f"Destroy{kind}"
        getattr(self, call)(self.handle, handle, api().NULL)

    def listed(self, call: str, kind: str, *args: Any) -> list[Any]:
        """The items of type ``kind`` of a call that first counts and then fills."""
        ffi, function = api(), getattr(self, call)
        count, status = ffi.new("uint32_t*"), INCOMPLETE
        while status == INCOMPLETE:  # the number has grown in between
            function(*args, count, ffi.NULL)
            items = ffi.new(f"{kind}[]", max(count[0], 1))
            for item in items if "sType" in dir(items[0]) else ():
                item.sType = structure_types()[kind[2:].upper()]
            status = function(*args, count, items)
        return [ffi.new(f"{kind}*", items[i])[0] for i in range(count[0])]  # copies: the array goes

    def extensions(self, call: str, *args: Any) -> frozenset[str]:
        """The names that a call which enumerates extensions tells."""
        return frozenset(text(found.extensionName) for found in self.listed(call, "VkExtensionProperties", *args))

    def query(self, what: str, physical: Any, kinds: Iterable[str] = ()) -> dict[str, Any]:
        """What ``vkGetPhysicalDevice<what>2`` fills in: its own structure and those of ``kinds``, by kind.

        Kinds are names of structures without ``VkPhysicalDevice``.
        """
        found: dict[str, Any] = {}
        chain = None
        for kind in (*kinds, f"{what}2"):
            found[kind] = chain = make(f"VkPhysicalDevice{kind}", pNext=chain)
        getattr(self, f"GetPhysicalDevice{what}2")(physical, chain)
        return found

    def _extension(self, name: str) -> Any:
        ffi = api()
        for known in (name, f"{name}KHR", f"{name}EXT"):
            found = getattr(self._lib, self._finder)(self.handle, known.encode()) if self.handle else ffi.NULL
            if found != ffi.NULL:
                return ffi.cast(f"PFN_{name}", found)
        raise AttributeError(name)


class Instance(Functions):
    """A Vulkan instance. It lives as long as the process, and later objects share it.

    Drivers do not tolerate being opened and closed repeatedly: after many instances in a process, the loader refused
    NVIDIA's. Each set of environment variables read by the loader has an instance of its own.

    Attributes:
        version: Version of Vulkan, limited by the loader; newer devices are used at this version.

    Raises:
        NoDriverError: The loader finds no driver that fits.
        DeviceError: A driver does not start.
    """

    _finder = "vkGetInstanceProcAddr"

    def __init__(self, name: str = "vulkan") -> None:
        super().__init__(name)
        with _one_at_a_time:
            settings = frozenset((key, value) for key, value in os.environ.items() if key.startswith("VK_"))
            self.handle, self.version = _instance(settings)

    def physical_devices(self) -> list[Any]:
        """The devices, in the loader's order, which numbers them."""
        return self.listed("EnumeratePhysicalDevices", "VkPhysicalDevice", self.handle)


@cache
def _instance(_settings: frozenset[tuple[str, str]]) -> tuple[Any, int]:
    """The ``VkInstance`` of these settings of the environment, and its version."""
    vk, ffi = Functions("vulkan"), api()
    version, handle = ffi.new("uint32_t*", 1 << 22), ffi.new("VkInstance*")
    with contextlib.suppress(AttributeError):  # a loader of Vulkan 1.0 has no such function
        vk.EnumerateInstanceVersion(version)
    used = min(int(version[0]), VERSION_1_3)
    fields = {"pApplicationInfo": make("VkApplicationInfo", pApplicationName="bitnet", apiVersion=used)}
    if PORTABILITY in vk.extensions("EnumerateInstanceExtensionProperties", ffi.NULL):
        fields |= {"flags": 1, "ppEnabledExtensionNames": [PORTABILITY]}
    with without_display():
        vk.CreateInstance(make("VkInstanceCreateInfo", **fields), ffi.NULL, handle)
    return handle[0], used


def text(characters: Any) -> str:
    """A ``char[]`` of a structure."""
    found: bytes = api().string(characters)
    return found.decode(errors="replace")
