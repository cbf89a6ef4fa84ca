"""Ollama's ``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bitnet.core import __version__
from bitnet.core.hal import DeviceType
from bitnet.core.text.chat import ChatTemplate
from bitnet.core.text.thinking import marks_of
from bitnet.server.models.facts import ModelFacts, digest_of, facts_of, parameter_size
from bitnet.server.models.folder import readable_file, stored_bytes
from bitnet.server.models.pooled import PooledModel
from bitnet.server.models.service import Service
from bitnet.server.models.state import State
from bitnet.server.request.call import Call
from bitnet.server.request.fields import Fields

NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays until another one needs its memory."""


def _details(facts: ModelFacts | None) -> dict[str, Any]:
    family = "" if facts is None else facts.architecture
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if facts is None else parameter_size(facts.parameters),
        "quantization_level": "" if facts is None else facts.quantization,
    }


def _modified(path: Path) -> str:
    seconds = path.stat().st_mtime if path.exists() else 0
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


async def _entry(state: State, one: PooledModel, name: str) -> dict[str, Any]:
    path = one.source.path
    file = readable_file(path) or path
    facts, digest = await state.shared.in_thread(lambda: (facts_of(file), digest_of(file)))
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(path),
        "size": stored_bytes(path),
        "digest": digest or "",
        "details": _details(facts),
    }


async def tags(state: State, call: Call) -> None:
    await state.pool.refresh()
    models = [await _entry(state, entry.model, entry.names[0]) for entry in state.pool.listing.entries()]
    await call.reply({"models": models})


async def ps(state: State, call: Call) -> None:
    """The models that are loaded."""
    models = []
    for one in tuple(state.pool.models):
        service = one.service
        if service is not None:
            on_gpu = service.model.device.type in (DeviceType.DISCRETE, DeviceType.INTEGRATED)
            more = {"size": one.size, "size_vram": one.size if on_gpu else 0, "expires_at": NEVER}
            entry = await _entry(state, one, one.source.names[0])
            models.append({**entry, **more, "context_length": service.model.context})
    await call.reply({"models": models})


def _capabilities(template: ChatTemplate | None) -> list[str]:
    if template is None:
        return ["completion"]
    return ["completion", "tools", *(["thinking"] if marks_of(template.source) else [])]


def model_field(fields: Fields) -> str:
    """The field of ``/api/show`` that names the model: ``model``, or ``name`` of older clients."""
    return "name" if "name" in fields and "model" not in fields else "model"


async def show(service: Service, call: Call, fields: Fields) -> None:
    fields.require(model_field(fields))
    config, template = service.model.config, service.model.chat_template
    facts = await service.shared.in_thread(lambda: facts_of(service.model.path))
    family = config.architecture
    await call.reply(
        {
            "template": "" if template is None else template.source,
            "details": _details(facts),
            "modified_at": _modified(service.model.path),
            "capabilities": _capabilities(template),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": 0 if facts is None else facts.parameters,
                f"{family}.context_length": config.context_length,
                f"{family}.embedding_length": config.hidden_size,
                f"{family}.block_count": config.layers,
                f"{family}.attention.head_count": config.heads,
                f"{family}.attention.head_count_kv": config.kv_heads,
            },
        }
    )


async def version(state: State, call: Call) -> None:
    await call.reply({"version": __version__})
