"""``/v1/responses/{id}``: responses that were stored."""

from __future__ import annotations

from bitnet.core.errors import brief
from bitnet.server.models.state import State
from bitnet.server.models.stored import Entry
from bitnet.server.request.call import Call
from bitnet.server.request.errors import RequestError


async def retrieve(state: State, call: Call) -> None:
    await call.reply(_found(state, call).response)


async def delete(state: State, call: Call) -> None:
    id = _found(state, call).response["id"]
    state.shared.stored.delete(id)
    await call.reply({"id": id, "object": "response", "deleted": True})


def _found(state: State, call: Call) -> Entry:
    id = call.scope["path_params"]["id"]
    entry = state.shared.stored.get(call.owner, id)
    if entry is None:
        raise RequestError(404, f"There is no response {brief(id)}; it may have been forgotten.", field="id")
    return entry
