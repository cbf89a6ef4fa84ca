"""Model files in object stores (``s3://BUCKET/KEY``, ``gs://…``, ``az://…``): one download for each state of an object.

``obstore`` talks to the stores; it is imported when an address is first looked up. Credentials and endpoints are those
of the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, …) or of the
machine. A file is in ``objects/ADDRESS/STATE/NAME`` of bitnet's cache folder, both being hashes, and gets its name only
once it is whole. Processes of a machine that want the same one wait for one download.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bitnet.core.errors import BitNetError, brief
from bitnet.core.gguf.split import part_name
from bitnet.core.hub.address import check_address
from bitnet.core.support.cache import cache_folder
from bitnet.core.support.files import free_space, incomplete, length
from bitnet.core.support.units import size

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

CONNECT_SECONDS, RETRY_SECONDS, RETRIES = 10, 60, 4
DOWNLOAD_SECONDS = 3600
"""Maximum seconds of one answer of a store, which may be a whole file."""
HASH_DIGITS = 16


class ObjectStoreError(BitNetError):
    """A model cannot be downloaded from an object store."""

    exit_code: ClassVar[int] = 4


def locate(address: str, *, tell: Callable[[str], None]) -> Path:
    """The path of an object's file, or of a split model's first part, after downloading it and all its parts if needed.

    Args:
        tell: Called with the address and its size before a download.

    Raises:
        InvalidInputError: It is no address.
        ObjectStoreError: There is no such object, the store refuses or does not answer, or the disk is full.
    """
    check_address(address)
    root, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    store = _store(f"{root}://{bucket}", address)
    part = part_name(key)
    keys = [key] if part is None else [part.at(number + 1) for number in range(part.parts)]
    found = [_head(store, f"{root}://{bucket}", one) for one in keys]
    state = _short(repr([(one["e_tag"], one["last_modified"].isoformat(), one["size"]) for one in found]))
    folder = cache_folder() / "objects" / _short(address) / state
    files = [folder / one.rpartition("/")[2] for one in keys]
    if not all(file.exists() for file in files):
        with _locked(folder):
            missing = [i for i, file in enumerate(files) if not file.exists()]
            if missing:
                tell(f"{address}: {size(sum(found[i]['size'] for i in missing))}")
                _check_room(folder, sum(found[i]["size"] - length(incomplete(files[i])) for i in missing), address)
            for i in missing:
                _download(store, address, keys[i], found[i], files[i])
    return files[0]


def _store(root: str, address: str) -> ObjectStore:
    try:
        from obstore.store import from_url
    except ImportError:
        raise ObjectStoreError(
            f"{brief(address)} is in an object store, and obstore is not installed.",
            hint='pip install "bitnet-core[object-store]"',
        ) from None
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    retries: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    client: Any = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "timeout": timedelta(seconds=DOWNLOAD_SECONDS),
    }
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    with _answering(address):
        return from_url(root, retry_config=retries, client_options=client)


def _head(store: ObjectStore, root: str, key: str) -> ObjectMeta:
    import obstore

    with _answering(f"{root}/{key}"):
        return obstore.head(store, key)


def _download(store: ObjectStore, address: str, key: str, about: ObjectMeta, file: Path) -> None:
    """Append what is missing to the unfinished file, and name it once it is whole."""
    import obstore

    partial = incomplete(file)
    have = length(partial)
    if have < about["size"] or not partial.exists():
        options: Any = {"range": {"offset": have}} if have else {}
        if about["e_tag"] is not None:
            options["if_match"] = about["e_tag"]  # it must not change meanwhile
        with _answering(address), partial.open("ab") as out:
            if about["size"]:
                for data in obstore.get(store, key, options=options):
                    out.write(data)
    if (came := length(partial)) != about["size"]:
        partial.unlink()
        raise ObjectStoreError(f"{brief(address)} has {about['size']:,} bytes, but {came:,} came.")
    partial.replace(file)


@contextmanager
def _answering(address: str) -> Iterator[None]:
    """In this context, errors of the store and of the disk are one line that names the address."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise ObjectStoreError(f"There is no object at {brief(address)}.", hint="Check bucket and key.") from None
    except exceptions.PreconditionError:
        raise ObjectStoreError(f"{brief(address)} was changed while it was downloaded; try again.") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
        raise ObjectStoreError(
            f"The store denies access to {brief(address)}: {_line(error)}",
            hint="Check the credentials in the environment, such as AWS_ACCESS_KEY_ID.",
        ) from None
    except (exceptions.BaseError, OSError) as error:
        raise ObjectStoreError(f"{brief(address)} cannot be read: {_line(error)}") from None


def _line(error: BaseException) -> str:
    """What went wrong: the first line of the store's error, which may have many."""
    return str(error).strip().partition("\n")[0].strip().rstrip(":")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process downloads into this folder, which is made."""
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            yield
    except OSError as error:
        raise ObjectStoreError(f"{folder} cannot be written: {error.strerror or error}.") from None


def _check_room(folder: Path, needed: int, address: str) -> None:
    if needed > (free := free_space(folder)):
        raise ObjectStoreError(
            f"{brief(address)} needs {size(needed)}; {size(free)} are free on the disk of {folder}.",
            hint="Remove files there, or move bitnet's cache with BITNET_CACHE_DIR.",
        )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
