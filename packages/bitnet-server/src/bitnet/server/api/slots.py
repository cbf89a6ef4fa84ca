"""``/slots/{id}`` of llama.cpp's server: saves, restores and forgets the tokens of a slot's last request.

Devices do not hand out their KV caches, so a file has the tokens alone, and restoring computes their keys and values
again. Later requests then find them in the cache, as it is shared by content.
"""

from __future__ import annotations

import json
import re
import time
from array import array
from pathlib import Path
from typing import Any

from bitnet.core.errors import BitNetError, brief
from bitnet.core.receipts.document import text_sha256
from bitnet.core.support.files import read_bytes, replacing
from bitnet.server.api.llama_completion import completion_job
from bitnet.server.generation.job import Background
from bitnet.server.models.service import Service
from bitnet.server.request import bounded_json
from bitnet.server.request.call import Call
from bitnet.server.request.errors import RequestError, wrong
from bitnet.server.request.fields import Fields, are_tokens

ACTIONS = ("save", "restore", "erase")
MAX_FILES = 10_000
"""Maximum files in the folder; beyond that, only files that are there can be saved to."""
_TOKEN_BYTES = 16
"""Maximum bytes of a token's id in a file, with the spaces that another program may put around it."""
_NAME = re.compile(r"(?!(con|prn|aux|nul|com\d|lpt\d)(\.|$))[\w-]([\w. -]{0,126}[\w-])?", re.ASCII | re.IGNORECASE)
"""Names of files that mean the same on every system, and lead to no other folder or device."""


async def act(service: Service, call: Call, fields: Fields) -> None:
    """Save, restore or erase a slot, as ``action`` in the query says.

    Raises:
        RequestError: The server keeps no slots, there is no such slot, action or file, or the file cannot be used.
    """
    folder = service.shared.settings.slot_save_path
    if folder is None:
        message = "This server keeps no slots, as --slot-save-path names no folder for them."
        raise RequestError(501, message, code="unsupported_endpoint")
    slot, action = call.scope["path_params"]["id"], call.query().get("action")
    if slot not in map(str, range(service.shared.places)):
        raise RequestError(400, f"There is no slot {brief(slot)}; the slots are 0 … {service.shared.places - 1}.")
    if action not in ACTIONS:
        raise RequestError(400, f"action is {brief(action)}; it must be one of: {', '.join(ACTIONS)}.")
    if action == "erase":
        await call.reply({"id_slot": int(slot), "n_erased": len(service.slots.pop(int(slot), ()))})
        return
    path, began = _path(Path(folder), fields), time.perf_counter()
    if action == "save":
        if int(slot) not in service.slots:
            raise RequestError(400, f"Slot {slot} is empty: no request has named it by id_slot since the model loaded.")
        tokens = service.slots[int(slot)]
        size = await service.shared.in_thread(lambda: _save(service, path, tokens))
    else:
        tokens, size = await service.shared.in_thread(lambda: _restore(service, path))
        job = completion_job(service, Fields({"n_predict": 1, "temperature": 0}), lambda: [tokens])
        await call.watch(Background(service, call, job)())
        service.slots[int(slot)] = tokens
    done, moved = ("saved", "written") if action == "save" else ("restored", "read")
    await call.reply(
        {
            "id_slot": int(slot),
            "filename": path.name,
            f"n_{done}": len(tokens),
            f"n_{moved}": size,
            "timings": {f"{action}_ms": 1e3 * (time.perf_counter() - began)},
        }
    )


def _path(folder: Path, fields: Fields) -> Path:
    """The file that a request names, in the folder."""
    fields.require("filename")
    name = fields.text("filename")
    assert name is not None
    if _NAME.fullmatch(name) is None:
        raise wrong("filename", f"is {brief(name)}; it must be a name of letters, digits, -, _, inner spaces and dots.")
    path = folder / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise wrong("filename", f"is {brief(name)}, which is not a file in the server's folder.")
    return path


def _text_sha256(service: Service, tokens: array[int]) -> str:
    return text_sha256(service.model.tokenizer.decode(tokens, skip_special=False))


def _save(service: Service, path: Path, tokens: array[int]) -> int:
    """Write a slot's tokens; returns the file's size in bytes."""
    if not path.exists() and sum(1 for _ in path.parent.iterdir()) >= MAX_FILES:
        raise RequestError(507, f"The server's folder for slots has {MAX_FILES:,} files already.")
    content = json.dumps({"text_sha256": _text_sha256(service, tokens), "tokens": tokens.tolist()}).encode()
    try:
        with replacing(path) as file:
            file.write(content)
    except BitNetError as error:
        raise RequestError(507, f"The server cannot write {path.name}: {_reason(error.__cause__)}.") from error
    return len(content)


def _restore(service: Service, path: Path) -> tuple[array[int], int]:
    """The tokens in a file, and its size in bytes."""
    context = service.model.context
    most = _TOKEN_BYTES * context + 1024
    try:
        data = read_bytes(path, most)
    except OSError as error:
        raise RequestError(404, f"The file {path.name} cannot be read: {_reason(error)}.") from None
    try:
        value: Any = bounded_json.parse_text(data.decode()) if len(data) <= most else None
    except ValueError:
        value = None
    ids = value.get("tokens") if isinstance(value, dict) else None
    if not isinstance(ids, list) or not ids or not are_tokens(ids) or max(ids) >= service.model.config.vocab_size:
        raise RequestError(400, f"The file {path.name} has no tokens of a slot of this model, or too many.")
    if len(ids) >= context:
        raise RequestError(
            400, f"The file {path.name} has {len(ids):,} tokens; the context has room for {context - 1:,}."
        )
    tokens = array("i", ids)
    if value.get("text_sha256") != _text_sha256(service, tokens):
        raise RequestError(400, f"The file {path.name} was saved from a model with another vocabulary.")
    return tokens, len(data)


def _reason(error: BaseException | None) -> str:
    """What an error of the system says, without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or "it is not known why"
