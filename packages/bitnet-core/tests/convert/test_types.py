"""Conversion from each encoding of ternary weights to each that can hold them, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bitnet.core.cli import main
from bitnet.core.cli.convert import convert as command
from bitnet.core.errors import InvalidInputError, ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource, i2s_bytes, unpack_ternary, write_gguf
from bitnet.core.gguf.blocks import FORMATS, encode_blocks
from bitnet.core.gguf.quants import decode
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.hal import TernaryWeight
from bitnet.core.model import ModelFile, open_model
from bitnet.core.model.convert import TYPES, convert_model
from bitnet.core.model.recode import divided
from bombs.base import GGUF, Shape

SHAPE = Shape(hidden=256, ffn=512, heads=2, head_dim=128)
BLOCK_NAMES = [name for name in TYPES if name not in ("i2_s", "q1_0")]


class Model:
    """A model of random weights with one zero in each four that are 16 columns apart, and a scale for 256 columns."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng()
        self.path, self.gguf = path, GGUF(SHAPE)
        self.codes: dict[str, np.ndarray] = {}
        self.scales: dict[str, np.ndarray] = {}
        shapes = {f"blk.0.{name}": shape for name, shape in SHAPE.matrices().items()}
        for name, (n, k) in (shapes | {"token_embd": (SHAPE.vocab, SHAPE.hidden)}).items():
            fours = rng.choice(np.array([0, 2], np.uint8), (n, k // 64, 16, 4))
            np.put_along_axis(fours, rng.integers(0, 4, (n, k // 64, 16, 1)), 1, axis=3)
            self.codes[name] = fours.swapaxes(2, 3).reshape(n, k)
            self.scales[name] = rng.uniform(-2, 2, (n, k // 256)).astype(np.float16)
        self.codes["blk.0.attn_v"][3] = 1  # a row of zeros
        self.scales["blk.0.attn_v"][3] = 0

    def write(self, dtype: GGMLType) -> Path:
        for name, codes in self.codes.items():
            size = BLOCKS[dtype][0]
            scales = self.scales[name].repeat(256 // size, axis=1)
            data = encode_blocks(dtype, codes.reshape(-1, size), scales.reshape(-1))
            self.gguf.tensors[f"{name}.weight"] = TensorSource(codes.shape, dtype, data)
        write_gguf(self.path, self.gguf.metadata, self.gguf.tensors)
        return self.path

    def values(self, name: str) -> np.ndarray:
        signed = self.codes[name].view(np.int8) - np.int8(1)
        values: np.ndarray = signed * self.scales[name].astype(np.float32).repeat(256, 1)
        return values


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "in.gguf")


def converted(path: Path, **options: Any) -> ModelFile:
    target = path.with_name("out.gguf")
    convert_model(path, target, **options)
    return open_model(target)


def numbers(file: ModelFile, name: str) -> np.ndarray:
    """The weights in a tensor's bytes, and the scale beside it."""
    info = file.gguf.tensors[f"{name}.weight"]
    out = np.full(info.shape, np.nan, np.float32)
    decode(info.type, file.gguf.data(info), out)
    scale = file.gguf.tensors.get(f"{name}.scale")
    return out if scale is None else out * file.gguf.data(scale).view("<f4")


@pytest.mark.parametrize("target", BLOCK_NAMES)
@pytest.mark.parametrize("source", BLOCK_NAMES)
def test_scales_of_groups(model: Model, source: str, target: str) -> None:
    made = converted(model.write(TYPES[source]), dtype=target)
    assert made.quantization == target.upper()
    for name in model.codes:
        assert made.gguf.tensors[f"{name}.weight"].type is TYPES[target]
        np.testing.assert_array_equal(numbers(made, name), model.values(name))


@pytest.mark.parametrize("other", [name for name in BLOCK_NAMES if name != "stq1_0"])
def test_weights_without_zeros(model: Model, other: str) -> None:
    """Q1_0 holds 1 and -1 alone: it becomes any other encoding, and that becomes Q1_0 again."""
    for name, codes in model.codes.items():
        codes[codes == 1] = 2
        model.scales[name][:] = np.abs(model.scales[name])
    source = model.write(GGMLType.Q1_0)
    expected = {name: model.values(name) for name in model.codes}
    made = converted(source, dtype=other)
    back = source.with_name("back.gguf")
    convert_model(made.path, back, dtype="q1_0")
    for file in (made, open_model(back)):
        for name, values in expected.items():
            np.testing.assert_array_equal(numbers(file, name), values)


def test_zeros_do_not_become_q1_0(model: Model) -> None:
    with pytest.raises(ModelFileError, match="Q1_0 has no zeros"):
        converted(model.write(GGMLType.TQ2_0), dtype="q1_0")


@pytest.mark.parametrize("target", ["tq1_0", "tq2_0"])
@pytest.mark.parametrize("source", BLOCK_NAMES)
def test_the_gguf_package_reads_the_same(model: Model, source: str, target: str) -> None:
    made = converted(model.write(TYPES[source]), dtype=target)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made.path).tensors}
    for name in model.codes:
        tensor = tensors[f"{name}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(values.reshape(model.codes[name].shape), model.values(name))


def test_metadata_keep_their_types(model: Model) -> None:
    numbers = [np.float64(1e300), np.float64(0.1), np.float32("inf"), np.bool_(True), np.uint64(5), np.int64(-5)]
    numbers += [np.uint8(7), np.int8(-7), np.uint16(7), np.int16(-7), np.uint32(7), np.int32(7)]
    model.gguf.metadata |= {f"x.{i}": number for i, number in enumerate(numbers)} | {"general.alignment": np.uint32(64)}
    before = gguf.GGUFReader(model.write(GGMLType.TQ2_0))
    after = gguf.GGUFReader(converted(model.path, dtype="tq1_0").path)
    for key, field in before.fields.items():
        if not key.startswith("GGUF.") and key != "general.file_type":
            assert after.fields[key].types == field.types, key
            assert after.fields[key].contents() == field.contents(), key


@pytest.mark.parametrize("target", ["i2_s", *BLOCK_NAMES])
def test_one_scale(model: Model, target: str) -> None:
    """The blocks hold an f32 scale as nearly as f16 can, and a factor beside them makes it exact."""
    scales = {}
    for name, codes in list(model.codes.items()):
        if name != "token_embd":
            scales[name] = float(np.float32(np.random.default_rng().uniform(0.1, 2)))
            data = i2s_bytes(codes.view(np.int8) - np.int8(1), scales[name])
            model.gguf.tensors[f"{name}.weight"] = TensorSource(codes.shape, GGMLType.I2_S, data)
    write_gguf(model.path, model.gguf.metadata, model.gguf.tensors)
    made = converted(model.path, dtype=target)
    back = converted(made.path.rename(made.path.with_name("between.gguf")), dtype="i2_s")
    for file in (open_model(made.path.with_name("between.gguf")), back):
        for name, scale in scales.items():
            weight = file.weights[name]
            assert isinstance(weight, TernaryWeight)
            loaded = weight.load()
            if target != "i2_s" and file is not back:
                info = file.gguf.tensors[f"{name}.weight"]
                out = np.empty(info.shape, np.float32)
                decode(info.type, file.gguf.data(info), out)
                np.testing.assert_allclose(
                    abs(out).max(), scale, rtol=2**-10
                )  # as a reader of the blocks alone sees it
            np.testing.assert_array_equal(unpack_ternary(loaded.codes, weight.shape[1]) + 1, model.codes[name])
            assert loaded.scale == [np.float32(scale)]
    assert not any(name.endswith(".scale") for name in back.gguf.tensors)


def test_a_scale_is_divided_exactly() -> None:
    """Whatever float32 it is: the product of the two is that float32 again, rounded once."""
    bits = np.random.default_rng().integers(0, 2**32, 20_000, dtype=np.uint32)
    edges = [
        0.0,
        -0.0,
        1.0,
        2.0**-14,
        2.0**-15,
        65504.0,
        65505.0,
        1e30,
        2.0**-126,
        1e-45,
        np.nextafter(np.float32(2), 0),
    ]
    near = np.float32(2) ** np.random.default_rng().uniform(-16, 16, 20_000).astype(np.float32)
    scales = np.concatenate([bits.view(np.float32), np.array(edges, np.float32), near, -near])
    for scale in scales[np.isfinite(scales)]:
        half, factor = divided(scale)
        assert np.float32(half) * factor == scale
        assert half.dtype == np.float16
        assert factor.dtype == np.float32
        if 2**-14 <= abs(scale) <= 65504:
            assert 0.999 < factor <= 1


def test_the_encoding_for_those_who_name_none(model: Model) -> None:
    made = converted(model.write(GGMLType.TQ2_0))
    assert made.quantization == "Q2_0"
    assert made.metadata["general.file_type"] == 41


def write_groups(model: Model, dtype: GGMLType) -> np.ndarray:
    """Give each block of the model's ``ffn_down`` a random scale, and return these scales."""
    model.write(dtype)
    size, codes = BLOCKS[dtype][0], model.codes["blk.0.ffn_down"]
    scales = np.random.default_rng().uniform(0.5, 2, (len(codes), codes.shape[1] // size)).astype(np.float16)
    data = encode_blocks(dtype, codes.reshape(-1, size), scales.reshape(-1))
    model.gguf.tensors["blk.0.ffn_down.weight"] = TensorSource(codes.shape, dtype, data)
    write_gguf(model.path, model.gguf.metadata, model.gguf.tensors)
    return scales


@pytest.mark.parametrize(("source", "target"), [("q2_0", "q2_0_g128"), ("q2_0", "tq1_0"), ("ptq1_0", "tq2_0")])
def test_scales_that_wider_blocks_cannot_hold(model: Model, source: str, target: str) -> None:
    write_groups(model, TYPES[source])
    with pytest.raises(ModelFileError, match=r"has scales from .* in columns 0 to \d+ of row 0") as caught:
        converted(model.path, dtype=target)
    assert caught.value.field == "tensor 'blk.0.ffn_down.weight'"
    assert not model.path.with_name("out.gguf").exists()


@pytest.mark.parametrize(("source", "target"), [("q2_0_g128", "q2_0"), ("pq2_0", "q2_0"), ("ptq1_0", "pq2_0")])
def test_scales_that_narrower_blocks_repeat(model: Model, source: str, target: str) -> None:
    scales = write_groups(model, TYPES[source])
    made = converted(model.path, dtype=target)
    codes = model.codes["blk.0.ffn_down"].view(np.int8) - np.int8(1)
    np.testing.assert_array_equal(numbers(made, "blk.0.ffn_down"), codes * scales.repeat(128, 1).astype(np.float32))


def test_i2_s_has_one_scale(model: Model) -> None:
    with pytest.raises(ModelFileError, match=r"different scales.* I2_S holds one for the whole matrix. Use q2_0"):
        converted(model.write(GGMLType.Q2_0), dtype="i2_s")


def test_weights_that_are_not_sparse(model: Model) -> None:
    model.codes["blk.0.ffn_up"][7, 100] = 2 - model.codes["blk.0.ffn_up"][7, 100]
    model.codes["blk.0.ffn_up"][7, 4] = 1
    model.codes["blk.0.ffn_up"][7, 20] = 1
    with pytest.raises(ModelFileError, match="exactly one zero") as caught:
        converted(model.write(GGMLType.Q2_0), dtype="stq1_0")
    assert caught.value.field == "tensor 'blk.0.ffn_up.weight'"


def test_rows_that_are_no_whole_number_of_blocks(tmp_path: Path) -> None:
    path = GGUF(Shape(hidden=64, ffn=128)).write(tmp_path)
    for name in ("tq1_0", "q2_0_g128"):
        with pytest.raises(ModelFileError, match=f"rows of 64 weights; {name.upper()} needs a multiple of"):
            converted(path, dtype=name)
    assert converted(path, dtype="q2_0").quantization == "Q2_0"


def test_a_2_bit_table_that_is_not_ternary_stays(model: Model) -> None:
    model.codes["token_embd"][5, 9] = 3
    made = converted(model.write(GGMLType.Q2_0), dtype="pq2_0")
    assert made.gguf.tensors["token_embd.weight"].type is GGMLType.Q2_0
    np.testing.assert_array_equal(numbers(made, "token_embd"), model.values("token_embd"))
    with pytest.raises(InvalidInputError, match="one file cannot hold both"):
        converted(model.path, dtype="q2_0_g128")


def test_an_unknown_encoding(model: Model) -> None:
    with pytest.raises(InvalidInputError, match="dtype is 'q4_0'"):
        converted(model.path, dtype="q4_0")


def test_the_command(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    (option,) = [option for option in command.params if option.name == "dtype"]
    assert list(option.type.choices) == list(TYPES)  # type: ignore[attr-defined]
    assert {dtype.name.lower() for dtype in FORMATS} | {"i2_s"} == set(TYPES)
    target = model.path.with_name("out.gguf")
    assert main(["convert", "--outtype", "ptq1_0", str(model.write(GGMLType.TQ1_0)), str(target)]) == 0
    assert main(["inspect", str(target)]) == 0
    assert "PTQ1_0" in capsys.readouterr().out
