"""Status endpoints: models, health, properties, slots, metrics."""

from __future__ import annotations

from typing import Any

from bitnet.core import __version__
from bitnet.server.api.llama_settings import default_settings
from bitnet.server.models.pooled import PooledModel
from bitnet.server.models.service import Service
from bitnet.server.models.state import State
from bitnet.server.request.call import Call


def model_entry(one: PooledModel, name: str) -> dict[str, Any]:
    """A model in OpenAI's list; ``status.value`` is as in llama.cpp's: ``unloaded``, ``loading``, ``loaded``, or
    ``failed`` with the ``reason``."""
    service = one.service
    entry = {"id": name, "object": "model", "created": one.created, "owned_by": "bitnet"}
    status: dict[str, Any] = {"value": "unloaded" if one.loading is None else "loading", "bytes": one.size}
    if service is not None:
        load = service.model.load()
        entry["max_model_len"] = service.model.context
        status |= {"value": "loaded", "device": service.devices}
        status |= {"running": load.running, "waiting": load.waiting}
    reason = one.failure or (one.problem if one.loading is None else None)
    if reason is not None:
        status |= {"value": "failed", "reason": reason}
    return {**entry, "status": status}


async def models(state: State, call: Call) -> None:
    await state.pool.refresh()
    data = [model_entry(entry.model, entry.names[0]) for entry in state.pool.listing.entries()]
    await call.reply({"object": "list", "data": data})


async def model(state: State, call: Call) -> None:
    name = call.scope["path_params"]["name"]
    await call.reply(model_entry((await state.pool.find(name)).model, name))


async def reload(state: State, call: Call) -> None:
    """Reload the models' files and report on each; status 200 if all were loaded."""
    outcomes = await state.pool.reload()
    whole = all(outcome == "reloaded" for outcome in outcomes.values())
    await call.reply({"models": outcomes}, status=200 if whole else 500)


async def health(state: State, call: Call) -> None:
    """Whether requests are accepted: 200, or 503 during shutdown, after a device or file has failed, or while the
    threads for prompts are all stuck."""
    state.pool.look_at_files()
    if state.ready:
        await call.reply({"status": "ok"})
    elif state.admission.draining:
        await call.reply({"status": "shutting down"}, status=503)
    else:
        why = "all threads are stuck" if state.pool.failure is None else "a device or a model's file failed"
        await call.reply({"status": why}, status=503)


async def live(state: State, call: Call) -> None:
    """Whether the process answers at all."""
    await call.reply({"status": "ok"})


async def props(service: Service, call: Call) -> None:
    model, config = service.model, service.model.config
    await call.reply(
        {
            "model": service.names[0],
            "names": list(service.names),
            "version": __version__,
            "build_info": f"bitnet-{__version__}",
            "device": {
                "name": model.device.name,
                "description": model.device.description,
                "type": model.device.type.value,
                "selection": None if model.selection is None else model.selection.summary,
            },
            "architecture": config.architecture,
            "layers": config.layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "context": model.context,
            "total_slots": service.shared.places,
            "max_queue": service.shared.settings.max_queue,
            "chat_template": None if model.chat_template is None else model.chat_template.source,
            "bos_token": model.tokenizer.bos_token,
            "eos_token": model.tokenizer.eos_token,
            "model_alias": service.names[0],
            "model_path": model.path.name,
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_metrics": True,
            "default_generation_settings": {"n_ctx": model.context, "params": default_settings(service)},
        }
    )


async def slots(service: Service, call: Call) -> None:
    """The places in the batch, in the format of llama.cpp's server, without prompts."""
    load = service.model.load()
    await call.reply(
        [
            {"id": i, "n_ctx": service.model.context, "is_processing": i < load.running}
            for i in range(service.shared.places)
        ]
    )


async def adapters(state: State, call: Call) -> None:
    """The LoRA adapters, of which there are none."""
    await call.reply([])


async def version(state: State, call: Call) -> None:
    await call.reply({"version": __version__})


async def metrics(state: State, call: Call) -> None:
    found = state.shared.metrics
    text = await state.shared.in_thread(found.text)
    began = ("process-start-time-unix", str(found.began))  # as llama.cpp's server has it
    await call.reply(text, kind="text/plain; version=0.0.4; charset=utf-8", headers=[began])
