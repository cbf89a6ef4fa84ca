"""Receipts: what computed an answer, how fast, on which model, as a JSON document that can be checked later.

The schema is ``receipt.schema.json`` beside this module. A receipt carries a digest of itself, so that an edit shows.
It is no signature: whoever recomputes it has to get everything else right as well (kernels that the claimed backend
has, a start-up line that fits, numbers that agree), which :func:`verify` makes hard but not impossible.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bitnet.core import env, registry, system
from bitnet.core.errors import ReceiptError
from bitnet.core.files import replacing
from bitnet.core.mapped import MappedFile
from bitnet.core.schema import problems
from bitnet.core.select import Selection

if TYPE_CHECKING:
    from bitnet.core.engine import Completion
    from bitnet.core.hal import DeviceInfo
    from bitnet.core.model.file import ModelFile

SCHEMA_VERSION = "1.0.0"

_SUMMARY = re.compile(r"requested=(.+) detected=\[(.+)\] selected=(\S+)")
_CLOCK_SKEW = timedelta(minutes=1)
_LARGEST = 1 << 20  # bytes of a receipt; a real one has some 3,000


def build(
    *,
    file: ModelFile,
    device: DeviceInfo,
    selection: Selection | None,
    kernels: Sequence[str],
    completion: Completion,
    deterministic: bool = True,
) -> dict[str, Any]:
    """The receipt of a finished generation.

    Args:
        device: The device that computed it.
        selection: How the device was chosen; None where it was given open.
        kernels: What the executable recorded that it launched.
        deterministic: Whether the same prompt and seed give the same tokens on this device.
    """
    chosen = selection or Selection(device.name, [device.backend], [device], fake=bool(env.names("BITNET_GPU_FAKE")))
    packages = {"bitnet-core": system.core_version()}
    if plugin := registry.installed().get(device.backend):
        packages[plugin.distribution] = plugin.version
    config, timings = file.config, completion.timings
    receipt: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "timestamp": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "compute_path": device.name,
        "backend": device.backend,
        "backend_summary": chosen.summary,
        "kernels": list(kernels),
        "deterministic": deterministic,
        "seed": completion.seed,
        "environment": {
            "os": platform.platform(),
            "python": platform.python_version(),
            "packages": packages,
            "cpu": system.cpu_model(),
            "usable_cpus": system.usable_cpus(),
            "memory": system.memory_total(),
            "device": {
                "id": device.id,
                "description": device.description,
                "vendor": device.vendor,
                "type": device.type.value,
                "driver_version": device.driver_version,
            },
            "variables": dict(env.snapshot()),
        },
        "model_info": {
            "path": str(file.path),
            "sha256": file.sha256(),
            "size": file.size,
            "name": config.name,
            "architecture": config.architecture,
            "quantization_type": file.quantization,
            "layers": config.layers,
            "hidden_size": config.hidden_size,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "vocab_size": config.vocab_size,
        },
        "performance_baseline": _performance(
            timings.prompt_tokens, len(timings.token_times), timings.total, timings.first_token
        ),
        "fake": chosen.fake,
    }
    return {**receipt, "digest": digest(receipt)}


def digest(receipt: Mapping[str, Any]) -> str:
    """The digest a receipt must carry; a ``digest`` that it has does not count."""
    rest = {name: value for name, value in receipt.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def write(path: str | Path, receipt: Mapping[str, Any]) -> None:
    """Write a receipt as JSON; what stood there before stays if that fails.

    Raises:
        BitNetError: The file cannot be written.
    """
    with replacing(Path(path)) as out:
        text = json.dumps(receipt, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        out.write(text.encode("utf-8", "surrogatepass"))  # a path may have bytes that are no text


def load(path: str | Path) -> Any:
    """Read a receipt's JSON; what it says is not checked.

    Raises:
        ReceiptError: The file cannot be read, or is no JSON.
    """
    try:
        with Path(path).open("rb") as source:
            data = source.read(_LARGEST + 1)
    except OSError as error:
        raise ReceiptError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(data) > _LARGEST:
        raise ReceiptError(f"{path} is no receipt: it has more than {_LARGEST} bytes.")
    try:
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError too
        raise ReceiptError(f"{path} is no receipt: {error or type(error).__name__}.") from None


def verify(receipt: Any, *, model: str | Path | None = None) -> list[str]:
    """Check everything in a receipt that can be checked here.

    Args:
        receipt: As :func:`load` gives it.
        model: A model file that must be the one the receipt names, by its SHA-256.

    Returns:
        What could not be checked here, for a person; usually empty.

    Raises:
        ReceiptError: The receipt does not hold; the message has everything that is wrong with it.
        ModelFileError: ``model`` cannot be read.
    """
    schema = json.loads((files("bitnet.core") / "receipt.schema.json").read_text(encoding="utf-8"))
    unchecked: list[str] = []
    wrong = list(problems(receipt, schema))
    if not wrong:
        if receipt["digest"] != digest(receipt):
            wrong.append("it was changed after it was made: its digest does not fit")
        wrong += _check_fake(receipt)
        wrong += _check_time(receipt["timestamp"])
        wrong += _check_selection(receipt)
        wrong += _check_kernels(receipt, unchecked)
        wrong += _check_numbers(receipt["performance_baseline"])
        if model is not None:
            wrong += _check_model(receipt["model_info"], Path(model))
    if wrong:
        raise ReceiptError(f"The receipt does not hold: {'; '.join(wrong)}.")
    return unchecked


def _performance(prompt_tokens: int, tokens: int, total: float, first: float | None) -> dict[str, Any]:
    """Times in seconds to the numbers of a receipt: rounded first, so that the speeds follow from what is printed."""
    total_ms = max(round(total * 1e3, 3), 0.001)
    first_ms = None if first is None else max(round(first * 1e3, 3), 0.001)
    speed, decode = _speeds(tokens, total_ms, first_ms)
    return {
        "prompt_tokens": prompt_tokens,
        "tokens_generated": tokens,
        "total_time_ms": total_ms,
        "first_token_latency_ms": first_ms,
        "tokens_per_second": speed,
        "decode_tokens_per_second": decode,
    }


def _speeds(tokens: int, total_ms: float, first_ms: float | None) -> tuple[float, float | None]:
    """Tokens per second over the whole time, and after the first token, to six digits."""
    after = 0.0 if first_ms is None else total_ms - first_ms
    speed = float(f"{tokens * 1e3 / total_ms:.6g}")
    return speed, float(f"{(tokens - 1) * 1e3 / after:.6g}") if tokens > 1 and after > 0 else None


def _check_fake(receipt: Mapping[str, Any]) -> Iterator[str]:
    pretended = receipt["environment"]["variables"].get("BITNET_GPU_FAKE", "")
    if receipt["fake"] or pretended:
        yield f"it was made with a fake device (BITNET_GPU_FAKE={pretended})"


def _check_time(timestamp: str) -> Iterator[str]:
    try:
        made = datetime.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        yield f"there is no such time as {timestamp}"
        return
    if made > datetime.now(timezone.utc) + _CLOCK_SKEW:
        yield f"{timestamp} is in the future"


def _check_selection(receipt: Mapping[str, Any]) -> Iterator[str]:
    """The start-up line, the device and the backend must tell the same story."""
    path, backend = receipt["compute_path"], receipt["backend"]
    match = _SUMMARY.fullmatch(receipt["backend_summary"])
    if match is None:
        yield "backend_summary is no start-up line"
        return
    requested, detected, selected = match[1], match[2].split(", "), match[3]
    if path.partition(":")[0] != backend:
        yield f"compute_path is {path}, backend is {backend}"
    if selected != path:
        yield f"compute_path is {path}, backend_summary says {selected}"
    if backend not in detected:
        yield f"{backend} was selected but not detected"
    if backend == "cpu" and receipt["environment"]["device"]["type"] != "cpu":
        yield f"{path} is said to be {receipt['environment']['device']['type']}"
    names = (backend, path, receipt["environment"]["device"]["id"].lower())
    granted = requested == "auto" or requested in names or (requested == "gpu" and backend != "cpu")
    strict = receipt["environment"]["variables"].get("BITNET_STRICT_MODE", "").strip().lower() in env.TRUE
    if not granted and (backend != "cpu" or strict):  # only the CPU stands in for what is missing
        yield f"{requested} was asked for; {path} cannot have been selected"


def _check_kernels(receipt: Mapping[str, Any], unchecked: list[str]) -> Iterator[str]:
    """Each kernel's name ends in what it ran on, and its backend, if it is installed here, has it."""
    backend, index = receipt["compute_path"].split(":", 1)
    tags = {backend}
    if backend == "cpu":
        tags = {"numpy"} if index == "numpy" else {index, "scalar"}
    kernels = receipt["kernels"]
    foreign = [name for name in kernels if not name.endswith(tuple(f"_{tag}" for tag in tags))]
    if foreign:
        yield f"{', '.join(foreign)} did not run on {receipt['compute_path']}"
    plugin = registry.installed().get(backend)
    if plugin is None:
        unchecked.append(f"{backend} is not installed here: its list of kernels")
        return
    made_with = receipt["environment"]["packages"].get(plugin.distribution)
    if made_with != plugin.version:
        what = f"{plugin.distribution} {plugin.version} is installed here, not {made_with}"
        unchecked.append(f"{what}: its list of kernels")
        return
    try:
        known = set(plugin.backend().kernels())
    except Exception as error:
        unchecked.append(f"{backend} does not work here ({error}): its list of kernels")
        return
    if invented := [name for name in kernels if name not in known and name not in foreign]:
        yield f"{backend} has no kernel {', '.join(invented)}"


def _check_numbers(numbers: Mapping[str, Any]) -> Iterator[str]:
    tokens, total, first = (numbers[n] for n in ("tokens_generated", "total_time_ms", "first_token_latency_ms"))
    if (first is None) != (tokens == 0):
        yield f"{tokens} tokens do not go with a first_token_latency_ms of {first}"
    if first is not None and first > total:
        yield f"first_token_latency_ms {first} is more than total_time_ms {total}"
    speed, decode = _speeds(tokens, total, first)
    if not _close(numbers["tokens_per_second"], speed):
        yield f"{tokens} tokens in {total} ms are {speed} tokens/s, not {numbers['tokens_per_second']}"
    if not _close(numbers["decode_tokens_per_second"], decode):
        yield f"decode_tokens_per_second is {numbers['decode_tokens_per_second']}; the times give {decode}"


def _close(given: float | None, computed: float | None) -> bool:
    if given is None or computed is None:
        return given is computed
    return abs(given - computed) <= 2e-6 * computed


def _check_model(info: Mapping[str, Any], path: Path) -> Iterator[str]:
    found = MappedFile(path).sha256()
    if found != info["sha256"]:
        yield f"{path} is not the model it was made with: its SHA-256 is {found}"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return made
