"""Objective-C messages through ctypes: every selector used is declared with its result and argument types.

``id`` is an object's address. An object from a selector that begins with ``new``, ``alloc`` or ``init``, or from a C
function with Create or Copy in its name, belongs to the caller, who releases it once with :meth:`Objc.release`.
All others live as long as the :meth:`Objc.pool` around the message.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bitnet.core.errors import DeviceError
from bitnet.core.support.dynlib import Library, open_library

LIBRARIES: Mapping[str, str] = {
    "objc": "/usr/lib/libobjc.A.dylib",
    "foundation": "/System/Library/Frameworks/Foundation.framework/Foundation",
    "metal": "/System/Library/Frameworks/Metal.framework/Metal",
}
TEST_DRIVER = "bitnet_test_driver"
"""Symbol exported only by the tests' own library, which identifies it."""


class MTLSize(ctypes.Structure):
    """Numbers of threads or threadgroups in three dimensions."""

    _fields_ = (("width", ctypes.c_ulong), ("height", ctypes.c_ulong), ("depth", ctypes.c_ulong))


class NSRange(ctypes.Structure):
    """A range of a list: first index and count."""

    _fields_ = (("location", ctypes.c_ulong), ("length", ctypes.c_ulong))


TYPES: Mapping[str, Any] = {
    "void": None,
    "id": ctypes.c_void_p,
    "BOOL": ctypes.c_bool,
    "NSInteger": ctypes.c_long,
    "NSUInteger": ctypes.c_ulong,
    "uint64_t": ctypes.c_uint64,
    "const char *": ctypes.c_char_p,
    "void *": ctypes.c_void_p,
    "block": ctypes.c_void_p,
    "NSError **": ctypes.POINTER(ctypes.c_void_p),
    "SEL": ctypes.c_void_p,
    "id *": ctypes.c_void_p,
    "const id *": ctypes.c_void_p,
    "const NSUInteger *": ctypes.c_void_p,
    "NSRange": NSRange,
    "MTLSize": MTLSize,
}
"""C's types, as ctypes has them on a 64-bit system."""
MESSAGES: Mapping[str, tuple[str, ...]] = {
    "alloc": ("id",),
    "init": ("id",),
    "retain": ("id",),
    "release": ("void",),
    "stringWithUTF8String:": ("id", "const char *"),
    "UTF8String": ("const char *",),
    "processInfo": ("id",),
    "operatingSystemVersionString": ("id",),
    "count": ("NSUInteger",),
    "objectAtIndex:": ("id", "NSUInteger"),
    "localizedDescription": ("id",),
    "code": ("NSInteger",),
    "name": ("id",),
    "registryID": ("uint64_t",),
    "supportsFamily:": ("BOOL", "NSInteger"),
    "recommendedMaxWorkingSetSize": ("uint64_t",),
    "currentAllocatedSize": ("NSUInteger",),
    "maxBufferLength": ("NSUInteger",),
    "maxThreadgroupMemoryLength": ("NSUInteger",),
    "newCommandQueue": ("id",),
    "newBufferWithLength:options:": ("id", "NSUInteger", "NSUInteger"),
    "newBufferWithBytesNoCopy:length:options:deallocator:": ("id", "void *", "NSUInteger", "NSUInteger", "block"),
    "newLibraryWithSource:options:error:": ("id", "id", "id", "NSError **"),
    "newFunctionWithName:": ("id", "id"),
    "newComputePipelineStateWithDescriptor:options:reflection:error:": ("id", "id", "NSUInteger", "id *", "NSError **"),
    "setComputeFunction:": ("void", "id"),
    "setSupportIndirectCommandBuffers:": ("void", "BOOL"),
    "setBinaryArchives:": ("void", "id"),
    "fileURLWithPath:": ("id", "id"),
    "setUrl:": ("void", "id"),
    "newBinaryArchiveWithDescriptor:error:": ("id", "id", "NSError **"),
    "addComputePipelineFunctionsWithDescriptor:error:": ("BOOL", "id", "NSError **"),
    "serializeToURL:error:": ("BOOL", "id", "NSError **"),
    "newResidencySetWithDescriptor:error:": ("id", "id", "NSError **"),
    "addResidencySet:": ("void", "id"),
    "addAllocation:": ("void", "id"),
    "removeAllocation:": ("void", "id"),
    "requestResidency": ("void",),
    "setFastMathEnabled:": ("void", "BOOL"),
    "setLanguageVersion:": ("void", "NSUInteger"),
    "maxTotalThreadsPerThreadgroup": ("NSUInteger",),
    "threadExecutionWidth": ("NSUInteger",),
    "contents": ("void *",),
    "commandBuffer": ("id",),
    "computeCommandEncoder": ("id",),
    "setComputePipelineState:": ("void", "id"),
    "setBuffers:offsets:withRange:": ("void", "const id *", "const NSUInteger *", "NSRange"),
    "dispatchThreadgroups:threadsPerThreadgroup:": ("void", "MTLSize", "MTLSize"),
    "useResources:count:usage:": ("void", "const id *", "NSUInteger", "NSUInteger"),
    "executeCommandsInBuffer:withRange:": ("void", "id", "NSRange"),
    "endEncoding": ("void",),
    "commit": ("void",),
    "waitUntilCompleted": ("void",),
    "status": ("NSUInteger",),
    "error": ("id",),
    "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:": ("id", "id", "NSUInteger", "NSUInteger"),
    "setCommandTypes:": ("void", "NSUInteger"),
    "setInheritBuffers:": ("void", "BOOL"),
    "setInheritPipelineState:": ("void", "BOOL"),
    "setMaxKernelBufferBindCount:": ("void", "NSUInteger"),
    "indirectComputeCommandAtIndex:": ("id", "NSUInteger"),
    "setKernelBuffer:offset:atIndex:": ("void", "id", "NSUInteger", "NSUInteger"),
    "concurrentDispatchThreadgroups:threadsPerThreadgroup:": ("void", "MTLSize", "MTLSize"),
    "setBarrier": ("void",),
    "signatureWithObjCTypes:": ("id", "const char *"),
    "invocationWithMethodSignature:": ("id", "id"),
    "setSelector:": ("void", "SEL"),
    "setArgument:atIndex:": ("void", "void *", "NSInteger"),
    "invokeWithTarget:": ("void", "id"),
    "initWithObjects:count:": ("id", "const id *", "NSUInteger"),
    "makeObjectsPerformSelector:withObject:": ("void", "SEL", "id"),
}
"""Selector to the type of its result, then those of its arguments, as Apple's documentation has them."""
ENCODINGS: Mapping[str, str] = {
    "void": "v",
    "id": "@",
    "const id *": "^@",
    "const NSUInteger *": "^Q",
    "NSRange": "{_NSRange=QQ}",
    "MTLSize": "{?=QQQ}",
}
"""What Objective-C's ``@encode`` makes of the types that a kept message may have."""


def open_libraries() -> dict[str, Library]:
    """The runtime and the frameworks; none on another system than macOS."""
    return {name: open_library(path) for name, path in LIBRARIES.items()} if sys.platform == "darwin" else {}


class Objc:
    """The runtime, with the messages of :data:`MESSAGES`.

    Attributes:
        is_test_driver: Whether it is the tests' own library, which has no GPU.
    """

    def __init__(self, libraries: Mapping[str, Library]) -> None:
        runtime, metal = libraries["objc"].handle, libraries["metal"].handle
        assert runtime is not None
        assert metal is not None
        self._runtime, self.is_test_driver = runtime, hasattr(metal, TEST_DRIVER)
        address = ctypes.cast(runtime.objc_msgSend, ctypes.c_void_p).value
        assert address is not None
        runtime.sel_registerName.restype, runtime.sel_registerName.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        runtime.objc_getClass.restype, runtime.objc_getClass.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        runtime.objc_autoreleasePoolPush.restype, runtime.objc_autoreleasePoolPush.argtypes = ctypes.c_void_p, []
        runtime.objc_autoreleasePoolPop.restype, runtime.objc_autoreleasePoolPop.argtypes = None, [ctypes.c_void_p]
        metal.MTLCopyAllDevices.restype, metal.MTLCopyAllDevices.argtypes = ctypes.c_void_p, []
        self.copy_all_devices: Callable[[], int | None] = metal.MTLCopyAllDevices
        self._messages: dict[str, tuple[Any, int]] = {}
        for selector, (result, *arguments) in MESSAGES.items():
            types = (TYPES[name] for name in ("void *", "void *", *arguments))
            prototype = ctypes.CFUNCTYPE(TYPES[result], *types)
            self._messages[selector] = prototype(address), runtime.sel_registerName(selector.encode())

    def selector(self, name: str) -> int:
        """A selector, as messages take one for an argument."""
        return self._messages[name][1]

    def kept_message(self, selector: str, *arguments: Any) -> int:
        """An NSInvocation: a message to be sent to any object, any number of times, by ``invokeWithTarget:``.

        It lives as long as the pool around it, and owns nothing of what its arguments point to.

        Args:
            arguments: Instances of the ctypes that :data:`TYPES` has for them.
        """
        result, *types = MESSAGES[selector]
        encoding = "".join((ENCODINGS[result], "@:", *(ENCODINGS[name] for name in types)))
        signature = self.send(self.class_named("NSMethodSignature"), "signatureWithObjCTypes:", encoding.encode())
        made = self.send(self.class_named("NSInvocation"), "invocationWithMethodSignature:", signature)
        self.send(made, "setSelector:", self.selector(selector))
        for i, argument in enumerate(arguments, 2):  # 0 and 1 are the object and the selector
            self.send(made, "setArgument:atIndex:", ctypes.byref(argument), i)
        return int(made)

    def array(self, objects: Sequence[int]) -> int:
        """A new NSArray, which owns its objects and is the caller's."""
        all_of_them = (ctypes.c_void_p * len(objects))(*objects)
        empty = self.send(self.class_named("NSArray"), "alloc")
        return int(self.send(empty, "initWithObjects:count:", all_of_them, len(objects)))

    def send(self, receiver: int | None, selector: str, *arguments: Any) -> Any:
        """Send a message.

        Raises:
            DeviceError: The receiver is nil, which would silently return nothing.
        """
        if not receiver:
            raise DeviceError(f"{selector} was sent to no object.", device="metal")
        function, at = self._messages[selector]
        return function(receiver, at, *arguments)

    def has_class(self, name: str) -> bool:
        """Whether the system has a class."""
        return bool(self._runtime.objc_getClass(name.encode()))

    def class_named(self, name: str) -> int:
        """A class. Raises DeviceError where the system has none of this name."""
        found = self._runtime.objc_getClass(name.encode())
        if not found:
            raise DeviceError(f"this macOS has no class {name}.", device="metal")
        return int(found)

    def made(self, name: str) -> int:
        """A new object of a class, which is the caller's."""
        return int(self.send(self.send(self.class_named(name), "alloc"), "init"))

    def release(self, owned: int | None) -> None:
        """Give back an object that is the caller's; nil is nothing."""
        if owned:
            self.send(owned, "release")

    def text(self, string: int | None) -> str:
        """What an NSString says; empty for nil."""
        return self.send(string, "UTF8String").decode(errors="replace") if string else ""

    def string(self, text: str) -> int:
        """An NSString that lives as long as the pool around it."""
        return int(self.send(self.class_named("NSString"), "stringWithUTF8String:", text.encode()))

    @contextmanager
    def pool(self) -> Iterator[None]:
        """An autorelease pool for the context."""
        pool = self._runtime.objc_autoreleasePoolPush()
        try:
            yield
        finally:
            self._runtime.objc_autoreleasePoolPop(pool)
