"""Folders that MLX has quantised to 2 bits or 1.

``mlx_2bit.safetensors`` was written by MLX 0.32.4 (``mx.save_safetensors``): random ternary codes in groups of 32, 64
and 128 columns, with scales of f32, f16 and bf16, and what ``mx.dequantize`` gives for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import unpack_ternary
from bitnet.core.gguf.types import GGMLType
from bitnet.core.hal import TernaryData, TernaryWeight
from bitnet.core.model import ModelFile, mlx, open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.model.hf_checkpoint import interleave
from bitnet.core.model.safetensors import open_checkpoint
from random_qwen35 import write_folder
from random_shapes import PRESETS, HybridShape

SAMPLES = Path(__file__).with_name("mlx_2bit.safetensors")
OURS = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
OURS |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
GROUP = 64


@pytest.mark.parametrize("name", ["g32", "g64", "g128"])
def test_what_mlx_wrote(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SAMPLES.read_bytes())
    tensors = open_checkpoint(tmp_path)
    words, scales, biases = (tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
    weight = mlx.ternary_matrix(words, scales, biases, 256)
    assert (weight.shape, weight.group) == ((4, 256), int(name[1:]))
    codes, scale = weight.load()
    values = unpack_ternary(codes, 256) * scale.astype(np.float32).repeat(int(name[1:]), 1)
    np.testing.assert_array_equal(values, tensors[f"{name}.values"].bytes().view("<f4").reshape(4, 256))


def packed(codes: np.ndarray, bits: int = 2) -> np.ndarray:
    """Sixteen codes in a word, or 32 of one bit, the first in its lowest bits."""
    fields = codes.astype(np.uint32).reshape(len(codes), -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    words: np.ndarray = np.bitwise_or.reduce(fields, axis=2)
    return words


@pytest.fixture
def bonsai(folder: Callable[..., Any]) -> Any:
    """A Llama-shaped folder in which MLX keeps every matrix in 2 bits, the embedding too."""
    source, rng = folder("LlamaForCausalLM"), np.random.default_rng()
    source.config["quantization"] = {"group_size": GROUP, "bits": 2}
    source.config["quantization_config"] = {"group_size": GROUP, "bits": 2}
    source.codes["model.embed_tokens"] = rng.integers(-1, 2, (source.size, 64), dtype=np.int8)
    source.units = {}
    for name, codes in source.codes.items():
        scales = rng.uniform(-2, 2, (len(codes), codes.shape[1] // GROUP)).astype(np.float16)
        source.units[name] = scales
        source.tensors |= {
            f"{name}.weight": packed(codes + 1),
            f"{name}.scales": scales,
            f"{name}.biases": -scales,
        }
    return source


@pytest.fixture
def binary(bonsai: Any) -> Any:
    """The same with codes of 1 bit, which stand for -1 and 1: the scale is twice what a weight of 1 is worth."""
    bonsai.config["quantization"] = {"group_size": GROUP, "bits": 1}
    for name, codes in bonsai.codes.items():
        codes[codes == 0] = 1
        bonsai.tensors[f"{name}.weight"] = packed(codes > 0, 1)
        bonsai.tensors[f"{name}.scales"] = 2 * bonsai.units[name]
        bonsai.tensors[f"{name}.biases"] = -bonsai.units[name]
    return bonsai


def converted(source: Any, **options: Any) -> ModelFile:
    convert_model(source.write(), source.path.parent / "out.gguf", **options)
    return open_model(source.path.parent / "out.gguf")


def check(source: Any, model: ModelFile) -> None:
    for name, codes in source.codes.items():
        scales, rows = source.units[name], codes
        if name == "model.embed_tokens":
            table = (codes * scales.repeat(GROUP, 1)).astype(np.float16)
            np.testing.assert_array_equal(model.weights["token_embd"].load(), table)
            continue
        layer, projection = name.split(".")[2], name.rpartition(".")[2]
        heads = {"q_proj": 4, "k_proj": 2}.get(projection)
        if heads is not None:
            rows, scales = interleave(codes, heads), interleave(scales, heads)
        data: Any = model.weights[f"blk.{layer}.{OURS[projection]}"].load()
        np.testing.assert_array_equal(unpack_ternary(data.codes, codes.shape[1]), rows)
        np.testing.assert_array_equal(data.scale, scales)


def test_a_folder(bonsai: Any) -> None:
    model = converted(bonsai)
    assert model.quantization == "Q2_0"
    assert model.metadata["general.file_type"] == 41
    assert model.gguf.tensors["token_embd.weight"].type is GGMLType.Q2_0
    check(bonsai, model)


def test_a_folder_of_one_bit(binary: Any) -> None:
    check(binary, converted(binary))


def test_a_hybrid_folder_of_one_bit_becomes_q1_0(tmp_path: Path) -> None:
    """In the blocks that a file of the same weights has: a bit a weight, and a scale for 128 columns."""
    shape = PRESETS["bonsai-27b-small"]
    assert isinstance(shape, HybridShape)
    write_folder(tmp_path / "folder", replace(shape, encoding=GGMLType.Q1_0), 0, "mlx")
    convert_model(tmp_path / "folder", tmp_path / "one.gguf", dtype="q1_0")
    convert_model(tmp_path / "folder", tmp_path / "two.gguf", dtype="pq2_0")
    one, two = open_model(tmp_path / "one.gguf"), open_model(tmp_path / "two.gguf")
    matrices = [name for name, weight in one.weights.items() if isinstance(weight, TernaryWeight)]
    assert {one.gguf.tensors[f"{name}.weight"].type for name in matrices} == {GGMLType.Q1_0}
    for name in matrices:
        here, there = one.weights[name].load(), two.weights[name].load()
        assert isinstance(here, TernaryData)
        assert isinstance(there, TernaryData)
        assert not (unpack_ternary(here.codes, one.weights[name].shape[1]) == 0).any()
        np.testing.assert_array_equal(here.codes, there.codes)
        np.testing.assert_array_equal(here.scale, there.scale)


@pytest.mark.parametrize("factor", [1, 3])
def test_one_bit_of_other_values_is_refused(binary: Any, tmp_path: Path, factor: int) -> None:
    """With a bias of minus the scale, weights would be -1 and 0; with one of minus a third, -1 and 2."""
    binary.tensors[f"{UP}.scales"][4] = factor * binary.units[UP][4]
    with pytest.raises(ModelFileError, match="bias of columns 0 to 63 of row 4"):
        convert_model(binary.write(), tmp_path / "out.gguf")


def test_one_scale_for_all_fits_into_i2_s(bonsai: Any) -> None:
    for name, scales in bonsai.units.items():
        if name != "model.embed_tokens":
            scales[:] = 0.75
            bonsai.tensors[f"{name}.biases"] = -scales
    model = converted(bonsai, dtype="i2_s")
    assert model.quantization == "I2_S"
    assert model.gguf.tensors["token_embd.weight"].type is GGMLType.Q2_0
    for name in bonsai.units.keys() - {"model.embed_tokens"}:
        layer, projection = name.split(".")[2], name.rpartition(".")[2]
        data: Any = model.weights[f"blk.{layer}.{OURS[projection]}"].load()
        assert data.scale == [0.75]


def test_groups_of_zeros(bonsai: Any) -> None:
    """MLX gives a group of zeros a tiny scale, the bias 0, and code 0 for every weight."""
    name = "model.layers.1.mlp.up_proj"
    bonsai.codes[name][5] = 0
    bonsai.units[name][5] = 1e-6
    codes = bonsai.codes[name] + 1
    codes[5] = 0
    bonsai.tensors[f"{name}.weight"] = packed(codes)
    bonsai.tensors[f"{name}.biases"] = np.where(np.arange(len(codes))[:, None] == 5, np.float16(0), -bonsai.units[name])
    check(bonsai, converted(bonsai))


UP = "model.layers.1.mlp.up_proj"


def change(name: str, at: tuple[int, ...], value: Any) -> Callable[[Any], None]:
    def apply(source: Any) -> None:
        source.tensors[name][at] = value

    return apply


def put(name: str, value: Any) -> Callable[[Any], None]:
    def apply(source: Any) -> None:
        source.tensors[name] = value(source.tensors[name])

    return apply


@pytest.mark.parametrize(
    ("spoil", "tensor", "message"),
    [
        (change(f"{UP}.weight", (7, 2), 3 << 10), f"{UP}.weight", "column 37 of row 7 has the code 3"),
        (change(f"{UP}.biases", (9, 0), 0.5), f"{UP}.weight", "bias of columns 0 to 63 of row 9 is 0.5"),
        (change(f"{UP}.biases", (9, 0), 0), f"{UP}.weight", "bias of columns 0 to 63 of row 9 is 0"),
        (change(f"{UP}.scales", (3, 0), np.nan), f"{UP}.scales", "not finite"),
        (change(f"{UP}.biases", (3, 0), np.inf), f"{UP}.biases", "not finite"),
        (put(f"{UP}.weight", lambda a: np.tile(a, 2)), f"{UP}.weight", "4 bits a weight"),
        (put(f"{UP}.weight", lambda a: a[:, :, None]), f"{UP}.weight", "no matrix"),
        (put(f"{UP}.weight", lambda a: a[:-1]), f"{UP}.scales", "has the shape (128, 1)"),
        (put(f"{UP}.scales", lambda a: np.tile(a, 3)), f"{UP}.scales", "has the shape (128, 3)"),
        (put(f"{UP}.scales", lambda a: a[:, :0]), f"{UP}.scales", "has the shape (128, 0)"),
        (put(f"{UP}.biases", lambda a: a[:-1]), f"{UP}.biases", "(127, 1) beside scales"),
        (put(f"{UP}.scales", lambda a: a.view(np.uint8)[:, :1]), f"{UP}.biases", "beside scales of U8"),
        (put("model.norm.weight", lambda a: np.zeros(4, np.uint32)), "model.norm.weight", "it must be F32"),
    ],
)
def test_what_is_not_ternary_is_refused(
    bonsai: Any, tmp_path: Path, spoil: Callable[[Any], None], tensor: str, message: str
) -> None:
    spoil(bonsai)
    with pytest.raises(ModelFileError) as caught:
        convert_model(bonsai.write(), tmp_path / "out.gguf")
    assert message in str(caught.value)
    assert caught.value.field == f"tensor {tensor!r}"
    assert caught.value.offset
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.filterwarnings("error")  # numpy's would stand before the error
@pytest.mark.parametrize("scale", [0.1, 70000.0])
def test_scales_that_float16_does_not_hold(bonsai: Any, tmp_path: Path, scale: float) -> None:
    for part in ("scales", "biases"):
        bonsai.tensors[f"{UP}.{part}"] = bonsai.tensors[f"{UP}.{part}"].astype(np.float32)
        bonsai.tensors[f"{UP}.{part}"][4, 0] = scale if part == "scales" else -scale
    with pytest.raises(
        ModelFileError, match=rf"float16 cannot represent the scale {scale}.* of columns 0 to 63 of row 4"
    ):
        convert_model(bonsai.write(), tmp_path / "out.gguf")


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_a_missing_part(bonsai: Any, tmp_path: Path, part: str) -> None:
    del bonsai.tensors[f"{UP}.{part}"]
    with pytest.raises(ModelFileError, match="no matching scales and biases"):
        convert_model(bonsai.write(), tmp_path / "out.gguf")


@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": True}, {"bits": 2, "mode": "mxfp4"}, {"bits": "2"}])
def test_other_quantisations(bonsai: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    bonsai.config["quantization"] = {"group_size": 64} | settings
    with pytest.raises(ModelFileError, match="2 bits and affine"):
        convert_model(bonsai.write(), tmp_path / "out.gguf")
