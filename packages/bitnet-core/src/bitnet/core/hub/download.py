"""Fetching a file into the hub's cache: room first, on from where it broke off, and whole or not at all.

The cache has the layout that ``huggingface_hub`` documents, so that other programs find what is here and we what they
fetched: ``blobs/HASH`` has the bytes, ``snapshots/COMMIT/PATH`` links to them, ``refs/main`` names the commit. The
library's own download begins anew after an interruption and checks the size only; this one keeps
``blobs/HASH.incomplete``, and a file gets its name after its bytes have given its hash.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bitnet.core.hub.cached import model_folder
from bitnet.core.hub.choice import RemoteFile
from bitnet.core.hub.errors import (
    DiskFullError,
    DownloadInterruptedError,
    HubError,
    HubUnreachableError,
    WrongHashError,
)
from bitnet.core.hub.remote import BRANCH, Listing, answering
from bitnet.core.support.units import size

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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
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
    """Append what is missing, over as many connections as it takes, as long as each brings something."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(listing.repo, file.path, revision=listing.commit)
    while (have := _length(partial)) != file.size:
        if have > file.size:
            partial.unlink()
            have = 0
        try:
            with answering(listing.repo), _quiet(), partial.open("ab") as out:
                headers = build_hf_headers() | {"Accept-Encoding": "identity"}
                http_get(
                    url, out, resume_size=have, headers=headers, expected_size=file.size, displayed_filename=file.path
                )
        except HubUnreachableError as error:
            _go_on(listing, file, partial, have, error)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                partial.unlink()  # which only keeps others from going on
            if error.errno is not None:
                raise
            _go_on(listing, file, partial, have, error)  # the library's check of the size, which has no number


def _go_on(listing: Listing, file: RemoteFile, partial: Path, had: int, cause: Exception) -> None:
    now = _length(partial)
    if now <= had:
        raise DownloadInterruptedError(
            f"The download of {file.path} of {listing.repo} broke off at {size(now)} of {size(file.size)}: {cause}",
            hint="The same command goes on from there.",
        ) from cause


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, the library does not log each attempt, with addresses that are keys to the file for a while."""
    logger = logging.getLogger("huggingface_hub.file_download")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
