"""``bitnet inspect``: the contents of a model file, with warnings about anything odd."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from bitnet.core.cli.console import note, print_json, progress, say
from bitnet.core.cli.options import ModelName, i2s_layout_option, json_option, verbose_option
from bitnet.core.errors import BitNetError
from bitnet.core.support.foreign import label
from bitnet.core.support.units import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bitnet.core.gguf import GGUFFile
    from bitnet.core.model.config import ModelConfig
    from bitnet.core.model.file import ModelFile
    from bitnet.core.model.inspect import TensorReport

CONTEXTS, SEQUENCES = (4096, 32_768), (1, 8, 64)
"""Contexts, besides the model's own, and numbers of sequences for which the memory is shown."""
MAX_WARNINGS = 5
MAX_ELEMENTS = 16
"""Maximum number of array elements shown; of a longer array, only the first few and the count are shown."""


@click.command()
@click.argument("file", required=False, type=ModelName())
@i2s_layout_option
@verbose_option
@json_option
def inspect(file: Path | str | None, i2s_layout: str, as_json: bool) -> None:
    """Show a GGUF file's metadata and tensors.

    For ternary tensors it shows the shares of -1, 0 and +1, and warns if these suggest a damaged file or another I2_S
    layout. Before anything is loaded it says what the model needs in memory, by context and number of sequences,
    and which devices of this machine run it; for each other one, what it cannot compute. FILE may be a model on the
    hub (hf:ORG/NAME); without FILE, the model in this package is shown. The exit status is 4 if bitnet cannot run
    the model.
    """
    from bitnet.core.gguf import GGUFFile
    from bitnet.core.hub import local_path
    from bitnet.core.model.default import default_model_path
    from bitnet.core.model.file import ModelFile
    from bitnet.core.model.inspect import inspect_tensors

    gguf = GGUFFile(default_model_path() if file is None else local_path(file, tell=note))
    with progress("tensors") as update:
        reports = []
        for report in inspect_tensors(gguf, i2s_layout):  # type: ignore[arg-type]
            reports.append(report)
            update(len(reports), len(gguf.tensors))
    config, unfit = None, None
    memory: Memory | None = None
    devices: Mapping[str, str | None] | None = None
    try:
        model = ModelFile(gguf, i2s_layout)  # type: ignore[arg-type]
        config, memory = model.config, _memory(model)
        _ = model.tokenizer, model.chat_template
        devices = _devices(model)
    except BitNetError as error:
        unfit = error
    if as_json:
        print_json(_document(gguf, config, memory, devices, reports))
    else:
        say(*_lines(gguf, config, memory, devices, reports))
        warnings = [f"{label(report.info.name)}: {warning}" for report in reports for warning in report.warnings]
        for warning in warnings[:MAX_WARNINGS]:
            note(f"bitnet: warning: {warning}")
        if len(warnings) > MAX_WARNINGS:
            note(f"bitnet: warning: {len(warnings) - MAX_WARNINGS} more of these; --json has them all.")
    if unfit is not None:
        raise unfit


class Memory(NamedTuple):
    """Bytes that a model needs on a device.

    Attributes:
        weights: All weights.
        token: Those of them that a decoded token reads.
        position: Each position of a sequence: its keys and values as f16, and its rotary angles. Layers that attend to
            windows are not among these.
        windows: The keys and values of layers that attend to windows, for a sequence at least that long.
        state: The states of recurrent layers of a sequence, twice: those that a step reads and those that it writes.
        spared: How many fewer bytes of weights there are, and a token reads, on devices that keep binary weights in
            one bit.
    """

    weights: int
    token: int
    position: int
    windows: int
    state: int
    spared: int

    def total(self, sequences: int, context: int) -> int:
        """Bytes for so many sequences of so many tokens, without the activations of a step."""
        return self.weights + sequences * (context * self.position + self.windows + self.state)


def _memory(model: ModelFile) -> Memory:
    from bitnet.core.engine.setup import position_bytes, window_bytes
    from bitnet.core.hal import BLOCK_TABLES, TERNARY_TABLES
    from bitnet.core.model.memory import spared_bytes, token_bytes, weight_bytes

    config = model.config
    state = 0 if config.delta_net is None else 2 * config.delta_net.state_bytes
    weights = model.weights_for({BLOCK_TABLES, TERNARY_TABLES})
    token = token_bytes(weights, config.experts)
    windows = window_bytes(config, "f16", config.context_length)
    all_bytes, position, spared = weight_bytes(weights), position_bytes(config, "f16"), spared_bytes(weights)
    return Memory(all_bytes, token, position, windows, state, spared)


def _devices(model: ModelFile) -> Mapping[str, str | None]:
    """Why each device of this machine refuses the model; None: it runs it."""
    from bitnet.core.devices.registry import list_devices
    from bitnet.core.engine.setup import refusals

    return refusals(model, [info for report in list_devices() for info in report.probe.devices])


def _runs_on(devices: Mapping[str, str | None]) -> list[str]:
    """A line for each reason to refuse the model, after that of the devices that run it."""
    reasons: dict[str | None, list[str]] = {}
    for name, reason in devices.items():
        reasons.setdefault(reason, []).append(name)
    lines = [f"runs on: {', '.join(reasons.pop(None, ['no device of this machine']))}"]
    return lines + [f"not on {', '.join(names)}: {label(reason or '')}" for reason, names in reasons.items()]


def _needs(config: ModelConfig, memory: Memory) -> list[str]:
    """A table of what the model needs at some contexts, for some numbers of sequences."""
    each = f"{size(memory.position)} for each token of context"
    each = f"{size(memory.windows)} for the windows of a sequence, {each}" if memory.windows else each
    each = f"{size(memory.state)} for the states of a sequence, {each}" if memory.state else each
    contexts = sorted({*(n for n in CONTEXTS if n < config.context_length), config.context_length})
    lines = [f"memory: {size(memory.weights)} of weights, of which a token reads {size(memory.token)}; {each} (f16)"]
    if memory.spared:
        less, read = size(memory.weights - memory.spared), size(memory.token - memory.spared)
        lines += [
            f"  CPUs with int8 dot products keep a bit a weight: {less} of weights, of which a token reads {read}"
        ]
    lines += [f"  {'sequences':<10}" + "".join(f"{f'context {context}':>18}" for context in contexts)]
    for sequences in SEQUENCES:
        lines += [f"  {sequences:<10}" + "".join(f"{size(memory.total(sequences, n)):>18}" for n in contexts)]
    return lines


def _shape(config: ModelConfig) -> dict[str, Any]:
    """The configuration for JSON, without the numbers of its arrays."""
    shape = {key: value for key, value in asdict(config).items() if key != "rope_freq_factors"}
    hadamard = config.hadamard
    if hadamard is not None:
        shape["hadamard"] = {
            "block": hadamard.block,
            "signs": sorted(hadamard.signs),
            "head": hadamard.head,
            "embedding": hadamard.embedding,
            "v_grouped": hadamard.v_grouped,
        }
    return shape


def _document(
    gguf: GGUFFile,
    config: ModelConfig | None,
    memory: Memory | None,
    devices: Mapping[str, str | None] | None,
    reports: list[TensorReport],
) -> dict[str, Any]:
    return {
        "path": str(gguf.path),
        "size": gguf.size,
        "version": gguf.version,
        "family": config and _title(config, gguf),
        "model": config and _shape(config),
        "memory": memory and memory._asdict(),
        "devices": devices and [{"name": name, "refuses": reason} for name, reason in devices.items()],
        "metadata": {key: _plain(value) for key, value in gguf.metadata.items()},
        "tensors": [
            {
                "name": report.info.name,
                "type": report.info.type.name,
                "shape": list(report.info.shape),
                "offset": report.info.offset,
                "bytes": report.info.nbytes,
                "statistics": report.statistics and asdict(report.statistics),
                "warnings": list(report.warnings),
            }
            for report in reports
        ],
    }


def _python(value: Any) -> Any:
    """A numpy number or array as plain Python values."""
    return value.tolist() if hasattr(value, "tolist") else value


def _plain(value: Any) -> Any:
    """A value for JSON; long arrays are cut short."""
    values = _python(value)
    if not isinstance(values, list):
        return values
    if len(values) > MAX_ELEMENTS:
        return {"count": len(values), "first": [_plain(v) for v in values[:3]]}
    return [_plain(v) for v in values]


def _lines(
    gguf: GGUFFile,
    config: ModelConfig | None,
    memory: Memory | None,
    devices: Mapping[str, str | None] | None,
    reports: list[TensorReport],
) -> list[str]:
    lines = [f"{gguf.path}: {size(gguf.size)}, GGUF version {gguf.version}"]
    if config is not None:
        traits: list[str] = [config.activation]
        traits += ["sub-norms"] if config.sub_norms else []
        after = " after their rotation" if config.family.norms_last else ""
        traits += [f"norms of heads{after}"] if config.head_norms else []
        traits += ["norms before each product"] if config.input_norms else []
        traits += ["norms after each sub-layer"] if config.family.sandwiched else []
        traits += ["LayerNorms without weights"] if config.layer_norms else []
        traits += ["biases of q, k and v"] if config.qkv_biases else []
        traits += ["tied embeddings"] if config.tied_embeddings else []
        traits += ["output gates"] if config.output_gate else []
        if (net := config.delta_net) is not None:
            heads = f"{net.v_heads} value heads of {net.v_dim} over {net.k_heads} key heads of {net.k_dim}"
            traits += [f"{sum(net.recurrent)} recurrent layers ({heads}, convolutions of {net.taps})"]
        if (experts := config.experts) is not None:
            traits.append(f"{experts.count} experts a layer, {experts.used} a token")
        if (windows := config.windows) is not None:
            traits.append(f"windows of {windows.size} in {sum(windows.slides)} layers, no positions in the others")
        if config.hadamard is not None:
            traits += [f"Hadamard transforms of {config.hadamard.block}"]
        lines.append(
            f"{label(config.name)} ({config.architecture}, {_title(config, gguf)}): "
            f"{config.layers} layers, {config.hidden_size} wide, "
            f"{config.heads} heads of {config.head_dim} over {config.kv_heads} KV heads, FFN {config.ffn_size}, "
            f"vocabulary {config.vocab_size}, context {config.context_length}, {', '.join(traits)}"
        )
    lines.append(f"encodings: {', '.join(_by_kind(reports))}")
    encodings = Counter(_encoding(report) for report in reports if report.statistics is not None)
    if encodings:
        lines.append("ternary: " + ", ".join(f"{count} {name}" for name, count in encodings.most_common()))
    if config is not None and memory is not None:
        lines += _needs(config, memory)
    lines += [] if devices is None else _runs_on(devices)
    lines += ["", f"{len(gguf.metadata)} metadata keys"]
    lines += [f"  {label(key):<44} {_short(value)}" for key, value in gguf.metadata.items()]
    lines += ["", f"{len(reports)} tensors {'-1':>53} {'0':>7} {'+1':>7} {'scale':>9}"]
    for report in reports:
        info, codes = report.info, report.statistics
        line = (
            f"  {label(info.name):<28} {info.type.name:<6} {'x'.join(map(str, info.shape)):>14} {size(info.nbytes):>8}"
        )
        if codes is not None:
            line += f" {codes.minus:>7.1%} {codes.zero:>7.1%} {codes.plus:>7.1%} {codes.scale:>9.4g}"
            line += f" (median of groups of {codes.group})" if codes.group else ""
        lines.append(line)
    return lines


_KINDS = (
    ("embedding", lambda name: name == "token_embd"),
    ("head", lambda name: name == "output"),
    ("experts", lambda name: "_exps" in name or "_shexp" in name),
    ("routers", lambda name: name.endswith("ffn_gate_inp")),
    ("attention", lambda name: ".attn_" in name),
    ("feed-forward layers", lambda name: ".ffn_" in name),
    ("recurrent layers", lambda name: ".ssm_" in name),
    ("other matrices", lambda name: True),
)
"""What matrices are for, by their names; the first that fits counts."""


def _by_kind(reports: list[TensorReport]) -> list[str]:
    """The types of each kind of tensor."""
    kinds: dict[str, Counter[str]] = {}
    for report in reports:
        name = report.info.name.removesuffix(".weight")
        kind = next(kind for kind, fits in _KINDS if fits(name)) if len(report.info.shape) > 1 else "vectors"
        kinds.setdefault(kind, Counter())[report.info.type.name] += 1
    order = (*(kind for kind, _ in _KINDS), "vectors")
    return [f"{kind} {'/'.join(kinds[kind])}" for kind in order if kind in kinds]


def _encoding(report: TensorReport) -> str:
    """A description of a ternary tensor's encoding."""
    group = report.statistics and report.statistics.group
    return f"{report.info.type.name} ({f'a scale for each {group} columns' if group else 'one scale each'})"


def _short(value: Any) -> str:
    """A value, abbreviated."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:57]}...")
    values = _python(value)
    if not isinstance(values, list):
        return f"{value}"
    shown = ", ".join(map(_short, values[:3]))
    return f"[{shown}{f', … {len(values)} in all' if len(values) > 3 else ''}]"


def _title(config: ModelConfig, gguf: GGUFFile) -> str:
    """The published models that a file belongs to."""
    pre = gguf.metadata.get("tokenizer.ggml.pre")
    return config.family.title(config.activation, pre if isinstance(pre, str) else "")
