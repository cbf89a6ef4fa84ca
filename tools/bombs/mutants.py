"""Valid models with one to three changes to values, types, shapes, names or entries.

A mutant is determined by its number, so that a failing one can be reproduced.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

import random_qwen35
from bitnet.core.errors import InvalidInputError
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.types import tensor_bytes
from bombs.base import GGUF, Folder, Shape
from bombs.family import Door
from bombs.hybrids import SHAPE, Hybrid

SIZES = [0, 1, 2, 3, 4, 5, 31, 32, 64, 127, 128, 255, 256, 4096, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40]
TEXTS = ["", " ", "\0", "a", "\ud7ff", "<|eos|>", "gpt2", "llama", "bitnet", "x" * 600, "y" * 70_000, "{{ 1 }}", "{%"]
NUMBERS = [0.0, -1.0, 1e-45, 1e38, 1e300, float("nan"), float("inf"), 0.5]
TYPES = list(GGMLType)


@np.errstate(all="ignore")
def write(number: int, folder: Path) -> tuple[Door, Path]:
    """Make a mutant; where to bring it, and the file or folder."""
    rng = random.Random(number)
    shape = Shape(layers=rng.choice([1, 2]), context=rng.choice([64, 8192]))
    hybrid = rng.random() < 0.3
    if rng.random() < 0.4:
        return "convert", _hybrid_folder(rng, folder) if hybrid else _folder(rng, shape, folder)
    model = Hybrid() if hybrid else GGUF(shape)
    if not hybrid and rng.random() < 0.5:
        model.vocabulary(["ab", "abc"], model="llama")
    door: Door = rng.choice(["run", "inspect", "convert", "encode"])
    while True:
        changed = copy.copy(model)
        changed.metadata, changed.tensors = dict(model.metadata), dict(model.tensors)
        for _ in range(rng.randint(1, 3)):
            rng.choice([_metadata, _metadata, _tensor])(rng, changed)
        try:
            return door, changed.write(folder)
        except (InvalidInputError, OverflowError, UnicodeEncodeError):
            continue  # a value that the format has no form for


def _value(rng: random.Random, old: Any) -> Any:
    """Another value: near the old one, or of any kind."""
    if isinstance(old, list) and old and rng.random() < 0.7:
        new = list(old)
        at = rng.randrange(len(new))
        return rng.choice([new[:at], new * 3, [*new[:at], rng.choice(TEXTS), *new[at + 1 :]], [new[at]] * len(new)])
    if isinstance(old, np.ndarray) and rng.random() < 0.7:
        return rng.choice(
            [old[: len(old) // 2], np.repeat(old, 2), old.astype(np.float64), old[::-1].copy(), old * 0 + 7]
        )
    if type(old) is int and rng.random() < 0.7:
        return max(0, rng.choice([old + 1, old - 1, old * 2, old // 2, *SIZES]))
    kinds: list[Any] = [rng.choice(SIZES), -rng.choice(SIZES), rng.choice(TEXTS), rng.choice(NUMBERS), True, []]
    kinds += [[rng.choice(TEXTS)] * 300, [1] * 300, [[1], ["a"]], np.zeros(300, np.uint8), np.full(302, 2**62)]
    return rng.choice(kinds)


MORE_KEYS = [
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.dimension_count", "hidden_activation",
]  # fmt: skip
MORE_HYBRID_KEYS = ["qwen35.attention.recurrent_layers", "qwen35.nextn_predict_layers", "prism.hadamard.rounding"]
MORE_TOKENIZER_KEYS = ["pre", "scores", "add_bos_token", "add_space_prefix", "eot_token_id"]


def _metadata(rng: random.Random, model: GGUF) -> None:
    keys = [*model.metadata, "general.alignment", "general.name", "tokenizer.chat_template"]
    family = "qwen35" if isinstance(model, Hybrid) else "bitnet-b1.58"
    keys += [f"{family}.{key}" for key in MORE_KEYS] + [f"tokenizer.ggml.{key}" for key in MORE_TOKENIZER_KEYS]
    keys += MORE_HYBRID_KEYS if isinstance(model, Hybrid) else []
    key = rng.choice(keys)
    if rng.random() < 0.1:
        model.metadata.pop(key, None)
    else:
        model.metadata[key] = _value(rng, model.metadata.get(key))


def _tensor(rng: random.Random, model: GGUF) -> None:
    name = rng.choice([*model.tensors, "rope_freqs.weight", "output.weight", "blk.0.attn_q.scale", "blk.0.attn_q.bias"])
    old = model.tensors.get(name)
    if old is not None and rng.random() < 0.1:
        del model.tensors[name]
        return
    shape = tuple(old.shape) if old is not None else rng.choice([(), (1,), (16,), (300, 64)])
    if rng.random() < 0.5:
        shape = tuple(rng.choice([n, n * 2, n // 2 or 1, 1, 4, 128, 256]) for n in shape)
        shape = rng.choice([shape, shape[::-1], (1, *shape), shape[1:]])
    dtype = rng.choice(TYPES)
    try:
        size = tensor_bytes(dtype, shape)
    except ValueError:
        return
    if size < 1 << 24:
        data = np.frombuffer(rng.randbytes(min(size, 4096)), np.uint8)
        model.tensors[name] = TensorSource(shape, dtype, np.resize(data, size))


def _folder(rng: random.Random, shape: Shape, folder: Path) -> Path:
    model = Folder(shape)
    if rng.random() < 0.3:
        model.mlx()
    for _ in range(rng.randint(1, 3)):
        part = rng.choice(["config", "config", "tokenizer", "header", "bytes"])
        if part == "config":
            more = [
                "rope_theta",
                "rms_norm_eps",
                "rope_scaling",
                "rope_parameters",
                "head_dim",
                "hidden_act",
                "eos_token_id",
            ]
            _entry(rng, model.config, rng.choice([*model.config, *more]))
        elif part == "tokenizer":
            node: Any = model.tokenizer
            while isinstance(node, dict) and node:
                key = rng.choice(list(node)[:20])
                if not isinstance(node[key], dict) or rng.random() < 0.3:
                    _entry(rng, node, key)
                    break
                node = node[key]
        elif part == "header":
            name = rng.choice(list(model.tensors))
            array = model.tensors[name]
            if rng.random() < 0.5:
                model.tensors[name] = array.reshape(-1)[: rng.randrange(1, array.size + 1)]
            else:
                model.tensors[name] = np.resize(np.frombuffer(rng.randbytes(64), array.dtype), array.shape)
        else:
            path = rng.choice(
                ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"]
            )
            text = json.dumps(rng.choice([model.config, model.tokenizer, {"weight_map": {"a": 1}}, [], 1]))
            model.files[path] = text[: rng.randrange(1, len(text) + 1)].encode()
    return model.write(folder)


def _hybrid_folder(rng: random.Random, folder: Path) -> Path:
    path = folder / "mutant"
    random_qwen35.write_folder(path, SHAPE, 0, rng.choice(["hf", "mlx"]))
    config = json.loads((path / "config.json").read_text())
    for _ in range(rng.randint(1, 3)):
        inner = config.get("text_config")
        node = rng.choice([config, inner]) if isinstance(inner, dict) and inner else config
        _entry(rng, node, rng.choice([*node, "layer_types", "modules", "schema_version", "text_config"]))
    (path / "config.json").write_text(json.dumps(config))
    if rng.random() < 0.3:
        file = path / "model.safetensors"
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(4096)
        data[at] = rng.randrange(256)
        file.write_bytes(data)
    return path


def _entry(rng: random.Random, node: dict[str, Any], key: str) -> None:
    value = _value(rng, node.get(key))
    node[key] = value.tolist() if isinstance(value, np.ndarray) else value
    if rng.random() < 0.1:
        del node[key]
