"""Folders of Qwen3.5's kind become GGUF files with value heads tiled; transforms in MLX's packs become keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, unpack_ternary
from bitnet.core.hal import DenseWeight, TernaryWeight
from bitnet.core.model import ModelFile, open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.model.safetensors import open_checkpoint
from make_random_model import make_model
from random_qwen35 import write_folder
from random_shapes import PRESETS, HybridShape

_PRESET = PRESETS["bonsai-27b-small"]
assert isinstance(_PRESET, HybridShape)
SMALL = replace(_PRESET, layers=2, interval=2, ffn=256, context=64)
SHAPES = {
    "three value heads a key head": SMALL,
    "as many": replace(SMALL, k_heads=3, v_heads=3, taps=2, interval=2, rotary=128, layers=2),
    "heads of 64": replace(SMALL, k_heads=4, v_heads=8, state=64, interval=3, layers=3, tied=True, block=None),
}
TYPES = {"F32": np.float32, "F16": np.float16, "U32": np.uint32}


def arrays(folder: Path) -> dict[str, np.ndarray]:
    found = open_checkpoint(folder).items()
    return {name: t.bytes().view(TYPES[t.dtype]).reshape(t.shape) for name, t in found}


def rewrite(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    from random_qwen35 import write_safetensors

    names = {np.dtype(dtype): name for name, dtype in TYPES.items()}
    write_safetensors(folder / "model.safetensors", {n: (names[a.dtype], a.copy()) for n, a in tensors.items()})


def converted(folder: Path, **options: Any) -> ModelFile:
    convert_model(folder, folder.parent / "out.gguf", **options)
    return open_model(folder.parent / "out.gguf")


def values(model: ModelFile, name: str) -> np.ndarray:
    """A weight as numbers."""
    weight = model.weights[name]
    if isinstance(weight, DenseWeight):
        return np.asarray(weight.load(), np.float32)
    assert isinstance(weight, TernaryWeight)
    data, (n, k) = weight.load(), weight.shape
    return unpack_ternary(data.codes, k) * data.scale.astype(np.float32).reshape(n, -1).repeat(
        k // data.scale.shape[1], axis=1
    )


@pytest.fixture(params=SHAPES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, HybridShape]:
    shape = SHAPES[request.param]
    write_folder(tmp_path / "model", shape, 7, "hf")
    return tmp_path / "model", shape


def check_recurrent(model: ModelFile, found: dict[str, np.ndarray], shape: HybridShape, layer: int) -> None:
    """Head by head: value head ``r`` of the file's key head ``k`` stands at ``r * k_heads + k``."""
    theirs = {name.partition(".linear_attn.")[2]: a for name, a in found.items() if f".{layer}.linear_attn." in name}
    ours = {part: values(model, f"blk.{layer}.{part}") for part in ("attn_qkv", "attn_gate", "ssm_out", "ssm_conv1d")}
    small = {part: values(model, f"blk.{layer}.{part}") for part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt.bias")}
    keys, size = 2 * shape.k_heads * shape.state, shape.state
    np.testing.assert_array_equal(ours["attn_qkv"][:keys], theirs["in_proj_qkv.weight"][:keys])
    np.testing.assert_array_equal(ours["ssm_conv1d"][:keys], theirs["conv1d.weight"][:keys, 0])
    np.testing.assert_array_equal(values(model, f"blk.{layer}.ssm_norm"), theirs["norm.weight"])
    share = shape.v_heads // shape.k_heads
    for k in range(shape.k_heads):
        for r in range(share):
            tiled, grouped = r * shape.k_heads + k, k * share + r
            to, of = slice(tiled * size, tiled * size + size), slice(grouped * size, grouped * size + size)
            np.testing.assert_array_equal(ours["attn_qkv"][keys:][to], theirs["in_proj_qkv.weight"][keys:][of])
            np.testing.assert_array_equal(ours["ssm_conv1d"][keys:][to], theirs["conv1d.weight"][keys:, 0][of])
            np.testing.assert_array_equal(ours["attn_gate"][to], theirs["in_proj_z.weight"][of])
            np.testing.assert_array_equal(ours["ssm_out"][:, to], theirs["out_proj.weight"][:, of])
            np.testing.assert_array_equal(small["ssm_alpha"][tiled], theirs["in_proj_a.weight"][grouped])
            np.testing.assert_array_equal(small["ssm_beta"][tiled], theirs["in_proj_b.weight"][grouped])
            assert small["ssm_dt.bias"][tiled] == theirs["dt_bias"][grouped]
            assert small["ssm_a"][tiled] == -np.exp(theirs["A_log"][grouped])


def test_a_folder_of_floats(source: tuple[Path, HybridShape]) -> None:
    folder, shape = source
    if shape.state % 128:
        with pytest.raises(ModelFileError, match="value heads of 64 cannot be reordered"):
            converted(folder, dtype="pq2_0")
        return
    model, found = converted(folder, dtype="pq2_0"), arrays(folder)
    net = model.config.delta_net
    assert net is not None
    assert net.recurrent == tuple(not shape.attends(layer) for layer in range(shape.layers))
    assert (net.k_heads, net.v_heads, net.taps, model.config.rotated) == (
        shape.k_heads,
        shape.v_heads,
        shape.taps,
        shape.rotary,
    )
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for norm, name in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm")):
            expected = found[f"{prefix}{norm}.weight"] + np.float32(1)
            np.testing.assert_array_equal(values(model, f"blk.{layer}.{name}"), expected)
        if shape.attends(layer):
            for part, name in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
                expected = found[f"{prefix}self_attn.{part}_proj.weight"]
                np.testing.assert_array_equal(values(model, f"blk.{layer}.{name}"), expected)
        else:
            check_recurrent(model, found, shape, layer)
    text = "the cat's 12 हिन्दी"
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert model.tokenizer.encode(text) == original.encode(text, add_special_tokens=False).ids


def test_floats_that_are_not_ternary(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, SMALL, 1, "hf")
    found = arrays(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    found[name] = found[name].copy()
    found[name][3, 130] = 17
    rewrite(folder, found)
    with pytest.raises(ModelFileError, match="columns 128 to 255 of row 3 are not ternary") as caught:
        converted(folder)
    assert caught.value.field == f"tensor '{name}'"


def test_the_language_model_of_several_is_taken(tmp_path: Path) -> None:
    """Images and predictions of further tokens are left out; the names and configuration are nested."""
    folder = tmp_path / "model"
    write_folder(folder, SMALL, 1, "hf")
    plain = converted(folder)
    expected = {name: values(plain, name) for name in plain.weights}
    found = {name.replace("model.", "model.language_model.", 1): array for name, array in arrays(folder).items()}
    found |= {"model.visual.patch_embed.proj.weight": np.zeros((4, 4), np.float32)}
    found |= {"mtp.fc.weight": np.zeros((4, 4), np.float32)}
    rewrite(folder, found)
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text, "tie_word_embeddings": False}))
    again = converted(folder)
    assert again.weights.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_array_equal(values(again, name), numbers)


@pytest.mark.parametrize("block", [None, 256])
def test_a_folder_of_mlx(tmp_path: Path, block: int | None) -> None:
    folder, shape = tmp_path / "model", replace(SMALL, block=block)
    write_folder(folder, shape, 3, "mlx")
    model, found = converted(folder, dtype="ptq1_0"), arrays(folder)

    def theirs(name: str) -> np.ndarray:
        base = f"language_model.model.layers.0.{name}"
        words = found[f"{base}.weight"]
        codes = (words[..., None] >> np.arange(0, 32, 2, dtype=np.uint32) & 3).reshape(len(words), -1)
        numbers: np.ndarray = (codes.astype(np.float32) - 1) * found[f"{base}.scales"].astype(np.float32).repeat(128, 1)
        return numbers

    order = [0, 3, 1, 4, 2, 5]
    z, out = theirs("linear_attn.in_proj_z"), theirs("linear_attn.out_proj")
    np.testing.assert_array_equal(values(model, "blk.0.attn_gate"), z.reshape(6, 128, -1)[order].reshape(768, -1))
    tiled = out.reshape(len(out), 6, 128)[:, order].reshape(len(out), -1)
    np.testing.assert_array_equal(values(model, "blk.0.ssm_out"), out if block else tiled)
    norm = found["language_model.model.layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(values(model, "blk.0.attn_norm"), norm)
    conv = found["language_model.model.layers.0.linear_attn.conv1d.weight"][..., 0]
    np.testing.assert_array_equal(values(model, "blk.0.ssm_conv1d")[:512], conv[:512])
    hadamard = model.config.hadamard
    assert (hadamard is not None) == bool(block)
    if hadamard is not None:
        assert (hadamard.block, hadamard.embedding, hadamard.head, hadamard.v_grouped) == (256, True, True, True)
        signs = found["language_model.model.layers.0.linear_attn.out_proj.signs"]
        np.testing.assert_array_equal(hadamard.signs[768], signs)


def no_signs(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    del tensors["language_model.model.layers.1.mlp.up_proj.signs"]


def other_signs(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    tensors["language_model.model.layers.1.mlp.up_proj.signs"] = np.ones(256, np.float32)


def no_sign(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    tensors |= {name: array * np.float32(0.5) for name, array in tensors.items() if name.endswith(".signs")}


def one_module_less(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    del tensors[f"language_model.{config['modules'].pop(4)['path']}.signs"]


def two_blocks(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    config["modules"][4]["block"] = 128


def another(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    return lambda config, tensors: config.update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_signs, "there is no tensor of its signs"),
        (other_signs, "differs from those of another module"),
        (no_sign, "values other than 1 and -1"),
        (one_module_less, "lacks"),
        (two_blocks, r"blocks of \[128, 256\]"),
        (another("schema_version", 3), "schema_version"),
        (another("gdn_activation_layout", "tiled"), "gdn_activation_layout"),
        (another("modules", {}), "not a list of modules"),
        (another("modules", [{"path": 3, "block": 256}]), "without a path and a block"),
        (another("modules", []), "blocks of"),
    ],
)
def test_packs_that_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = tmp_path / "model"
    write_folder(folder, SMALL, 3, "mlx")
    config, tensors = json.loads((folder / "config.json").read_text()), arrays(folder)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, tensors)
    with pytest.raises(ModelFileError, match=message):
        converted(folder)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layer_types", ["linear_attention"] * 2, "all layers of one kind"),
        ("layer_types", ["linear_attention"] * 3, "2 of linear_attention or full_attention"),
        ("layer_types", ["linear_attention", "sliding_attention"], "2 of linear_attention or full_attention"),
        ("num_hidden_layers", 2**30, "the limit is 1024"),
        ("full_attention_interval", 0, "not a positive integer"),
        ("linear_num_key_heads", 4, "not a multiple of 4 key heads"),
        ("linear_value_head_dim", 2**20, "at most 1024"),
        ("linear_conv_kernel_dim", 65, "taps"),
        ("linear_num_value_heads", 2**20, "the limit is"),
        ("attn_output_gate", False, "false is not supported"),
        ("text_config", 7, "not an object"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    folder = tmp_path / "model"
    write_folder(folder, SMALL, 3, "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelFileError, match=message):
        converted(folder)


@pytest.mark.parametrize("encoding", [GGMLType.PQ2_0, GGMLType.PTQ1_0, GGMLType.Q2_0, GGMLType.TQ1_0, GGMLType.TQ2_0])
def test_encodings_of_files(tmp_path: Path, encoding: GGMLType) -> None:
    """From one encoding to another and back: every tensor and every key is as it was, bit for bit."""
    make_model(tmp_path / "a.gguf", replace(SMALL, encoding=encoding), seed=2)
    by_way_of = "pq2_0" if encoding is GGMLType.PTQ1_0 else "ptq1_0"
    if encoding in (GGMLType.Q2_0, GGMLType.TQ1_0, GGMLType.TQ2_0):  # groups of 64 and 256
        by_way_of = {GGMLType.Q2_0: "q2_0", GGMLType.TQ1_0: "tq2_0", GGMLType.TQ2_0: "tq1_0"}[encoding]
    convert_model(tmp_path / "a.gguf", tmp_path / "b.gguf", dtype=by_way_of)
    convert_model(tmp_path / "b.gguf", tmp_path / "c.gguf", dtype=encoding.name.lower())
    before, after = open_model(tmp_path / "a.gguf"), open_model(tmp_path / "c.gguf")
    assert before.gguf.tensors.keys() == after.gguf.tensors.keys()
    for name, tensor in before.gguf.tensors.items():
        same = after.gguf.tensors[name]
        assert (same.type, same.shape) == (tensor.type, tensor.shape)
        np.testing.assert_array_equal(after.gguf.data(same), before.gguf.data(tensor))
    for key, value in before.metadata.items():
        np.testing.assert_array_equal(after.metadata[key], value)
