"""OpenAI's ``/v1/files``: files of requests that clients send, and of the answers to them."""

from __future__ import annotations

import asyncio

from bitnet.core.errors import brief
from bitnet.server.api.listing import page
from bitnet.server.batch.store import KEEP_SECONDS, Store, StoredFile, folder_name
from bitnet.server.models.state import State
from bitnet.server.request.call import Call
from bitnet.server.request.errors import RequestError, wrong
from bitnet.server.request.multipart import Part, read_form

MAX_FIELD = 1024
"""Maximum bytes of a field of the form that is not the file."""
MIN_KEEP_SECONDS = 3600
PIECE = 1 << 18
"""Bytes of a file that are sent at a time."""


def storage(state: State) -> Store:
    """Where the server keeps files.

    Raises:
        RequestError: It keeps none.
    """
    if state.files is None:
        message = "This server keeps no files, as --file-storage names no folder for them."
        raise RequestError(404, message, code="no_file_storage")
    return state.files


async def create(state: State, call: Call) -> None:
    store, folder = storage(state), folder_name(call.owner)
    fields: dict[str, bytes] = {}
    filename, part = None, Part("", None)
    with store.incoming(folder) as file:
        async for one in read_form(call.header("content-type") or "", call.pieces()):
            if isinstance(one, Part):
                part = one
                if part.name in fields or (part.name == "file" and filename is not None):
                    raise wrong(brief(part.name), "is there twice.")
                if part.name == "file":
                    filename = part.filename or "file"
                else:
                    fields[part.name] = b""
            elif part.name == "file":
                file.write(one)
            else:
                fields[part.name] += one
                if len(fields[part.name]) > MAX_FIELD:
                    raise wrong(brief(part.name), f"is longer than {MAX_FIELD} bytes.")
        if filename is None:
            raise wrong("file", "is missing.")
        texts = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
        if (purpose := texts.get("purpose")) != "batch":
            raise wrong("purpose", f"is {brief(purpose)}; it must be batch, the only purpose of files here.")
        seconds = texts.get("expires_after[seconds]")
        kept = file.keep(filename[:MAX_FIELD], purpose, _seconds(texts.get("expires_after[anchor]"), seconds))
    await call.reply(kept.document())


def _seconds(anchor: str | None, given: str | None) -> int | None:
    if given is None and anchor is None:
        return None
    if given is None or not given.isascii() or not given.isdigit():
        raise wrong("expires_after[seconds]", f"is {brief(given)}; it must be a number of seconds.")
    return keep_seconds("expires_after", anchor, int(given[:20]))


def keep_seconds(field: str, anchor: str | None, seconds: int) -> int:
    """For how long a client wants a file to be kept.

    Raises:
        RequestError: That is not allowed.
    """
    if anchor != "created_at":
        raise wrong(f"{field}[anchor]", f"is {brief(anchor)}; it must be created_at.")
    if not MIN_KEEP_SECONDS <= seconds <= KEEP_SECONDS:
        raise wrong(f"{field}[seconds]", f"is {seconds}; it must be in {MIN_KEEP_SECONDS:,} … {KEEP_SECONDS:,}.")
    return seconds


def _found(state: State, call: Call) -> StoredFile:
    return storage(state).get(folder_name(call.owner), call.scope["path_params"]["id"])


async def files(state: State, call: Call) -> None:
    listed = storage(state).listed(folder_name(call.owner))
    if (purpose := call.query().get("purpose")) is not None:
        listed = [one for one in listed if one.purpose == purpose]
    await call.reply(page(call, listed, StoredFile.document, limit=10_000, max_limit=10_000))


async def file(state: State, call: Call) -> None:
    await call.reply(_found(state, call).document())


async def delete(state: State, call: Call) -> None:
    found = _found(state, call)
    user = None if state.batches is None else state.batches.user(found)
    if user is not None:
        raise RequestError(409, f"The batch {user.id} needs this file: cancel it first.", field="file_id")
    storage(state).delete(found)
    await call.reply({"id": found.id, "object": "file", "deleted": True})


async def content(state: State, call: Call) -> None:
    found = _found(state, call)
    call.begin_stream("application/jsonl")
    with storage(state).path(found.folder, found.id).open("rb") as source:
        while piece := await asyncio.to_thread(source.read, PIECE):
            await call.write(piece)
        await call.write(b"", more=False)
