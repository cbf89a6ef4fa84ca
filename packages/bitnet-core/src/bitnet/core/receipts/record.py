"""Builds the receipt of a generation."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeAlias

from bitnet.core.devices import registry
from bitnet.core.devices.select import Selection
from bitnet.core.receipts.document import SCHEMA_VERSION, digest, text_sha256, tokens_sha256
from bitnet.core.support import system

if TYPE_CHECKING:
    from bitnet.core.engine import Completion, GenerationOptions
    from bitnet.core.hal import DeviceInfo
    from bitnet.core.model.config import ModelConfig
    from bitnet.core.model.file import ModelFile
    from bitnet.core.text.thinking import Thinking

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]]"
"""A prompt as accepted by ``generate`` (text or token ids) or ``chat`` (messages)."""


def build(
    *,
    file: ModelFile,
    device: DeviceInfo,
    selection: Selection | None,
    kernels: Sequence[str],
    completion: Completion,
    setup: Mapping[str, Any],
    variables: Mapping[str, str],
    prompt: Prompt | None = None,
    file_name: str | None = None,
    replica: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The unsigned receipt of a finished generation.

    Args:
        device: The device that computed it.
        selection: How the device was chosen; None if the caller passed an open device.
        kernels: The kernels that the executable launched.
        setup: Other arguments of ``load_model`` on which the tokens may depend.
        variables: bitnet's environment variables when the model was loaded.
        prompt: The prompt; None: the receipt binds only its tokens.
        file_name: What the receipt calls the file; None: its path.
        replica: ``node`` and ``id`` of the replica that computed it; None: there is only one.
    """
    fake = bool(variables.get("BITNET_GPU_FAKE", "").strip(" ,"))
    chosen = selection or Selection(device.name, [device.backend], [device], fake=fake)
    packages = {"bitnet-core": system.core_version()}
    if plugin := registry.installed().get(device.backend):
        packages[plugin.distribution] = plugin.version
    timings = completion.timings
    receipt: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "timestamp": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "compute_path": device.name,
        "backend": device.backend,
        "backend_summary": chosen.summary,
        "kernels": list(kernels),
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
            "variables": dict(variables),
            **({} if replica is None else {"replica": dict(replica)}),
        },
        "model_info": {
            "path": file_name or str(file.path),
            "sha256": file.sha256(),
            "size": file.size,
            "quantization_type": file.quantization,
            **shape(file.config),
        },
        "setup": dict(setup),
        "request": {
            "text_sha256": text_sha256(prompt) if isinstance(prompt, str) else None,
            "messages": messages_sha256(prompt) if is_conversation(prompt) else None,
            "tokens_sha256": tokens_sha256(completion.prompt_tokens),
            "options": _options(completion.options),
            **_thinking(completion.thinking),
        },
        "answer": {
            "text_sha256": text_sha256(completion.text),
            "tokens": list(completion.tokens),
            "finish_reason": completion.finish_reason,
        },
        "performance_baseline": _performance(
            timings.prompt_tokens, len(timings.token_times), timings.total, timings.first_token
        ),
        "strict": chosen.options.strict,
        "fake": chosen.fake,
    }
    return {**receipt, "digest": digest(receipt), "signature": None}


def shape(config: ModelConfig) -> dict[str, Any]:
    """The configuration's part of ``model_info``."""
    names = ("name", "architecture", "layers", "hidden_size", "heads", "kv_heads", "vocab_size")
    return {name: getattr(config, name) for name in names}


def is_conversation(prompt: Prompt | None) -> bool:
    """Whether a prompt consists of messages."""
    return prompt is not None and not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)


def messages_sha256(messages: Any) -> list[dict[str, str]]:
    """Role and hash of each message; other parts of a message are bound by the hash of the prompt's tokens."""
    return [
        {"role": str(message.get("role", "")), "sha256": text_sha256(str(message.get("content", "")))}
        for message in messages
    ]


def speeds(tokens: int, total_ms: float, first_ms: float | None) -> tuple[float, float | None]:
    """Tokens per second over the whole time, and after the first token, to six digits."""
    after = 0.0 if first_ms is None else total_ms - first_ms
    speed = float(f"{tokens * 1e3 / total_ms:.6g}")
    return speed, float(f"{(tokens - 1) * 1e3 / after:.6g}") if tokens > 1 and after > 0 else None


def _options(options: GenerationOptions) -> dict[str, Any]:
    """Every option that decides the answer, except the seed, which belongs to the completion.

    A bias of -inf, which JSON lacks, becomes null.
    """
    given = asdict(options)
    del given["seed"], given["prompt_logprobs"], given["prediction"]
    if options.reasoning_budget is None:
        del given["reasoning_budget"]
    bias = sorted((options.logit_bias or {}).items())
    return given | {
        "stop": list(options.stop_strings),
        "stop_tokens": sorted(options.stop_tokens),
        "logit_bias": [[token, None if math.isinf(value) else value] for token, value in bias],
    }


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    """How a thought is marked in the answer, if it is."""
    if thinking is None:
        return {}
    return {"thinking": {"start": thinking.marks.start, "end": thinking.marks.end, "opened": thinking.opened}}


def _performance(prompt_tokens: int, tokens: int, total: float, first: float | None) -> dict[str, Any]:
    """A receipt's numbers from times in seconds; the times are rounded first, so that the speeds follow from them."""
    total_ms = max(round(total * 1e3, 3), 0.001)
    first_ms = None if first is None else max(round(first * 1e3, 3), 0.001)
    speed, decode = speeds(tokens, total_ms, first_ms)
    return {
        "prompt_tokens": prompt_tokens,
        "tokens_generated": tokens,
        "total_time_ms": total_ms,
        "first_token_latency_ms": first_ms,
        "tokens_per_second": speed,
        "decode_tokens_per_second": decode,
    }
