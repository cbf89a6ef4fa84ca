"""Ollama's ``/api/pull``, ``/api/delete``, ``/api/copy`` and ``/api/create``, for servers with a models folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from bitnet.core.errors import BitNetError
from bitnet.core.hub import errors as hub
from bitnet.core.hub.choice import RemoteFile
from bitnet.core.text.chat import ChatTemplate
from bitnet.server.api.known_fields import OLLAMA_CREATE, OLLAMA_PULL
from bitnet.server.api.ollama import error_body, options_of
from bitnet.server.api.ollama_models import model_field
from bitnet.server.generation.job import NDJSON
from bitnet.server.generation.sampling import checked
from bitnet.server.models.catalog import Catalog, hub_name
from bitnet.server.models.created import Created, check_name
from bitnet.server.models.presets import SAMPLING, Preset
from bitnet.server.models.pulls import Pull
from bitnet.server.models.state import State
from bitnet.server.request.call import Call, to_json
from bitnet.server.request.errors import RequestError, as_request_error
from bitnet.server.request.fields import Fields

INTERVAL = 0.2
"""Seconds between two lines of a download's progress."""
_STATUSES: dict[type[BitNetError], int] = {
    hub.ModelNotFoundError: 404,
    hub.NotInCacheError: 404,
    hub.ConversionNeededError: 400,
    hub.GatedModelError: 403,
    hub.HubNotInstalledError: 501,
    hub.DiskFullError: 507,
    hub.HubError: 502,
}
"""Statuses of a download's errors; the first that fits counts."""


async def pull(state: State, call: Call) -> None:
    """Download a model from the hub, as ``bitnet pull`` does. It ends with its last client, and another one resumes it.

    Raises:
        RequestError: The server has no models folder, the name is not one of the hub's, or, where no stream is asked
            for, the model cannot be downloaded.
    """
    fields = Fields(await call.json())
    OLLAMA_PULL.check(fields)
    _catalog(state)
    name = hub_name(_model(fields))
    running = state.pulls.pull(name)
    with running.watched():
        if not fields.flag("stream", True):
            await call.watch(_pulled(state, running))
            await call.reply({"status": "success"})
            return
        call.begin_stream(NDJSON)
        await call.watch(_stream(state, call, running))


async def _pulled(state: State, running: Pull) -> None:
    while not await running.settled(60):
        pass
    _check(running)
    await state.pool.refresh()


def _check(running: Pull) -> None:
    """Raise the error of a download that has ended with one."""
    error = running.done.exception()
    if error is None:
        return
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), None)
    raise as_request_error(error) if status is None else RequestError(status, str(error))


async def _stream(state: State, call: Call, running: Pull) -> None:
    try:
        async for line in _progress(running):
            await call.write(to_json(line) + b"\n")
        _check(running)
        await state.pool.refresh()
    except RequestError as error:
        await call.write(to_json(error_body(error)) + b"\n", more=False)
        return
    await call.write(b'{"status":"success"}\n', more=False)


async def _progress(running: Pull) -> AsyncIterator[dict[str, Any]]:
    """The lines of a download: one for each file, again whenever more of it is here."""
    yield {"status": "pulling manifest"}
    shown: dict[RemoteFile, int] = {}
    ended = False
    while not ended:
        ended = await running.settled(INTERVAL)
        for file, arrived in tuple(running.arrived.items()):
            if shown.get(file) != arrived:
                shown[file] = arrived
                digest = file.sha256 or ""
                yield {
                    "status": f"pulling {digest[:12] or file.path}",
                    "digest": f"sha256:{digest}",
                    "total": file.size,
                    "completed": arrived,
                }
                if arrived >= file.size:
                    yield {"status": "verifying sha256 digest"}
    if running.done.exception() is None:
        yield {"status": "writing manifest"}


async def delete(state: State, call: Call) -> None:
    """Forget a created name, or unload a model and delete its files.

    Raises:
        RequestError: There is no such model, it was given to the server by name, or its files cannot be deleted.
    """
    fields = Fields(await call.json())
    catalog, name = _catalog(state), _model(fields)
    found = await state.pool.find(name, model_field(fields), exact=True)
    if found.names[0] in catalog.created.names:
        await state.pool.change(lambda: catalog.created.delete(found.names[0]))
    else:
        await state.pool.delete(found.model)
    await call.reply(b"")


async def copy(state: State, call: Call) -> None:
    """Give a model a second name.

    Raises:
        RequestError: There is no such model, or the name cannot be given.
    """
    fields = Fields(await call.json())
    for field in ("source", "destination"):
        fields.require(field)
    source, destination = fields.text("source") or "", fields.text("destination") or ""
    await _create(state, destination, source, Preset(), "source")
    await call.reply(b"")


async def create(state: State, call: Call) -> None:
    """Give a model a name with a system message, a template and parameters of its own.

    Raises:
        RequestError: There is no such model, the name cannot be given, or a field is wrong or not supported.
    """
    fields = Fields(await call.json())
    OLLAMA_CREATE.check(fields)
    name = _model(fields)
    fields.require("from")
    sampling = options_of(fields.object("parameters") or Fields({}, "parameters"))
    checked({"max_tokens": None, **sampling})
    if (template := fields.text("template")) is not None:
        await state.shared.in_thread(lambda: _check_template(template))
    preset = Preset(
        system=fields.text("system"),
        template=template,
        sampling={option: value for option, value in sampling.items() if option in SAMPLING},
    )
    await _create(state, name, fields.text("from") or "", preset, "from")
    if not fields.flag("stream", True):
        await call.reply({"status": "success"})
        return
    call.begin_stream(NDJSON)
    await call.write(b'{"status":"using existing layer"}\n{"status":"writing manifest"}\n')
    await call.write(b'{"status":"success"}\n', more=False)


def _check_template(source: str) -> None:
    try:
        ChatTemplate(source)
    except BitNetError as error:
        raise RequestError(
            400,
            f"template is not a chat template in Jinja, as the hub's models have (Ollama's have others): {error}",
            field="template",
        ) from None


async def _create(state: State, name: str, source: str, preset: Preset, field: str) -> None:
    catalog = _catalog(state)
    name = name.removesuffix(":latest")
    check_name(name)
    found = await state.pool.find(source, field, exact=True)
    if any(name in one.source.names for one in state.pool.models):
        raise RequestError(400, f"{name} is a model's own name; choose another.", field="model")
    made = catalog.created.names.get(found.names[0])
    base = found.model.source.names[0] if made is None else made.base
    given = preset if made is None else preset.over(made.preset)
    await state.pool.change(lambda: catalog.created.put(name, Created(base, given)))


def _catalog(state: State) -> Catalog:
    """The models that may be changed.

    Raises:
        RequestError: The server was started for fixed models.
    """
    if state.pool.listing.catalog is None:
        raise RequestError(
            400, "This server serves only the models it was started with; start it with --models FOLDER for others."
        )
    return state.pool.listing.catalog


def _model(fields: Fields) -> str:
    field = model_field(fields)
    fields.require(field)
    return fields.text(field) or ""
