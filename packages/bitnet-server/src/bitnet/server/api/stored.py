"""``/v1/responses/{id}``: responses that were stored."""

from __future__ import annotations

from bitnet.core.errors import brief
from bitnet.server.api.listing import page
from bitnet.server.models.state import State
from bitnet.server.models.stored import Entry
from bitnet.server.request.call import Call
from bitnet.server.request.errors import RequestError

CANCELLED = RequestError(409, "The response was cancelled.", code="cancelled")


async def retrieve(state: State, call: Call) -> None:
    await call.reply(_found(state, call).response)


async def delete(state: State, call: Call) -> None:
    id = _found(state, call).response["id"]
    state.shared.stored.delete(id)
    state.shared.end_background(id, CANCELLED)
    await call.reply({"id": id, "object": "response", "deleted": True})


async def cancel(state: State, call: Call) -> None:
    """End a response in the background. One that has ended stays as it is."""
    entry = _found(state, call)
    if not entry.response["background"]:
        raise RequestError(400, "Only a response with background: true can be cancelled.", field="id")
    id = entry.response["id"]
    if entry.response["status"] == "in_progress" and state.shared.end_background(id, CANCELLED):
        state.shared.stored.put(call.owner, entry.response | {"status": "cancelled"}, entry.messages, entry.items)
    await call.reply(_found(state, call).response)


async def input_items(state: State, call: Call) -> None:
    items = _found(state, call).items
    await call.reply(page(call, items[::-1], dict, limit=20, max_limit=100))


def _found(state: State, call: Call) -> Entry:
    id = call.scope["path_params"]["id"]
    entry = state.shared.stored.get(call.owner, id)
    if entry is None:
        raise RequestError(404, f"There is no response {brief(id)}; it may have been forgotten.", field="id")
    return entry
