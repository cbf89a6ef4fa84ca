"""From a model file and an open device to an engine: how large the steps and the cache are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from bitnet.core.engine.engine import Engine
from bitnet.core.errors import InvalidInputError, OutOfMemoryError
from bitnet.core.hal import Device, Executable, KVSpec, Limits
from bitnet.core.hal.check import check_deterministic
from bitnet.core.model.program import BLOCK_SIZE, KVDtype, build_program, kv_bytes, rope_bytes
from bitnet.core.text.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from bitnet.core.model.config import ModelConfig
    from bitnet.core.model.file import ModelFile

DEFAULT_CONTEXT = 4096
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
    return kv_bytes(KVSpec(config.layers, config.kv_heads, config.head_dim, 1, 1, kv_dtype)) + rope_bytes(config)


def default_context(config: ModelConfig, *, size: int, kv_dtype: KVDtype) -> int:
    """Tokens of the default context: the model's own, limited for a file of ``size`` bytes."""
    affordable = (TIMES_THE_FILE * size + SMALL_CACHE) // position_bytes(config, kv_dtype)
    return min(config.context_length, DEFAULT_CONTEXT, max(affordable, BLOCK_SIZE))


def cache_blocks(config: ModelConfig, *, context: int, max_seqs: int, kv_dtype: KVDtype, free: int) -> int:
    """Blocks of the KV cache: a full context for each sequence, if a quarter of the memory left over holds that.

    There is always one full context: a single sequence never has to wait for memory that others hold.
    """
    one = -(-context // BLOCK_SIZE)
    block = KVSpec(config.layers, config.kv_heads, config.head_dim, 1, BLOCK_SIZE, kv_dtype)
    affordable = free // 4 // kv_bytes(block)
    return max(one, min(one * max_seqs, affordable))


def open_engine(
    file: ModelFile,
    device: Device,
    *,
    context: int | None,
    kv_dtype: KVDtype,
    max_seqs: int,
    step_tokens: int | None,
    deterministic: bool = False,
    lookup: bool = False,
    first: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Engine, Executable]:
    """Compile a model for a device. ``first`` is a context for the first step.

    Raises:
        InvalidInputError: ``context``, ``max_seqs`` or ``step_tokens`` is out of range.
        UnsupportedProgramError: ``deterministic``, and the device cannot be.
        OutOfMemoryError, KernelCompileError: The device cannot take the model.
    """
    config = file.config
    if kv_dtype not in ("f16", "f32"):
        raise InvalidInputError(f"kv_dtype is {kv_dtype!r}; it must be f16 or f32.")
    if context is None:
        context = default_context(config, size=file.size, kv_dtype=kv_dtype)
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
    memory = device.memory()
    free = (memory.free or (memory.total or UNKNOWN_MEMORY) - memory.used) - file.size
    needed = context * position_bytes(config, kv_dtype)
    if memory.total and needed > memory.total:
        raise OutOfMemoryError(
            f"a context of {context} takes {needed:,} bytes; {memory.total:,} are all there is.",
            device=device.info.name,
            hint="Choose a shorter context.",
        )
    blocks = cache_blocks(config, context=context, max_seqs=max_seqs, kv_dtype=kv_dtype, free=max(0, free))
    program = build_program(
        config,
        file.weights_for(device.info.features),
        limits=limits,
        num_blocks=blocks,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
    )
    assert program.kv is not None
    tokenizer = file.tokenizer
    check_deterministic(program, device.info)
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
