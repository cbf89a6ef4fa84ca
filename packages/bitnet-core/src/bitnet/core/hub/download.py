"""Fetching a file into the hub's cache: room first, on from where it broke off, and whole or not at all.

The cache has the layout that ``huggingface_hub`` documents, so that other programs find what is here and we what they
fetched: ``blobs/HASH`` has the bytes, ``snapshots/COMMIT/PATH`` links to them, ``refs/main`` names the commit. The
library's own download begins anew after an interruption and checks the size only; this one keeps
``blobs/HASH.incomplete``, and a file gets its name after its bytes have given its hash.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import PARTIAL_CONTENT
from pathlib import Path
from typing import Any

from bitnet.core.hub.cached import model_folder
from bitnet.core.hub.choice import RemoteFile
from bitnet.core.hub.errors import (
    DiskFullError,
    DownloadInterruptedError,
    HubError,
    HubUnreachableError,
    WrongHashError,
)
from bitnet.core.hub.remote import BRANCH, TIMEOUT, Listing, answering
from bitnet.core.support.units import size

WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt, while none brings a byte."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_CHUNK = 1 << 20
_SHOWN = 16
"""Hex digits of a hash that an error shows."""


def fetch(listing: Listing, files: Sequence[RemoteFile]) -> list[Path]:
    """The files' paths in the cache, in order; those that are not there yet are downloaded and checked.

    Raises:
        HubError: A file cannot be had; what was whole by then stays in the cache.
    """
    folder = model_folder(listing.repo)
    pointers = [folder / "snapshots" / listing.commit / file.path for file in files]
    missing = [(file, pointer) for file, pointer in zip(files, pointers, strict=True) if not pointer.exists()]
    try:
        _check_room(folder, [file for file, _ in missing])
        for file, pointer in missing:
            _fetch_one(listing, file, folder, pointer)
        _name_commit(folder, listing.commit)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise _no_room(folder) from error
        raise HubError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return pointers


def _fetch_one(listing: Listing, file: RemoteFile, folder: Path, pointer: Path) -> None:
    blob = _blob(folder, file)
    if blob is None:
        raise WrongHashError(f"The hub gives no hash of {file.path} of {listing.repo}, so it cannot be checked.")
    with _locked(folder, blob.name):
        if not pointer.exists():
            if not blob.exists():
                partial = _partial(blob)
                blob.parent.mkdir(parents=True, exist_ok=True)
                _download(listing, file, partial)
                _check_hash(listing, file, partial)
                partial.replace(blob)
            _link(blob, pointer)


def _download(listing: Listing, file: RemoteFile, partial: Path) -> None:
    """Append what is missing, over as many connections as it takes while they bring something."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    partial.touch()  # all of an empty file
    waits = iter(WAITS)
    looks: dict[str, Any] = {"total": file.size, "unit": "B", "unit_scale": True, "desc": file.path}
    with tqdm(**looks, disable=None) as bar:  # type: ignore[no-untyped-call]  # None: on a terminal only
        while (have := _length(partial)) < file.size:
            bar.update(have - bar.n)
            try:
                with answering(listing.repo):
                    _transfer(listing, file, partial, have, bar.update)
                if _length(partial) == have:
                    raise HubUnreachableError("nothing more is sent.")
            except HubUnreachableError as error:
                if _length(partial) > have:
                    waits = iter(WAITS)
                elif (wait := next(waits, None)) is not None:
                    time.sleep(wait)
                else:
                    done = f"{size(have)} of {size(file.size)}"
                    raise DownloadInterruptedError(
                        f"The download of {file.path} of {listing.repo} broke off at {done}: {error.message}",
                        hint="The same command goes on from there.",
                    ) from error


def _transfer(listing: Listing, file: RemoteFile, partial: Path, have: int, progress: Callable[[int], object]) -> None:
    """Append over one connection; a server that does not know ``Range`` begins anew, and so does the file."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    url = hf_hub_url(listing.repo, file.path, revision=listing.commit)
    headers = build_hf_headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        hf_raise_for_status(response)
        try:
            with partial.open("ab" if response.status_code == PARTIAL_CONTENT else "wb") as out:
                for data in response.iter_bytes():
                    out.write(data)
                    progress(len(data))
                    if out.tell() > file.size:
                        return  # and the hash will not fit
        except OSError as error:
            if error.errno in NO_SPACE:
                partial.unlink()  # what is kept would only stand in others' way
            raise


def _check_hash(listing: Listing, file: RemoteFile, path: Path) -> None:
    """SHA-256 where the file is an LFS object, else the name of git's blob, which is a SHA-1."""
    expected = file.sha256 or file.git_sha1
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if (found := digest.hexdigest()) != expected:
        path.unlink()
        raise WrongHashError(
            f"{file.path} of {listing.repo} is not what the hub has: its hash begins with {found[:_SHOWN]} and should "
            f"with {str(expected)[:_SHOWN]}. It was removed.",
            hint="Pull again; where that repeats, something between here and the hub changes it.",
        )


def _check_room(folder: Path, files: Sequence[RemoteFile]) -> None:
    blobs = {blob: file.size for file in files if (blob := _blob(folder, file)) is not None and not blob.exists()}
    needed = sum(max(0, total - _length(_partial(blob))) for blob, total in blobs.items())
    if needed > _free(folder):
        raise _no_room(folder, needed)


def _no_room(folder: Path, needed: int | None = None) -> DiskFullError:
    what = "The disk is full" if needed is None else f"The download takes {size(needed)}"
    return DiskFullError(
        f"{what}; {size(_free(folder))} are free where {folder} is.",
        hint="Remove models (bitnet list, bitnet rm), or have the cache elsewhere by HF_HOME.",
    )


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _blob(folder: Path, file: RemoteFile) -> Path | None:
    name = file.sha256 or file.git_sha1
    return None if name is None else folder / "blobs" / name


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _link(blob: Path, pointer: Path) -> None:
    pointer.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        pointer.unlink()  # a link to a blob that is gone
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:  # Windows gives links to some users only; the library's cache has the file itself there, too
        blob.replace(pointer)


def _name_commit(folder: Path, commit: str) -> None:
    ref = folder / "refs" / BRANCH
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit, encoding="ascii")


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """The lock that the library takes for this file; another process that fetches it is waited for."""
    from filelock import FileLock

    lock = folder.parent / ".locks" / folder.name / f"{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        yield
