"""Ollama's ``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bitnet.core import __version__
from bitnet.core.hal import DeviceType
from bitnet.core.text.thinking import marks_of
from bitnet.server.api.ollama import OLLAMA_NAMES
from bitnet.server.models.facts import ModelFacts, digest_of, facts_of, parameter_size
from bitnet.server.models.folder import readable_file, stored_bytes
from bitnet.server.models.listing import Named
from bitnet.server.models.pooled import PooledModel
from bitnet.server.models.state import State
from bitnet.server.request.call import Call
from bitnet.server.request.fields import Fields

NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays until another one needs its memory."""


def _details(facts: ModelFacts | None, parent: str) -> dict[str, Any]:
    family = "" if facts is None else facts.architecture
    return {
        "parent_model": parent,
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if facts is None else parameter_size(facts.parameters),
        "quantization_level": "" if facts is None else facts.quantization,
    }


def _modified(path: Path) -> str:
    try:
        seconds = path.stat().st_mtime
    except OSError:
        seconds = 0
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _file(one: PooledModel) -> Path:
    """The GGUF file of a model, or else the folder from which it will be made."""
    path = one.source.path
    return (readable_file(path) or path) if one.service is None else one.service.model.path


async def _entry(state: State, named: Named) -> dict[str, Any]:
    one, names, preset = named
    path, file = one.source.path, _file(one)
    facts, digest = await state.shared.in_thread(lambda: (facts_of(file), digest_of(file)))
    if digest is not None and preset != one.source.preset:  # a name of its own
        own = json.dumps([digest, preset.system, preset.template, dict(preset.sampling)])
        digest = hashlib.sha256(own.encode()).hexdigest()
    return {
        "name": names[0],
        "model": names[0],
        "modified_at": _modified(path),
        "size": stored_bytes(path),
        "digest": digest or "",
        "details": _details(facts, _parent(named)),
    }


def _parent(named: Named) -> str:
    """The model that a created name was made from; empty for others."""
    return "" if named.names[0] in named.model.source.names else named.model.source.names[0]


async def tags(state: State, call: Call) -> None:
    await state.pool.refresh()
    models = [await _entry(state, named) for named in [*state.pool.listing.entries()]]
    await call.reply({"models": models})


async def ps(state: State, call: Call) -> None:
    """The models that are loaded."""
    models = []
    for one in tuple(state.pool.models):
        service = one.service
        if service is not None:
            on_gpu = service.model.device.type in (DeviceType.DISCRETE, DeviceType.INTEGRATED)
            more = {"size": one.size, "size_vram": one.size if on_gpu else 0, "expires_at": NEVER}
            entry = await _entry(state, Named(one, one.source.names, one.source.preset))
            models.append({**entry, **more, "context_length": service.model.context})
    await call.reply({"models": models})


def _capabilities(template: str | None) -> list[str]:
    if template is None:
        return ["completion"]
    return ["completion", "tools", *(["thinking"] if marks_of(template) else [])]


def model_field(fields: Fields) -> str:
    """The field that names the model: ``model``, or ``name`` of older clients."""
    return "name" if "name" in fields and "model" not in fields else "model"


async def show(state: State, call: Call) -> None:
    """What a model's file and its preset say; the model need not be loaded."""
    fields = Fields(await call.json())
    field = model_field(fields)
    fields.require(field)
    named = await state.pool.find(fields.text(field), field)
    one, _, preset = named
    facts = await state.shared.in_thread(lambda: facts_of(_file(one)))
    template = preset.template or (None if facts is None else facts.template)
    parameters = "\n".join(_parameters(preset.sampling))
    await call.reply(
        {
            "license": "",
            "modelfile": _modelfile(named, parameters),
            "parameters": parameters,
            "template": template or "",
            "system": preset.system or "",
            "details": _details(facts, _parent(named)),
            "modified_at": _modified(one.source.path),
            "capabilities": _capabilities(template),
            "model_info": {} if facts is None else _info(facts),
        }
    )


def _info(facts: ModelFacts) -> dict[str, Any]:
    family, config = facts.architecture, facts.config
    return {
        "general.architecture": family,
        "general.parameter_count": facts.parameters,
        f"{family}.context_length": config.context_length,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.block_count": config.layers,
        f"{family}.attention.head_count": config.heads,
        f"{family}.attention.head_count_kv": config.kv_heads,
    }


def _parameters(sampling: Mapping[str, Any]) -> Iterator[str]:
    """Options as the lines of a Modelfile's ``PARAMETER``."""
    for name, value in sampling.items():
        for one in value if isinstance(value, tuple) else [value]:
            yield f"{OLLAMA_NAMES.get(name, name)} {json.dumps(one, ensure_ascii=False)}"


def _modelfile(named: Named, parameters: str) -> str:
    lines = [f"FROM {_parent(named) or named.names[0]}"]
    if named.preset.template is not None:
        lines.append(f'TEMPLATE """{named.preset.template}"""')
    if named.preset.system is not None:
        lines.append(f'SYSTEM """{named.preset.system}"""')
    return "\n".join([*lines, *(f"PARAMETER {line}" for line in parameters.splitlines())])


async def version(state: State, call: Call) -> None:
    await call.reply({"version": __version__})
