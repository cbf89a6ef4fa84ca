"""Queries the hub for a model's files, and turns its errors into bitnet's."""

from __future__ import annotations

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

INSTALL = 'pip install "bitnet-core[hub]"'
DEFAULT_HOST = "https://huggingface.co"
BRANCH = "main"
TIMEOUT = 30.0
"""Seconds without data after which a connection counts as broken."""

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
        HubError: The model does not exist, this user has no access to it, or the hub cannot be reached.
        InvalidInputError: ``HF_ENDPOINT`` is not an address.
    """
    hub = library()
    with answering(repo):
        info = hub.HfApi(endpoint=host()).model_info(repo, revision=BRANCH, files_metadata=True, timeout=TIMEOUT)
    files = tuple(_file(sibling) for sibling in info.siblings or () if is_file_name(sibling.rfilename))
    if not _HASHES["git"].fullmatch(info.sha or ""):
        raise HubUnreachableError(f"{host()} names no commit of {repo}.", hint="Check that HF_ENDPOINT is a hub.")
    return Listing(repo, info.sha, files)


def _file(sibling: Any) -> RemoteFile:
    sha256 = sibling.lfs.sha256 if sibling.lfs is not None else ""
    return RemoteFile(
        path=sibling.rfilename,
        size=(sibling.lfs.size if sibling.lfs is not None else sibling.size) or 0,
        sha256=sha256 if _HASHES["sha256"].fullmatch(sha256) else None,
        git_sha1=sibling.blob_id if _HASHES["git"].fullmatch(sibling.blob_id or "") else None,
    )


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
