"""OpenAI's ``/v1/batches``: files of requests that the server answers beside those of its clients."""

from __future__ import annotations

from bitnet.core.errors import brief
from bitnet.server.api.files import keep_seconds, storage
from bitnet.server.api.listing import page
from bitnet.server.api.openai import read_metadata
from bitnet.server.batch.batch import Batch
from bitnet.server.batch.batches import Batches
from bitnet.server.batch.rows import PATHS
from bitnet.server.batch.store import folder_name
from bitnet.server.models.state import State
from bitnet.server.request.call import Call
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields


def _batches(state: State) -> Batches:
    storage(state)
    assert state.batches is not None
    state.batches.resume()
    return state.batches


def _found(state: State, call: Call) -> Batch:
    return _batches(state).get(folder_name(call.owner), call.scope["path_params"]["id"])


async def create(state: State, call: Call) -> None:
    batches = _batches(state)
    fields = Fields(await call.json())
    for name in ("input_file_id", "endpoint", "completion_window"):
        fields.require(name)
    endpoint = fields.choice("endpoint", PATHS, "")
    fields.choice("completion_window", ("24h",), "")
    id = fields.text("input_file_id") or ""
    file = storage(state).get(folder_name(call.owner), id)
    if file.purpose != "batch":
        raise wrong("input_file_id", f"is {brief(id)}, a file with the purpose {file.purpose}; it must be batch.")
    expires = fields.object("output_expires_after")
    seconds = None
    if expires is not None:
        expires.require("seconds")
        seconds = keep_seconds("output_expires_after", expires.text("anchor"), expires.integer("seconds") or 0)
    metadata = dict(read_metadata(fields)) if "metadata" in fields else None
    await call.reply(batches.create(file, endpoint, metadata, seconds).document(storage(state)))


async def batches(state: State, call: Call) -> None:
    listed, store = _batches(state).listed(folder_name(call.owner)), storage(state)
    await call.reply(page(call, listed, lambda one: one.document(store), limit=20, max_limit=100))


async def batch(state: State, call: Call) -> None:
    await call.reply(_found(state, call).document(storage(state)))


async def cancel(state: State, call: Call) -> None:
    found = _found(state, call)
    _batches(state).cancel(found)
    await call.reply(found.document(storage(state)))
