"""Builds an engine from a model file and an open device; chooses the sizes of steps and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from bitnet.core.engine.drafter import MAX_POSITIONS, Drafter
from bitnet.core.engine.engine import Engine
from bitnet.core.engine.preparer import Preparer
from bitnet.core.engine.states import MAX_SNAPSHOTS
from bitnet.core.errors import InvalidInputError, ModelFileError, OutOfMemoryError, UnsupportedProgramError
from bitnet.core.hal import Device, DeviceInfo, Executable, KVDtype, KVSpec, Limits, Program, Weight
from bitnet.core.hal.check import check_features
from bitnet.core.model.cache import cache_layout, most_blocks
from bitnet.core.model.draft import build_draft_program
from bitnet.core.model.program import BLOCK_SIZE, build_program
from bitnet.core.model.rope import rope_bytes
from bitnet.core.text.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from pathlib import Path

    from bitnet.core.gguf.ternary import I2SLayout
    from bitnet.core.model.config import ModelConfig
    from bitnet.core.model.draft import DraftLayer
    from bitnet.core.model.file import ModelFile

DEFAULT_CONTEXT, LONGEST_DEFAULT = 4096, 131_072
"""Maximum default context in tokens: on any device, and if memory allows. The first requests of programming agents take
up to 50,000. A longer one must be requested, because each step carries its block table, and its rotary tables take time
to compute."""
PART_OF_MEMORY, PART_OF_FREE = 8, 2
"""A default context longer than ``DEFAULT_CONTEXT`` may take 1/8 of the device's memory and 1/2 of its free memory."""
STEP_TOKENS = 512
"""Tokens per step if the device states no preference: enough to keep matrix products efficient. Activations take about
0.1 MB per token in a 2B model."""
MAX_STEP_TOKENS = 65_536
DETERMINISTIC_TOKENS = 64
"""Tokens and rows of every step of a deterministic program, however many are used (decision 0029)."""
STEP_ROWS = 32
"""Maximum rows of logits per step when scoring text; each row has one float per vocabulary entry."""
UNKNOWN_MEMORY = 4 << 30
"""Free memory, in bytes, assumed for a device that does not report it."""


TIMES_THE_FILE = 8
SMALL_CACHE = 256 << 20
"""Maximum cache of the default context: ``TIMES_THE_FILE`` times the file's size plus ``SMALL_CACHE`` bytes. For 4096
positions, models need 0.2 to 3 times their file; a model with an unusually large cache gets a shorter context."""


def position_bytes(config: ModelConfig, kv_dtype: KVDtype) -> int:
    """Bytes per position of a sequence, in the cache and in the rotary tables; see :func:`window_bytes` for windows."""
    full = sum(window is None for window in config.attended)
    return KVSpec(full, config.kv_heads, config.head_dim, 1, 1, kv_dtype).bytes + rope_bytes(config)


def window_bytes(config: ModelConfig, kv_dtype: KVDtype, context: int) -> int:
    """Bytes of the cache of layers that attend to windows, for a sequence of ``context`` tokens that decodes."""
    layer = KVSpec(1, config.kv_heads, config.head_dim, 1, BLOCK_SIZE, kv_dtype).bytes
    windows = [window for window in config.attended if window is not None]
    return layer * sum(most_blocks(window, context, BLOCK_SIZE, 1) for window in windows)


def default_context(config: ModelConfig, *, size: int, kv_dtype: KVDtype, total: int, free: int) -> int:
    """Tokens of the default context: the model's own, limited by the file's ``size`` in bytes and the device's memory.

    That is at most 4,096 tokens, or up to 131,072 in steps of 1,024 if one such context takes at most an eighth of the
    ``total`` bytes of memory (which stay the same from run to run) and at most half of the ``free`` bytes.
    """
    each, fixed = position_bytes(config, kv_dtype), window_bytes(config, kv_dtype, config.context_length)
    affordable = max(0, TIMES_THE_FILE * size + SMALL_CACHE - fixed) // each
    roomy = max(0, min(total // PART_OF_MEMORY, free // PART_OF_FREE) - fixed) // each // 1024 * 1024
    most = min(max(DEFAULT_CONTEXT, roomy), LONGEST_DEFAULT)
    return min(config.context_length, most, max(affordable, BLOCK_SIZE))


def context_for(file: ModelFile, devices: Iterable[Device], *, kv_dtype: KVDtype) -> int:
    """Tokens of a model's default context on several devices: the longest that fits all of them."""
    _check_type(kv_dtype)
    return min(
        default_context(file.config, size=file.size, kv_dtype=kv_dtype, total=total, free=max(0, free - file.size))
        for total, free in map(device_memory, devices)
    )


def check_sizes(config: ModelConfig, *, context: int, kv_dtype: str, step_tokens: int | None) -> None:
    """Check a program's sizes.

    Raises:
        InvalidInputError: One is out of its range.
    """
    _check_type(kv_dtype)
    if not 2 <= context <= config.context_length:
        raise InvalidInputError(
            f"context is {context}; for {config.name} it must be in 2 … {config.context_length} tokens."
        )
    if step_tokens is not None and not 1 <= step_tokens <= MAX_STEP_TOKENS:
        raise InvalidInputError(f"step_tokens is {step_tokens}; it must be in 1 … {MAX_STEP_TOKENS}.")


def _check_type(kv_dtype: str) -> None:
    if kv_dtype not in get_args(KVDtype):
        raise InvalidInputError(f"kv_dtype is {kv_dtype!r}; it must be f16, f32 or i8.")


def device_memory(device: Device) -> tuple[int, int]:
    """A device's total and free memory in bytes; guesses if it does not report them."""
    memory = device.memory()
    total = memory.total or UNKNOWN_MEMORY
    return total, memory.free or total - memory.used


def cache_blocks(
    config: ModelConfig, *, context: int, max_seqs: int, step_tokens: int, kv_dtype: KVDtype, free: int
) -> int:
    """Number of blocks of the KV cache: a full context for each sequence, if that fits in a quarter of the free memory.

    There is always room for one full context, so the oldest sequence never waits for memory that others hold. Layers
    with windows need room for the window and the longest step only.
    """
    layout = cache_layout(config)
    one = layout.blocks(context, BLOCK_SIZE, step_tokens)
    block = KVSpec(layout.layers, config.kv_heads, config.head_dim, 1, BLOCK_SIZE, kv_dtype)
    affordable = free // 4 // block.bytes
    return max(one, min(one * max_seqs, affordable))


def state_entries(config: ModelConfig, *, max_seqs: int, free: int) -> int:
    """Entries of the states of recurrent layers; 0 without such layers.

    Two for each sequence and some for snapshots, if they fit in a quarter of the free memory; as many as fit, if not,
    and fewer sequences then run at the same time. There are always two.
    """
    if config.delta_net is None:
        return 0
    return max(2, min(2 * max_seqs + MAX_SNAPSHOTS, free // 4 // config.delta_net.state_bytes))


def weights_again(
    path: Path, layout: I2SLayout, identity: tuple[int, ...], features: tuple[str, ...], options: Mapping[str, Any]
) -> Mapping[str, Weight]:
    """Load a program's weights from its file again, in another process.

    Raises:
        ModelFileError: The file was replaced.
    """
    from bitnet.core.model.file import open_model

    file = open_model(path, i2s_layout=layout)
    if file.gguf.identity != identity:
        raise ModelFileError("was replaced while it was being loaded.", path=path, hint="Load it again.")
    return build_program(file.config, file.weights_for(features), **options).weights


def compile_model(file: ModelFile, device: Device, **options: Any) -> tuple[Program, Executable]:
    """Build a model's program and compile it; ``options`` are those of ``build_program``.

    Raises:
        UnsupportedProgramError: The device lacks a feature that the program needs.
        OutOfMemoryError, KernelCompileError: The model does not fit the device, or a kernel does not compile.
    """
    features = device.info.features
    program = build_program(file.config, file.weights_for(features), **options)
    again = partial(weights_again, file.path.absolute(), file.i2s_layout, file.gguf.identity, features, options)
    program = replace(program, again=again)
    check_features(program, device.info)
    return program, device.compile(program)


def refusals(file: ModelFile, devices: Sequence[DeviceInfo]) -> Mapping[str, str | None]:
    """By name, why each device refuses the model: the operation that it lacks; None: it runs the model.

    What devices say of their features is compared with what the model needs; nothing is compiled.
    """
    found: dict[tuple[str, ...], str | None] = {}
    programs: dict[frozenset[str], Program] = {}  # by the weights that a device reads in another form
    for info in devices:
        if info.features in found:
            continue
        weights = file.weights_for(info.features)
        packed = frozenset(name for name, weight in weights.items() if weight is not file.weights.get(name))
        if packed not in programs:
            programs[packed] = build_program(file.config, weights, limits=Limits(1), num_blocks=1)
        try:
            check_features(programs[packed], info)
            found[info.features] = None
        except UnsupportedProgramError as error:
            found[info.features] = error.message.removeprefix(f"{info.name}: ")
    return {info.name: found[info.features] for info in devices}


def open_engine(
    file: ModelFile,
    device: Device,
    *,
    context: int,
    kv_dtype: KVDtype,
    max_seqs: int,
    step_tokens: int | None,
    deterministic: bool = False,
    lookup: bool = False,
    draft: DraftLayer | None = None,
    first: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Engine, Executable]:
    """Compile a model for a device, and the layer that makes drafts for it, if there is one. ``first`` is a context
    manager around the first step.

    Raises:
        InvalidInputError: ``context``, ``kv_dtype``, ``max_seqs`` or ``step_tokens`` is out of range.
        UnsupportedProgramError: The device does not support ``deterministic`` or a KV cache in ``i8``.
        OutOfMemoryError, KernelCompileError: The model does not fit the device, or a kernel does not compile.
    """
    config = file.config
    check_sizes(config, context=context, kv_dtype=kv_dtype, step_tokens=step_tokens)
    if deterministic:
        if step_tokens not in (None, DETERMINISTIC_TOKENS):
            raise InvalidInputError(
                f"step_tokens is {step_tokens}; leave it out: deterministic steps have {DETERMINISTIC_TOKENS}."
            )
        step_tokens = DETERMINISTIC_TOKENS
    if step_tokens is None:
        step_tokens = device.info.step_tokens or STEP_TOKENS
    if not 1 <= max_seqs <= step_tokens:
        raise InvalidInputError(f"max_seqs is {max_seqs}; it must be in 1 … {step_tokens} (step_tokens).")
    windows = cache_layout(config).windows
    limits = Limits(
        max_tokens=step_tokens,
        max_seqs=max_seqs,
        max_rows=step_tokens if deterministic else max(max_seqs, min(STEP_ROWS, step_tokens)),
        max_blocks=-(-context // BLOCK_SIZE),
        tables=len(windows),
    )
    total, free = device.memory().total, device_memory(device)[1] - file.size
    entries = state_entries(config, max_seqs=max_seqs, free=max(0, free))
    needed = context * position_bytes(config, kv_dtype) + window_bytes(config, kv_dtype, context)
    if config.delta_net is not None:
        needed += entries * config.delta_net.state_bytes
    if total and needed > total:
        raise OutOfMemoryError(
            f"a context of {context} tokens needs {needed:,} bytes; the device has {total:,}.",
            device=device.info.name,
            hint="Choose a shorter context, or keep the cache in int8 (kv_dtype i8).",
        )
    blocks = cache_blocks(
        config,
        context=context,
        max_seqs=max_seqs,
        step_tokens=step_tokens,
        kv_dtype=kv_dtype,
        free=max(0, free),
    )
    program, executable = compile_model(
        file,
        device,
        limits=limits,
        num_blocks=blocks,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
        state_entries=max(1, entries),
        hidden=draft is not None,
    )
    assert program.kv is not None
    drafter = None
    if draft is not None:
        weights = file.weights_for(device.info.features)
        sizes: dict[str, Any] = {"limits": limits, "context": context, "kv_dtype": kv_dtype}
        drafter = make_drafter(draft, weights, device, executable, **sizes)
    tokenizer = file.tokenizer
    preparer = Preparer(
        context=context,
        vocab_size=config.vocab_size,
        eos=tokenizer.eos_ids,
        text=lambda prompt: StreamDecoder(tokenizer, after=prompt),
        lookup=lookup,
        longest=config.context_length,
    )
    engine = Engine(
        executable,
        preparer,
        limits=limits,
        kv=program.kv,
        device=device.info.name,
        check=lambda: file.gguf.check() if file.gguf.lost else None,
        first=first,
        features=device.info.features,
        state_entries=entries,
        windows=windows,
        drafter=drafter,
    )
    return engine, executable


def make_drafter(
    layer: DraftLayer,
    weights: Mapping[str, Weight],
    device: Device,
    target: Executable,
    *,
    limits: Limits,
    context: int,
    kv_dtype: KVDtype,
) -> Drafter:
    """Compile a draft layer for the device of its model.

    Args:
        weights, limits: The model's.
        context: Maximum tokens of a sequence.

    Raises:
        UnsupportedProgramError: The device lacks a feature that the layer needs.
        OutOfMemoryError, KernelCompileError: The layer does not fit the device, or a kernel does not compile.
    """
    limits = Limits(
        max_tokens=limits.max_rows,
        max_seqs=limits.max_seqs,
        max_rows=limits.max_seqs,
        max_blocks=-(-min(context, MAX_POSITIONS) // BLOCK_SIZE),
    )
    blocks = limits.max_seqs * limits.max_blocks
    program = build_draft_program(layer, weights, limits=limits, num_blocks=blocks, kv_dtype=kv_dtype)
    check_features(program, device.info)
    assert program.kv is not None
    return Drafter(device.compile(program), target, limits=limits, kv=program.kv)
