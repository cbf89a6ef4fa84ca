"""Structures of Level Zero that the backend fills in or reads (``ze_api.h``, versions 1.0 to 1.13)."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_char_p, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import ClassVar, TypeVar

Filled = TypeVar("Filled", bound="Structure")


class Structure(ctypes.Structure):
    """One that begins with its type and a chain of extensions."""

    stype: ClassVar[int]
    _base: ClassVar[list[tuple[str, type]]] = [("type_", c_uint32), ("next_", c_void_p)]

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.type_ = type(self).stype


class DriverProperties(Structure):
    stype = 0x1
    _fields_ = [*Structure._base, ("uuid", c_uint8 * 16), ("version", c_uint32)]


class ExtensionProperties(ctypes.Structure):
    _fields_ = [("name", c_char * 256), ("version", c_uint32)]


class DeviceProperties(Structure):
    stype = 0x3
    _fields_ = [
        *Structure._base,
        ("kind", c_uint32),
        ("vendor", c_uint32),
        ("device", c_uint32),
        ("flags", c_uint32),
        ("subdevice", c_uint32),
        ("clock_rate", c_uint32),
        ("largest_alloc", c_uint64),
        ("hardware_contexts", c_uint32),
        ("queue_priorities", c_uint32),
        ("threads_per_eu", c_uint32),
        ("simd_width", c_uint32),
        ("eus_per_subslice", c_uint32),
        ("subslices_per_slice", c_uint32),
        ("slices", c_uint32),
        ("timer_resolution", c_uint64),
        ("timestamp_bits", c_uint32),
        ("kernel_timestamp_bits", c_uint32),
        ("uuid", c_uint8 * 16),
        ("name", c_char * 256),
    ]


class ComputeProperties(Structure):
    stype = 0x4
    _fields_ = [
        *Structure._base,
        ("group", c_uint32),
        ("group_sizes", c_uint32 * 3),
        ("group_counts", c_uint32 * 3),
        ("local_bytes", c_uint32),
        ("sub_group_count", c_uint32),
        ("sub_group_sizes", c_uint32 * 8),
    ]


class ModuleProperties(Structure):
    stype = 0x5
    _fields_ = [
        *Structure._base,
        ("spirv_version", c_uint32),
        ("flags", c_uint32),
        ("fp16_flags", c_uint32),
        ("fp32_flags", c_uint32),
        ("fp64_flags", c_uint32),
        ("arguments_bytes", c_uint32),
        ("printf_bytes", c_uint32),
        ("native_kernels", c_uint8 * 16),
    ]


class QueueGroupProperties(Structure):
    stype = 0x6
    _fields_ = [*Structure._base, ("flags", c_uint32), ("fill_bytes", c_size_t), ("queues", c_uint32)]


class MemoryProperties(Structure):
    stype = 0x7
    _fields_ = [
        *Structure._base,
        ("flags", c_uint32),
        ("clock_rate", c_uint32),
        ("bus_width", c_uint32),
        ("total", c_uint64),
        ("name", c_char * 256),
    ]


class MemoryAccessProperties(Structure):
    stype = 0x8
    _fields_ = [
        *Structure._base,
        ("host", c_uint32),
        ("device", c_uint32),
        ("shared_single", c_uint32),
        ("shared_cross", c_uint32),
        ("shared_system", c_uint32),
    ]


class ContextDesc(Structure):
    stype = 0xD
    _fields_ = [*Structure._base, ("flags", c_uint32)]


class QueueDesc(Structure):
    stype = 0xE
    _fields_ = [
        *Structure._base,
        ("ordinal", c_uint32),
        ("index", c_uint32),
        ("flags", c_uint32),
        ("mode", c_uint32),
        ("priority", c_uint32),
    ]


class ListDesc(Structure):
    stype = 0xF
    _fields_ = [*Structure._base, ("ordinal", c_uint32), ("flags", c_uint32)]


class DeviceAllocDesc(Structure):
    stype = 0x15
    _fields_ = [*Structure._base, ("flags", c_uint32), ("ordinal", c_uint32)]


class HostAllocDesc(Structure):
    stype = 0x16
    _fields_ = [*Structure._base, ("flags", c_uint32)]


class ModuleDesc(Structure):
    stype = 0x1B
    _fields_ = [
        *Structure._base,
        ("format", c_uint32),
        ("size", c_size_t),
        ("data", c_char_p),
        ("flags", c_char_p),
        ("constants", c_void_p),
    ]


class KernelDesc(Structure):
    stype = 0x1D
    _fields_ = [*Structure._base, ("flags", c_uint32), ("name", c_char_p)]


class KernelProperties(Structure):
    stype = 0x1E
    _fields_ = [
        *Structure._base,
        ("arguments", c_uint32),
        ("required_group", c_uint32 * 3),
        ("required_sub_groups", c_uint32),
        ("required_sub_group_size", c_uint32),
        ("most_sub_group_size", c_uint32),
        ("most_sub_groups", c_uint32),
        ("local_bytes", c_uint32),
        ("private_bytes", c_uint32),
        ("spill_bytes", c_uint32),
        ("uuid", c_uint8 * 32),
    ]


class InitDriversDesc(Structure):
    stype = 0x00020021
    _fields_ = [*Structure._base, ("flags", c_uint32)]


class GroupCount(ctypes.Structure):
    _fields_ = [("x", c_uint32), ("y", c_uint32), ("z", c_uint32)]
