"""From a model file and an open device to an engine: how large the steps and the cache are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from bitnet.core.engine.engine import Engine
from bitnet.core.errors import InvalidInputError, ModelFileError, OutOfMemoryError
from bitnet.core.hal import Device, Executable, KVDtype, KVSpec, Limits, Weight
from bitnet.core.hal.check import check_features
from bitnet.core.model.program import BLOCK_SIZE, build_program
from bitnet.core.model.rope import rope_bytes
from bitnet.core.text.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from pathlib import Path

    from bitnet.core.gguf.ternary import I2SLayout
    from bitnet.core.model.config import ModelConfig
    from bitnet.core.model.file import ModelFile

DEFAULT_CONTEXT, LONGEST_DEFAULT = 4096, 32_768
"""The default context at most, on any device and where memory allows. A longer one must be asked for: each
step carries the table of its blocks, and its rotary tables take time to compute."""
PART_OF_MEMORY, PART_OF_FREE = 8, 2
"""One default context of more than ``DEFAULT_CONTEXT`` takes these parts of a device's memory, and of what is free."""
STEP_TOKENS = 512
"""Tokens a step, where the device tells no better: enough to keep a matrix product busy. Activations cost about 0.1 MB
a token in a 2B model."""
MAX_STEP_TOKENS = 65_536
DETERMINISTIC_TOKENS = 64
"""Tokens, and rows, of every step of a deterministic program, whatever it holds (decision 0029)."""
STEP_ROWS = 32
"""Rows of logits a step where text is scored; each takes a vocabulary of floats."""
UNKNOWN_MEMORY = 4 << 30
"""Free memory assumed for a device that does not know its memory."""


TIMES_THE_FILE = 8
SMALL_CACHE = 256 << 20
"""Maximum cache of the default context: this many times the file, and this many bytes besides. Models need a
fifth to three times their file for 4096 positions; one whose cache is large beside its weights gets fewer."""


def position_bytes(config: ModelConfig, kv_dtype: KVDtype) -> int:
    """Bytes that a position of a sequence takes, in the cache and in the rotary tables."""
    return KVSpec(config.layers, config.kv_heads, config.head_dim, 1, 1, kv_dtype).bytes + rope_bytes(config)


def default_context(config: ModelConfig, *, size: int, kv_dtype: KVDtype, total: int, free: int) -> int:
    """Tokens of the default context: the model's own, limited for a file of ``size`` bytes and by the device's memory.

    That is 4,096 tokens at most, or as far as 32,768, in steps of 1,024, where one such context takes no more than an
    eighth of the ``total`` bytes of memory, which stay the same from run to run, and half of the ``free`` ones.
    """
    each = position_bytes(config, kv_dtype)
    affordable = (TIMES_THE_FILE * size + SMALL_CACHE) // each
    roomy = min(total // PART_OF_MEMORY, free // PART_OF_FREE) // each // 1024 * 1024
    most = min(max(DEFAULT_CONTEXT, roomy), LONGEST_DEFAULT)
    return min(config.context_length, most, max(affordable, BLOCK_SIZE))


def context_for(file: ModelFile, devices: Iterable[Device], *, kv_dtype: KVDtype) -> int:
    """Tokens of the default context of a model on devices: what all of them have room for."""
    _check_type(kv_dtype)
    return min(
        default_context(file.config, size=file.size, kv_dtype=kv_dtype, total=total, free=max(0, free - file.size))
        for total, free in map(_memory, devices)
    )


def _check_type(kv_dtype: str) -> None:
    if kv_dtype not in get_args(KVDtype):
        raise InvalidInputError(f"kv_dtype is {kv_dtype!r}; it must be f16, f32 or i8.")


def _memory(device: Device) -> tuple[int, int]:
    """Bytes of a device in all, and free: guesses, where it does not know."""
    memory = device.memory()
    total = memory.total or UNKNOWN_MEMORY
    return total, memory.free or total - memory.used


def cache_blocks(config: ModelConfig, *, context: int, max_seqs: int, kv_dtype: KVDtype, free: int) -> int:
    """Blocks of the KV cache: a full context for each sequence, if a quarter of the memory left over holds that.

    There is always one full context: a single sequence never has to wait for memory that others hold.
    """
    one = -(-context // BLOCK_SIZE)
    block = KVSpec(config.layers, config.kv_heads, config.head_dim, 1, BLOCK_SIZE, kv_dtype)
    affordable = free // 4 // block.bytes
    return max(one, min(one * max_seqs, affordable))


def weights_again(
    path: Path, layout: I2SLayout, identity: tuple[int, ...], features: tuple[str, ...], options: Mapping[str, Any]
) -> Mapping[str, Weight]:
    """The weights of a program, from its file, in another process.

    Raises:
        ModelFileError: Another file has the name now.
    """
    from bitnet.core.model.file import open_model

    file = open_model(path, i2s_layout=layout)
    if file.gguf.identity != identity:
        raise ModelFileError("was replaced while it was loaded.", path=path, hint="Load it again.")
    return build_program(file.config, file.weights_for(features), **options).weights


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
    first: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Engine, Executable]:
    """Compile a model for a device. ``first`` is a context for the first step.

    Raises:
        InvalidInputError: ``context``, ``kv_dtype``, ``max_seqs`` or ``step_tokens`` is out of range.
        UnsupportedProgramError: ``deterministic`` or a cache in ``i8``, and the device cannot do that.
        OutOfMemoryError, KernelCompileError: The device cannot take the model.
    """
    config = file.config
    _check_type(kv_dtype)
    if not 2 <= context <= config.context_length:
        raise InvalidInputError(f"context is {context}; {config.name} takes 2 … {config.context_length} tokens.")
    if deterministic:
        if step_tokens not in (None, DETERMINISTIC_TOKENS):
            raise InvalidInputError(
                f"step_tokens is {step_tokens}; deterministic steps have {DETERMINISTIC_TOKENS}: leave it out."
            )
        step_tokens = DETERMINISTIC_TOKENS
    if step_tokens is None:
        step_tokens = device.info.step_tokens or STEP_TOKENS
    if not 1 <= step_tokens <= MAX_STEP_TOKENS:
        raise InvalidInputError(f"step_tokens is {step_tokens}; it must be in 1 … {MAX_STEP_TOKENS}.")
    if not 1 <= max_seqs <= step_tokens:
        raise InvalidInputError(f"max_seqs is {max_seqs}; it must be in 1 … {step_tokens} (step_tokens).")
    limits = Limits(
        max_tokens=step_tokens,
        max_seqs=max_seqs,
        max_rows=step_tokens if deterministic else max(max_seqs, min(STEP_ROWS, step_tokens)),
        max_blocks=-(-context // BLOCK_SIZE),
    )
    total, free = device.memory().total, _memory(device)[1] - file.size
    needed = context * position_bytes(config, kv_dtype)
    if total and needed > total:
        raise OutOfMemoryError(
            f"a context of {context} takes {needed:,} bytes; {total:,} are all there is.",
            device=device.info.name,
            hint="Choose a shorter context, or keep the cache in int8 (kv_dtype i8).",
        )
    blocks = cache_blocks(config, context=context, max_seqs=max_seqs, kv_dtype=kv_dtype, free=max(0, free))
    options: dict[str, Any] = {"limits": limits, "num_blocks": blocks, "kv_dtype": kv_dtype}
    options["deterministic"] = deterministic
    program = build_program(config, file.weights_for(device.info.features), **options)
    again = partial(weights_again, file.path.absolute(), file.i2s_layout, file.gguf.identity, device.info.features)
    program = replace(program, again=partial(again, options))
    assert program.kv is not None
    tokenizer = file.tokenizer
    check_features(program, device.info)
    executable = device.compile(program)
    engine = Engine(
        executable,
        limits=limits,
        kv=program.kv,
        context=context,
        vocab_size=config.vocab_size,
        eos=tokenizer.eos_ids,
        text=lambda prompt: StreamDecoder(tokenizer, after=prompt),
        device=device.info.name,
        check=lambda: file.gguf.check() if file.gguf.lost else None,
        first=first,
        features=device.info.features,
        lookup=lookup,
    )
    return engine, executable
