"""Building GGUF files byte by byte, so that any part of one can be made wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest


class Builder:
    """A GGUF file from raw pieces; nothing is checked."""

    def __init__(self) -> None:
        self.version = 3
        self.metadata: list[bytes] = []
        self.tensors: list[bytes] = []
        self.data = b""
        self.counts: tuple[int, int] | None = None

    @staticmethod
    def string(text: str | bytes) -> bytes:
        raw = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(raw)) + raw

    def add(self, key: str | bytes, kind: int, value: bytes) -> Builder:
        self.metadata.append(self.string(key) + struct.pack("<I", kind) + value)
        return self

    def tensor(self, name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> Builder:
        self.tensors.append(self.string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
        return self

    def bytes(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.metadata))
        head = b"GGUF" + struct.pack("<IQQ", self.version, *counts) + b"".join(self.metadata + self.tensors)
        return head + bytes(-len(head) % 32) + self.data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path


@pytest.fixture
def build() -> Builder:
    return Builder()
