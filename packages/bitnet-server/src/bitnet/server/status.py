"""What the server says of itself: models, health, properties, slots, metrics."""

from __future__ import annotations

from typing import Any

from bitnet.core import __version__
from bitnet.server.call import Call
from bitnet.server.errors import RequestError
from bitnet.server.fields import Fields
from bitnet.server.service import Service


def model_entry(service: Service, name: str) -> dict[str, Any]:
    """A model in OpenAI's list."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "bitnet",
        "max_model_len": service.model.context,
    }


async def models(service: Service, call: Call) -> None:
    await call.reply({"object": "list", "data": [model_entry(service, name) for name in service.names]})


async def model(service: Service, call: Call) -> None:
    name = call.scope["path_params"]["name"]
    service.check_model(name)
    await call.reply(model_entry(service, name))


async def health(service: Service, call: Call) -> None:
    """Whether requests are taken: 200, or 503 while the server ends or its device has failed."""
    if service.ready:
        await call.reply({"status": "ok"})
    else:
        why = "shutting down" if service.draining else "the device failed"
        await call.reply({"status": why}, status=503)


async def live(service: Service, call: Call) -> None:
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
            "total_slots": service.settings.max_seqs,
            "max_queue": service.settings.max_queue,
            "chat_template": None if model.chat_template is None else model.chat_template.source,
            "bos_token": model.tokenizer.bos_token,
            "eos_token": model.tokenizer.eos_token,
            "default_generation_settings": {"n_ctx": model.context},
        }
    )


async def slots(service: Service, call: Call) -> None:
    """The places of the batch, as llama.cpp's server lists them; no prompt is told."""
    load = service.model.load()
    await call.reply(
        [
            {"id": i, "n_ctx": service.model.context, "is_processing": i < load.running}
            for i in range(service.settings.max_seqs)
        ]
    )


async def metrics(service: Service, call: Call) -> None:
    text = await service.in_thread(service.metrics.text)
    await call.reply(text, kind="text/plain; version=0.0.4; charset=utf-8")


async def embeddings(service: Service, call: Call) -> None:
    """A refusal: no model that runs here is made for embeddings. It is the client's error, so that none asks again.

    Raises:
        RequestError: Always.
    """
    fields = Fields(await call.json())
    fields.require("prompt" if "prompt" in fields else "input")  # Ollama's older word, everyone's
    service.check_model(fields.text("model"))
    raise RequestError(
        400,
        f"{service.names[0]} generates text and was not made for embeddings; use a model that was, on another server.",
        field="model",
        code="unsupported_endpoint",
    )
