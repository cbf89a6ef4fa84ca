"""The Vulkan loader through cffi: structures that keep what they point at, results as our errors, and an instance.

The binding is PyPI's ``vulkan``. Of it this takes the declarations only: importing the package itself opens the loader,
and takes ten times as long as they do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from bitnet.core.dynlib import without_display
from bitnet.core.errors import DeviceError, DeviceLostError, OutOfMemoryError
from bitnet.core.gpu.probing import SMALLER

T = TypeVar("T")

LOADER = {
    "linux": ["libvulkan.so.1", "libvulkan.so"],
    "darwin": ["libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib"],
    "win32": ["vulkan-1.dll"],
}
VERSION_1_1, VERSION_1_2, VERSION_1_3 = (1 << 22 | minor << 12 for minor in (1, 2, 3))
SUCCESS, TIMEOUT, INCOMPLETE = 0, 2, 5
OUT_OF_MEMORY = {-1, -2, -10, -1000069000}
"""Host memory, device memory, too many objects, pool memory."""
DEVICE_LOST, INCOMPATIBLE_DRIVER = -4, -9

_alive: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
_TYPES = {
    "VkPhysicalDeviceShaderFloat16Int8Features": "PHYSICAL_DEVICE_SHADER_FLOAT16_INT8_FEATURES",
}


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
def loader(name: str = "") -> Any:
    """The loader's functions and Vulkan's enumerations; ``name`` is one that opened."""
    names = [name] if name else LOADER.get(sys.platform, [])
    for candidate in names:
        try:
            return api().dlopen(candidate)
        except OSError as error:
            failure = error
    raise failure


def make(kind: str, **fields: Any) -> Any:
    """A structure (a pointer to it) that keeps alive all that it points at, with its ``sType`` set.

    A list becomes an array of structures, handles or numbers; text becomes a C string.
    """
    ffi = api()
    types = dict(ffi.typeof(kind).fields)
    kept: list[Any] = []
    values: dict[str, Any] = {}
    for name, value in fields.items():
        values[name] = _pointed(types[name].type, value, kept) if types[name].type.kind == "pointer" else value
    if "sType" in types:
        values["sType"] = getattr(loader(), "VK_STRUCTURE_TYPE_" + _TYPES.get(kind, _snake(kind)))
    made = ffi.new(kind + "*", values)
    _alive[made] = kept
    return made


def _pointed(kind: Any, value: Any, kept: list[Any]) -> Any:
    ffi = api()
    if isinstance(value, str):
        value = ffi.new("char[]", value.encode())
    elif isinstance(value, list):
        if kind.item.kind == "struct":
            kept += value  # the array gets copies, whose own pointers stay valid with the originals
            value = [item[0] for item in value]
        elif any(isinstance(item, str) for item in value):
            value = [ffi.new("char[]", item.encode()) for item in value]
            kept += value
        value = ffi.new(f"{kind.item.cname}[]", value)
    kept.append(value)
    return value


def _snake(kind: str) -> str:
    """``VkBufferCreateInfo`` → ``BUFFER_CREATE_INFO``."""
    ending = re.search(r"(KHR|EXT|NV)$", kind)
    stem = kind[2 : ending.start() if ending else None]
    name = re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).upper()
    return f"{name}_{ending.group()}" if ending else name


def check(device: str, what: str, result: int) -> int:
    """``result`` of the call ``what`` where it is a success, which :data:`TIMEOUT` counts as.

    Raises:
        OutOfMemoryError, DeviceLostError, DeviceError: It is an error, named as Vulkan names it.
    """
    if result >= SUCCESS:
        return result
    names = dict(api().typeof("VkResult").elements)
    message = f"{what} failed with {names.get(result, result)}."
    if result in OUT_OF_MEMORY:
        raise OutOfMemoryError(message, device=device, hint=SMALLER)
    if result == DEVICE_LOST:
        raise DeviceLostError(message, device=device, hint="Start again; the system's log tells more.")
    raise DeviceError(message, device=device)


class Functions:
    """Vulkan's calls for one device: ``vk.CreateBuffer(device, …)`` raises what its result says.

    Args:
        name: The device's, for errors.
        handle: The ``VkDevice``, where there is one yet: it finds functions that the loader does not export.
    """

    def __init__(self, name: str, handle: Any = None) -> None:
        self.device, self._lib, self._handle = name, loader(), handle

    def __getattr__(self, call: str) -> Any:
        name = f"vk{call}"
        try:
            function = getattr(self._lib, name)
        except (AttributeError, api().error):  # a loader that is older than the driver, or an extension's function
            function = self._extension(name)
        if api().typeof(function).result.cname == "VkResult":

            def checked(*args: Any) -> int:
                return check(self.device, name, function(*args))

            setattr(self, call, checked)
            return checked
        setattr(self, call, function)
        return function

    def create(self, kind: str, owner: Any, info: Any) -> Any:
        """The handle that ``vkCreate<kind>`` (or ``vkAllocate<kind>``) makes."""
        handle = api().new(f"Vk{'Device' if kind == 'Memory' else ''}{kind}*")
        call = "AllocateMemory" if kind == "Memory" else f"Create{kind}"
        getattr(self, call)(owner, info, api().NULL, handle)
        return handle[0]

    def _extension(self, name: str) -> Any:
        ffi = api()
        for known in (name, f"{name}KHR", f"{name}EXT"):
            found = self._lib.vkGetDeviceProcAddr(self._handle, known.encode()) if self._handle else ffi.NULL
            if found != ffi.NULL:
                return ffi.cast(f"PFN_{name}", found)
        raise AttributeError(name)


class Instance:
    """A Vulkan instance. It stays as long as the process does, as the drivers in it do, and the next one is the same.

    Drivers bear being opened and closed with every instance badly: in a process that had done so many times, the loader
    refused NVIDIA's. What the loader reads from the environment still counts: another environment has its own.

    Attributes:
        version: Of Vulkan, that of the loader at most: a newer device has no more than this of it here.

    Raises:
        DeviceError: The loader finds no driver that fits.
    """

    _made: ClassVar[dict[frozenset[tuple[str, str]], tuple[Any, int]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str = "vulkan") -> None:
        settings = frozenset((key, value) for key, value in os.environ.items() if key.startswith("VK_"))
        with self._lock:
            if settings not in self._made:
                self._made[settings] = _make_instance(name)
            self.handle, self.version = self._made[settings]

    def function(self, name: str) -> Any:
        """One of an extension for devices, which the loader does not export."""
        found = loader().vkGetInstanceProcAddr(self.handle, name.encode())
        return api().cast(f"PFN_{name}", found)

    def physical_devices(self) -> list[Any]:
        """The devices, in the loader's order, which numbers them."""
        call = loader().vkEnumeratePhysicalDevices
        return enumerated("vkEnumeratePhysicalDevices", "VkPhysicalDevice", call, self.handle, read=lambda item: item)


def _make_instance(name: str) -> tuple[Any, int]:
    ffi, lib = api(), loader()
    version = ffi.new("uint32_t*", VERSION_1_1)
    try:
        check(name, "vkEnumerateInstanceVersion", lib.vkEnumerateInstanceVersion(version))
    except (AttributeError, ffi.error):
        version[0] = 1 << 22
    used = min(int(version[0]), VERSION_1_3)
    application = make("VkApplicationInfo", pApplicationName="bitnet", apiVersion=used)
    fields: dict[str, Any] = {"pApplicationInfo": application}
    if "VK_KHR_portability_enumeration" in _instance_extensions():  # MoltenVK's devices are listed only then
        fields |= {"flags": 1, "enabledExtensionCount": 1}
        fields["ppEnabledExtensionNames"] = ["VK_KHR_portability_enumeration"]
    handle = ffi.new("VkInstance*")
    info = make("VkInstanceCreateInfo", **fields)
    with without_display():
        check(name, "vkCreateInstance", lib.vkCreateInstance(info, ffi.NULL, handle))
    return handle[0], used


def _instance_extensions() -> list[str]:
    call, nothing = loader().vkEnumerateInstanceExtensionProperties, api().NULL
    what = "vkEnumerateInstanceExtensionProperties"
    return enumerated(what, "VkExtensionProperties", call, nothing, read=lambda item: text(item.extensionName))


def text(characters: Any) -> str:
    """A ``char[]`` of a structure."""
    found: bytes = api().string(characters)
    return found.decode(errors="replace")


def enumerated(what: str, kind: str, function: Any, *args: Any, read: Callable[[Any], T]) -> list[T]:
    """What ``read`` takes from each item of one of Vulkan's functions that first count and then fill.

    Raises:
        DeviceError: The call ``what`` failed.
    """
    ffi = api()
    count, status = ffi.new("uint32_t*"), INCOMPLETE
    while status == INCOMPLETE:  # the number has grown in between
        check("vulkan", what, function(*args, count, ffi.NULL) or SUCCESS)
        items = ffi.new(f"{kind}[]", max(count[0], 1))
        status = check("vulkan", what, function(*args, count, items) or SUCCESS)
    return [read(items[i]) for i in range(count[0])]
