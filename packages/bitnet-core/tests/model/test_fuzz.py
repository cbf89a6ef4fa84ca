"""Thousands of broken model files: each must open or give one typed error, quickly and in little memory.

A case that fails is kept in the test's temporary folder; its name is in the message.
"""

from __future__ import annotations

import random
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError, ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource, write_gguf
from bitnet.core.gguf.blocks import encode_blocks
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.model import open_model
from bitnet.core.model.inspect import inspect_tensors

CASES = 1500
MEMORY = 1 << 30
"""Bytes of address space a case may take beyond what the process has."""

Make = Callable[..., Any]


@contextmanager
def little_memory() -> Iterator[None]:
    """Make allocations beyond the bound fail, where the platform can."""
    if sys.platform != "linux":
        yield
        return
    import resource

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def use(path: Path) -> None:
    """Do with a model file all that can be done without a device."""
    model = open_model(path)
    tokenizer = model.tokenizer
    tokenizer.decode(tokenizer.encode("The 12 cats\n 😀<|eos|>", parse_special=True))
    if model.chat_template is not None:
        with suppress(InvalidInputError):
            model.chat_template.render([{"role": "user", "content": "x"}])
    for weight in model.weights.values():
        weight.load()
        weight.release()
    list(inspect_tensors(model.gguf))


def outcome(path: Path, what: str) -> bool:
    """Whether the case opens; fails the test where it ends otherwise."""
    begin = time.perf_counter()
    try:
        use(path)
        return True
    except ModelFileError as error:
        message = str(error)
    except BaseException:
        pytest.fail(f"{what} ({path}):\n{traceback.format_exc()}")
    finally:
        assert time.perf_counter() - begin < 10, f"{what} ({path}) took too long"
    assert "\n" not in message
    assert len(message) < 1000
    return False


NUMBERS = [0, 1, 2, 3, 5, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, numbers, pieces cut out, moved or copied, an end cut off."""
    data = bytearray(content)
    reach = len(data) if rng.random() < 0.3 else len(data) // 4  # metadata come first, and there is more to break there
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(min(reach, len(data)), 1))
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                number = struct.pack("<Q", rng.choice(NUMBERS))[: rng.choice([1, 2, 4, 8])]
                data[at : at + len(number)] = number
            case 2:
                del data[at : at + rng.randrange(1, 40)]
            case 3:
                other = rng.randrange(len(data) or 1)
                data[at : at + 16] = data[other : other + 16]
            case 4:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(20)))
            case 5:
                del data[rng.randrange(len(data) or 1) :]
    return bytes(data)


def sparse_blocks(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of which each four 16 apart have one zero, and scales."""
    rng = np.random.default_rng()
    fours = rng.choice(np.array([0, 2], np.uint8), (count, 4, 16, 4))
    np.put_along_axis(fours, rng.integers(0, 4, (count, 4, 16, 1)), 1, axis=3)
    return fours.swapaxes(2, 3).reshape(count, 256), np.ones(count, np.float16)


@pytest.fixture
def varied(tiny: Make) -> Any:
    """A model with many kinds of values and tensors in its file, of any of three architectures."""
    import gguf

    model = tiny(random.choice(["bitnet", "olmo", "qwen2"]))
    for name in [name for name in model.tensors if "norm" in name and model.architecture != "bitnet"]:
        if model.architecture == "olmo" or "sub_norm" in name:
            del model.tensors[name]
    if model.architecture == "olmo":
        model.metadata[model.key("attention.layer_norm_epsilon")] = 1e-5
    for name in [name for name in model.codes if name[-2:] in ("_q", "_k", "_v") and model.architecture == "qwen2"]:
        model.tensors[f"{name}.bias"] = np.ones(len(model.codes[name]), random.choice([np.float16, np.float32]))
    codes = model.codes["blk.1.ffn_down"]
    for name, dtype in (("blk.1.ffn_down", GGMLType.TQ2_0), ("blk.0.ffn_down", GGMLType.TQ1_0)):
        data = gguf.quants.quantize(codes * np.float32(0.5), gguf.GGMLQuantizationType(dtype))
        model.tensors[f"{name}.weight"] = TensorSource(codes.shape, dtype, data)
    for name, dtype in {"v": GGMLType.PTQ1_0, "k": GGMLType.PQ2_0, "output": GGMLType.Q2_0}.items():
        codes = model.codes[f"blk.0.attn_{name}"]
        blocks = (codes + 1).view(np.uint8).reshape(-1, BLOCKS[dtype][0])
        data = encode_blocks(dtype, blocks, np.ones(len(blocks), np.float16))
        model.tensors[f"blk.0.attn_{name}.weight"] = TensorSource(codes.shape, dtype, data)
    if random.random() < 0.5:
        data = encode_blocks(GGMLType.STQ1_0, *sparse_blocks(128))
        model.tensors["blk.1.ffn_down.weight"] = TensorSource((128, 256), GGMLType.STQ1_0, data)
    model.tensors["blk.0.attn_q.scale"] = np.ones(1, np.float32)
    model.tensors["blk.1.attn_q.weight"] = model.codes["blk.1.attn_q"].astype(np.float16)
    model.tensors["rope_freqs.weight"] = np.ones(16, np.float32)
    model.metadata[model.key("hidden_activation")] = "relu2"
    model.metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    return model


def test_bytes(varied: Any, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    content = varied.write().read_bytes()
    assert outcome(varied.path, "the file itself")
    opened = 0
    with little_memory():
        for i in range(CASES):
            path = tmp_path / "case.gguf"
            path.write_bytes(mutated(content, rng))
            opened += outcome(path, f"case {i} of seed {seed}")
    assert 0 < opened < CASES  # changes that matter, and some that do not


VALUES: list[Any] = [
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    0.0,
    -1.5,
    float("nan"),
    float("inf"),
    True,
    False,
    "",
    "x",
    "llama",
    "gpt2",
    "{{",
    "a" * 1000,
    ["a b"],
    ["", " ", "a"],
    [1, 2],
    [1.5],
    [True],
    [[1], ["a"]],
    [[[[1]]]],
    np.zeros(0, np.int32),
    np.arange(260, dtype=np.int32),
    np.full(260, np.nan, np.float32),
    np.float64(1e300),
    np.uint8(7),
]


def test_values(varied: Any, tmp_path: Path) -> None:
    """Every key with every kind of value, and missing; then some at a time."""
    rng = random.Random()
    keys = list(varied.metadata)
    keys += ["tokenizer.ggml.scores", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token"]
    keys += [varied.key(k) for k in ("rope.scaling.type", "rope.scaling.factor", "attention.key_length")]
    original = dict(varied.metadata)
    cases = [{key: value} for key in keys for value in [None, *VALUES]]
    cases += [{key: rng.choice([None, *VALUES]) for key in rng.sample(keys, 3)} for _ in range(300)]
    with little_memory():
        for changes in cases:
            metadata = {k: v for k, v in (original | changes).items() if v is not None}
            write_gguf(tmp_path / "case.gguf", metadata, varied.tensors)
            outcome(tmp_path / "case.gguf", repr(changes)[:200])


def test_tensors(varied: Any, tmp_path: Path) -> None:
    """Every tensor with other shapes, types and values."""
    rng = np.random.default_rng()
    originals = dict(varied.tensors)
    with little_memory():
        for name, original in originals.items():
            shape = tuple(original.shape)
            for other in (
                rng.normal(size=shape).astype(np.float32),
                np.full(shape, np.nan, np.float16),
                np.full(shape, np.inf, np.float32),
                np.zeros(shape, np.float16),
                np.ones((1, *shape), np.float32),
                np.ones(shape[::-1], np.float32),
                np.ones((), np.float32),
                TensorSource((4, 256), GGMLType.Q6_K, rng.integers(0, 256, 840, dtype=np.uint8)),
                TensorSource((4, 128), GGMLType.I2_S, rng.integers(0, 256, 160, dtype=np.uint8)),
                TensorSource(shape, GGMLType.I8, np.zeros(shape, np.int8)),
            ):
                write_gguf(tmp_path / "case.gguf", varied.metadata, originals | {name: other})
                outcome(tmp_path / "case.gguf", f"{name}: {getattr(other, 'dtype', 'raw')} {other.shape}")
