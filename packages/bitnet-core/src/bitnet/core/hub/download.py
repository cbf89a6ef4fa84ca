"""Downloads files into the hub's cache: checks for space first, resumes interrupted downloads, and verifies hashes.

The cache has the layout documented by ``huggingface_hub``, so that it can be shared with other programs: ``blobs/HASH``
holds the content, ``snapshots/COMMIT/PATH`` links to it, ``refs/main`` names the commit. The library's own download
restarts after an interruption and checks only the size. This one keeps ``blobs/HASH.incomplete``, and a file gets its
name only after its hash was verified.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import PARTIAL_CONTENT
from pathlib import Path
from typing import Any, TypeAlias

from bitnet.core.hub.cached import model_folder
from bitnet.core.hub.choice import RemoteFile
from bitnet.core.hub.errors import (
    DiskFullError,
    DownloadInterruptedError,
    HubError,
    HubUnreachableError,
    WrongHashError,
)
from bitnet.core.hub.remote import BRANCH, Listing, answering, host
from bitnet.core.hub.transport import body, opened
from bitnet.core.support.files import free_space, incomplete, length, replacing
from bitnet.core.support.units import size

WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each retry after attempts that brought no bytes."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
Progress: TypeAlias = "Callable[[RemoteFile, int], object]"
"""Called with a file and how many of its bytes are here, at the beginning and for each piece that arrives. What it
raises ends the download, which can be resumed."""
_CHUNK = 1 << 20
_SHOWN = 16
"""Hex digits of a hash shown in errors."""


def fetch(listing: Listing, files: Sequence[RemoteFile], progress: Progress | None = None) -> list[Path]:
    """The files' paths in the cache, in order; missing ones are downloaded and verified.

    Args:
        progress: Shows the progress in place of the library's bar.

    Raises:
        HubError: A file cannot be downloaded; files completed before stay in the cache.
    """
    folder = model_folder(listing.repo)
    pointers = [folder / "snapshots" / listing.commit / file.path for file in files]
    missing = [(file, pointer) for file, pointer in zip(files, pointers, strict=True) if not pointer.exists()]
    try:
        _check_room(folder, [file for file, _ in missing])
        for file, pointer in missing:
            _fetch_one(listing, file, folder, pointer, progress)
        _name_commit(folder, listing.commit)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise _no_room(folder) from error
        raise HubError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return pointers


def _fetch_one(listing: Listing, file: RemoteFile, folder: Path, pointer: Path, progress: Progress | None) -> None:
    blob = _blob(folder, file)
    if blob is None:
        raise WrongHashError(f"The hub gives no hash for {file.path} of {listing.repo}, so it cannot be verified.")
    with _locked(folder, blob.name):
        if not pointer.exists():
            if not blob.exists():
                partial = incomplete(blob)
                blob.parent.mkdir(parents=True, exist_ok=True)
                _download(listing, file, partial, progress)
                _check_hash(listing, file, partial)
                partial.replace(blob)
            _link(blob, pointer)


def _download(listing: Listing, file: RemoteFile, partial: Path, progress: Progress | None) -> None:
    """Append the missing bytes, over as many connections as needed while they make progress."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    partial.touch()  # enough for an empty file
    waits = iter(WAITS)
    looks: dict[str, Any] = {"total": file.size, "unit": "B", "unit_scale": True, "desc": file.path}
    # None: on a terminal only
    with tqdm(**looks, disable=None if progress is None else True) as bar:  # type: ignore[no-untyped-call]
        while (have := length(partial)) < file.size:
            bar.update(have - bar.n)
            arrived = bar.update if progress is None else _counted(progress, file, have)
            arrived(0)
            try:
                with answering(listing.repo):
                    _transfer(listing, file, partial, have, arrived)
                if length(partial) == have:
                    raise HubUnreachableError("the server sends no more data.")
            except HubUnreachableError as error:
                if length(partial) > have:
                    waits = iter(WAITS)
                elif (wait := next(waits, None)) is not None:
                    time.sleep(wait)
                else:
                    done = f"{size(have)} of {size(file.size)}"
                    raise DownloadInterruptedError(
                        f"The download of {file.path} of {listing.repo} broke off at {done}: {error.message}",
                        hint="Repeat the command to resume.",
                    ) from error


def _counted(progress: Progress, file: RemoteFile, have: int) -> Callable[[int], object]:
    """Reports how many bytes of a file are here; called with how many have arrived."""

    def arrived(count: int) -> None:
        nonlocal have
        have += count
        progress(file, have)

    return arrived


def _transfer(listing: Listing, file: RemoteFile, partial: Path, have: int, progress: Callable[[int], object]) -> None:
    """Append over one connection; if the server ignores ``Range``, the file restarts from the beginning."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=host())
    with opened(url, {"Range": f"bytes={have}-"} if have else None) as response:
        try:
            with partial.open("ab" if response.status_code == PARTIAL_CONTENT else "wb") as out:
                for data in body(response):
                    out.write(data)
                    progress(len(data))
                    if out.tell() > file.size:
                        return  # the hash check will then fail
        except OSError as error:
            if error.errno in NO_SPACE:
                partial.unlink()  # a partial file would only block later downloads
            raise


def _check_hash(listing: Listing, file: RemoteFile, path: Path) -> None:
    """Verify the SHA-256 of an LFS object, or the SHA-1 name of a git blob."""
    expected = file.sha256 or file.git_sha1
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if (found := digest.hexdigest()) != expected:
        path.unlink()
        raise WrongHashError(
            f"{file.path} of {listing.repo} does not match the hub's: its hash begins with {found[:_SHOWN]} but should "
            f"begin with {str(expected)[:_SHOWN]}. It was removed.",
            hint="Pull again. If it happens again, something between here and the hub modifies the file.",
        )


def _check_room(folder: Path, files: Sequence[RemoteFile]) -> None:
    blobs = {blob: file.size for file in files if (blob := _blob(folder, file)) is not None}
    # The unfinished file first: where another process has just given it its name, the blob is there.
    left = {blob: max(0, total - length(incomplete(blob))) for blob, total in blobs.items()}
    needed = sum(missing for blob, missing in left.items() if not blob.exists())
    if needed > free_space(folder):
        raise _no_room(folder, needed)


def _no_room(folder: Path, needed: int | None = None) -> DiskFullError:
    what = "The disk is full" if needed is None else f"The download needs {size(needed)}"
    return DiskFullError(
        f"{what}; {size(free_space(folder))} are free on the disk of {folder}.",
        hint="Remove models (bitnet list, bitnet rm), or move the cache with HF_HOME.",
    )


def _blob(folder: Path, file: RemoteFile) -> Path | None:
    name = file.sha256 or file.git_sha1
    return None if name is None else folder / "blobs" / name


def _link(blob: Path, pointer: Path) -> None:
    pointer.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        pointer.unlink()  # a link to a missing blob
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:  # Windows allows links only to some users; there the library's cache also holds the file itself
        blob.replace(pointer)


def _name_commit(folder: Path, commit: str) -> None:
    ref = folder / "refs" / BRANCH
    ref.parent.mkdir(parents=True, exist_ok=True)
    with replacing(ref) as file:  # a reader of half a commit would not find the model in the cache
        file.write(commit.encode("ascii"))


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the library's lock for this file; waits while another process downloads it."""
    from filelock import FileLock

    lock = folder.parent / ".locks" / folder.name / f"{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        yield
