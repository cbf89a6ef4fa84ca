"""Files that clients have sent, or that batches have made, in a folder that the operator names.

A file belongs to the key with which it came; for other keys it does not exist. All files together have a bound. On the
disk, each is its content and a description beside it, which is written last: content without one is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bitnet.core.errors import BitNetError, InvalidInputError, brief
from bitnet.core.support.files import lock, replacing
from bitnet.core.support.units import size
from bitnet.server.request.errors import RequestError

MAX_FILE_BYTES = 200_000_000
"""Maximum bytes of a file, as for OpenAI's batches."""
MAX_FILES = 10_000
"""Maximum files of all keys together."""
KEEP_SECONDS = 30 * 86_400
"""Seconds for which a file is kept, unless its client says otherwise."""


def folder_name(owner: bytes) -> str:
    """The name of the folder with the files of a key, from which the key's digest cannot be told.

    Args:
        owner: As :attr:`Call.owner <bitnet.server.request.call.Call.owner>` has it.
    """
    return hashlib.sha256(b"bitnet files of " + owner).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file.

    Attributes:
        folder: Name of the folder of its owner.
        length: Bytes of its content.
        created: Time in nanoseconds since 1970, by which files are ordered.
        expires_at: Time in seconds since 1970 at which it is removed.
    """

    id: str
    folder: str
    filename: str
    purpose: str
    length: int
    created: int
    expires_at: int

    def document(self) -> dict[str, Any]:
        """It as OpenAI's API describes files."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.length,
            "created_at": self.created // 10**9,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Incoming:
    """A file that arrives.

    Raises:
        RequestError: :meth:`write` finds it too large, or no room for it.
    """

    def __init__(self, store: Store, folder: str, id: str, file: BinaryIO) -> None:
        self._store, self._folder, self._id, self._file = store, folder, id, file
        self.length = 0

    def write(self, piece: bytes) -> None:
        self._store.take(len(piece))
        self.length += len(piece)
        if self.length > MAX_FILE_BYTES:
            raise RequestError(413, f"The file is larger than the {MAX_FILE_BYTES:,} bytes that are allowed.")
        try:
            self._file.write(piece)
        except OSError as error:
            raise RequestError(507, f"The server cannot keep the file: {error.strerror}.") from None

    def keep(self, filename: str, purpose: str, seconds: int | None = None) -> StoredFile:
        """Keep the file, which has arrived; arguments as for :meth:`Store.keep`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._store.keep(self._id, self._folder, filename, purpose, seconds)


class Store:
    """The files, in a folder that no other process uses. Use it from the event loop only.

    Args:
        folder: It is made if it is not there.
        max_bytes: Maximum bytes of all files together.

    Attributes:
        used: Bytes of all files, and of those that arrive or are being written.

    Raises:
        BitNetError: The folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("ab")
        except OSError as error:
            raise InvalidInputError(f"--file-storage {folder} cannot be used: {error.strerror}.") from None
        try:
            lock(self._lock.fileno())
        except OSError:
            self._lock.close()
            raise BitNetError(
                f"another server keeps its files in {folder}.", hint="Name another folder with --file-storage."
            ) from None
        self._files: dict[str, StoredFile] = {}
        for described in sorted(folder.glob("*/file-*.json")):
            if (file := _read(described)) is not None and self.path(file.folder, file.id).is_file():
                self._files[file.id] = file
        self.used = sum(path.stat().st_size for path in self._contents())

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    def take(self, count: int) -> None:
        """Count bytes that are about to be written.

        Raises:
            RequestError: There is no room for them.
        """
        if self.used + count > self._max_bytes:
            self._forget_old()
        if self.used + count > self._max_bytes:
            raise RequestError(
                507,
                f"The server keeps at most {size(self._max_bytes)} of files, and that is full. Delete some.",
                code="file_storage_full",
            )
        self.used += count

    def path(self, folder: str, id: str) -> Path:
        """Where the content of a file is."""
        return self.folder / folder / id

    def new(self) -> str:
        """An id for a file."""
        return f"file-{secrets.token_hex(12)}"

    def has(self, id: str) -> bool:
        """Whether there is a file of this id."""
        return id in self._files

    @contextmanager
    def incoming(self, folder: str) -> Iterator[Incoming]:
        """A new file's content, which is removed unless it is kept in this context.

        Raises:
            RequestError: It cannot be made.
        """
        self._forget_old()
        if len(self._files) >= MAX_FILES:
            raise RequestError(507, f"The server keeps at most {MAX_FILES:,} files. Delete some.")
        id = self.new()
        path = self.path(folder, id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with path.open("xb") as file:
            arriving = Incoming(self, folder, id, file)
            try:
                yield arriving
            finally:
                file.close()
                if id not in self._files:
                    path.unlink(missing_ok=True)
                    self.used -= arriving.length

    def keep(self, id: str, folder: str, filename: str, purpose: str, seconds: int | None = None) -> StoredFile:
        """Keep a file whose content is written.

        Args:
            seconds: For how long; None: :data:`KEEP_SECONDS`.
        """
        now = time.time_ns()
        ends = now // 10**9 + (KEEP_SECONDS if seconds is None else seconds)
        count = self.path(folder, id).stat().st_size
        file = StoredFile(id, folder, filename, purpose, count, now, ends)
        write_json(self._description(file), asdict(file))
        self._files[id] = file
        return file

    def _description(self, file: StoredFile) -> Path:
        return self.folder / file.folder / f"{file.id}.json"

    def get(self, folder: str, id: str) -> StoredFile:
        """A file of a folder.

        Raises:
            RequestError: There is none of that id.
        """
        self._forget_old()
        file = self._files.get(id)
        if file is None or file.folder != folder:
            raise RequestError(404, f"There is no file {brief(id)}.", field="file_id")
        return file

    def listed(self, folder: str) -> list[StoredFile]:
        """The files of a folder, the newest first."""
        self._forget_old()
        return sorted((one for one in self._files.values() if one.folder == folder), key=lambda one: -one.created)

    def delete(self, file: StoredFile) -> None:
        self._description(file).unlink(missing_ok=True)
        self.remove(file.folder, file.id)
        del self._files[file.id]

    def remove(self, folder: str, id: str) -> None:
        """Remove content that was not kept, or is no longer."""
        path = self.path(folder, id)
        if path.is_file():
            self.used -= path.stat().st_size
            path.unlink()

    def remove_strange(self, known: set[str]) -> None:
        """Remove content that no description and none of these ids is of: its server ended while it arrived."""
        for path in self._contents():
            if path.name not in self._files and path.name not in known:
                self.remove(path.parent.name, path.name)

    def _contents(self) -> list[Path]:
        return [path for path in self.folder.glob("*/file-*") if path.suffix != ".json"]

    def _forget_old(self) -> None:
        now = time.time()
        for file in [one for one in self._files.values() if one.expires_at <= now]:
            self.delete(file)


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as output:
        output.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace"))


def _read(path: Path) -> StoredFile | None:
    try:
        return StoredFile(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
