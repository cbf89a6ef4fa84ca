"""Queries the hub for a model's files, and turns its errors into bitnet's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.hub.choice import RemoteFile
from bitnet.core.hub.errors import (
    GatedModelError,
    HubNotInstalledError,
    HubUnreachableError,
    ModelNotFoundError,
    NotInCacheError,
)
from bitnet.core.hub.names import is_file_name
from bitnet.core.hub.transport import document
from bitnet.core.support.garbage import no_collection

INSTALL = 'pip install "bitnet-core[hub]"'
DEFAULT_HOST = "https://huggingface.co"
BRANCH = "main"
MAX_LISTING = 8 << 20
"""Maximum bytes of a listing; a file takes about 300."""
MAX_BYTES = 1 << 60
"""Bound of a file's size in a listing."""

_HASHES = {"sha256": re.compile(r"[0-9a-f]{64}"), "git": re.compile(r"[0-9a-f]{40}")}


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]


def library() -> ModuleType:
    """Import ``huggingface_hub``, an optional dependency that is slow to import.

    Raises:
        HubNotInstalledError: It is not installed.
    """
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise HubNotInstalledError(
            "Models from the hub need the package huggingface_hub.", hint=f"Install it: {INSTALL}"
        ) from None
    return huggingface_hub


def listing(repo: str) -> Listing:
    """Ask the hub for a model's files.

    Raises:
        HubError: The model does not exist, this user has no access to it, or the hub cannot be reached or sends
            something else than a listing.
        InvalidInputError: ``HF_ENDPOINT`` is not an address.
    """
    library()
    with answering(repo):
        raw = document(f"{host()}/api/models/{repo}/revision/{BRANCH}?blobs=true", MAX_LISTING)
    try:
        with no_collection():
            found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _malformed(repo, f"is not JSON ({error})") from None
    commit = found.get("sha") if isinstance(found, dict) else None
    if not (isinstance(commit, str) and _HASHES["git"].fullmatch(commit)):
        raise _malformed(repo, "names no commit")
    siblings = found.get("siblings")
    if not isinstance(siblings, list):
        raise _malformed(repo, "has no list of files")
    files = (_file(repo, sibling) for sibling in siblings)
    return Listing(repo, commit, tuple(file for file in files if is_file_name(file.path)))


def _file(repo: str, sibling: Any) -> RemoteFile:
    """A file of the listing; what git itself stores has no entry ``lfs``."""
    path = sibling.get("rfilename") if isinstance(sibling, dict) else None
    if not isinstance(path, str):
        raise _malformed(repo, f"has a file without a name: {brief(sibling)}")
    lfs = sibling.get("lfs")
    stored = sibling if lfs is None else lfs
    length = (stored.get("size") or 0) if isinstance(stored, dict) else None
    if type(length) is not int or not 0 <= length < MAX_BYTES:
        raise _malformed(repo, f"has no valid size of {brief(path)}")
    sha256 = None if lfs is None else _hash("sha256", lfs.get("sha256"))
    return RemoteFile(path, length, sha256, _hash("git", sibling.get("blobId")))


def _hash(kind: str, value: Any) -> str | None:
    return value if isinstance(value, str) and _HASHES[kind].fullmatch(value) else None


def _malformed(repo: str, how: str) -> HubUnreachableError:
    return HubUnreachableError(f"{host()}: the listing of {repo} {how}.", hint="Check that HF_ENDPOINT is a hub.")


@contextmanager
def answering(repo: str) -> Iterator[None]:
    """In this context, errors of ``huggingface_hub`` become a :class:`~bitnet.core.hub.errors.HubError` about
    ``repo``."""
    library()
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's, depending on the version

    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise NotInCacheError(
            f"{repo} is not in the cache, and HF_HUB_OFFLINE forbids asking the hub.",
            hint="Unset HF_HUB_OFFLINE, or list the cached models: bitnet list.",
        ) from None
    except errors.GatedRepoError as error:
        raise _gated(repo, error) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise ModelNotFoundError(
            f"{host()} has no {repo}, or hides it from you.",
            hint="Check the name; for a private model, set HF_TOKEN or run 'hf auth login'.",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise _gated(repo, error) from error
        raise HubUnreachableError(f"{host()} answers with status {status}.", hint="Try again later.") from error
    except HTTPError as error:
        raise HubUnreachableError(
            f"{host()} does not answer ({type(error).__name__}: {error}).",
            hint="Check the network and HF_ENDPOINT; 'bitnet list' shows the cached models.",
        ) from error


def _gated(repo: str, error: Any) -> GatedModelError:
    page = f"{host()}/{repo}"
    if library().get_token() is None:
        return GatedModelError(
            f"{repo} is available only to accounts that have accepted its terms.",
            hint=f"Accept them at {page}, then set HF_TOKEN to your token, or run 'hf auth login'.",
        )
    if error.response.status_code == 401:
        return GatedModelError(
            f"{host()} rejects the token sent for {repo}.",
            hint=f"Set HF_TOKEN to a valid token ({host()}/settings/tokens).",
        )
    return GatedModelError(
        f"The account of HF_TOKEN may not read {repo}.",
        hint=f"Accept its terms at {page}, or allow the token to read gated models.",
    )


def host() -> str:
    """The hub's address: ``HF_ENDPOINT``, or the usual one if it is not set or empty.

    Raises:
        InvalidInputError: ``HF_ENDPOINT`` is not an address.
    """
    from huggingface_hub import constants

    found = str(constants.ENDPOINT) or DEFAULT_HOST
    if not re.match("https?://[^/]", found):
        raise InvalidInputError(
            f"HF_ENDPOINT is {brief(found)}; it must be an address such as {DEFAULT_HOST}.",
            hint="Correct or unset the variable.",
        )
    return found
