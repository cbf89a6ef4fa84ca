"""GGUF files: a bounded reader, an atomic writer, and the tensor types bitnet reads."""

from bitnet.core.gguf.part import TensorInfo
from bitnet.core.gguf.reader import GGUFFile
from bitnet.core.gguf.ternary import i2s_bytes, pack_ternary, unpack_ternary
from bitnet.core.gguf.types import GGMLType, MetadataValue, ValueType
from bitnet.core.gguf.writer import TensorSource, write_gguf

__all__ = [
    "GGMLType",
    "GGUFFile",
    "MetadataValue",
    "TensorInfo",
    "TensorSource",
    "ValueType",
    "i2s_bytes",
    "pack_ternary",
    "unpack_ternary",
    "write_gguf",
]
