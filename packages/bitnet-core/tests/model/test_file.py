"""Opening models: every encoding of the weights, and files whose tensors do not fit."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.errors import InvalidInputError, ModelFileError
from bitnet.core.gguf import GGMLType, GGUFFile, TensorSource, i2s_bytes, unpack_ternary, write_gguf
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.hal import BLOCK_TABLES, BlockWeight, DenseWeight, TernaryWeight
from bitnet.core.model.file import open_model
from bitnet.core.model.memory import weight_bytes
from bitnet.core.model.weights import bind_weights, expected_weights
from bitnet.core.support import mapped
from bitnet.core.support import source as byte_source
from bitnet.core.support.guard import GuardedMap
from bitnet.core.testing.block_tables import floats
from bombs.base import GGUF, Shape

Make = Callable[..., Any]


def encoded(values: np.ndarray, dtype: GGMLType) -> TensorSource:
    data = gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType(dtype))
    return TensorSource(values.shape, dtype, data)


def test_weights_of_the_official_kind(tiny: Make) -> None:
    model = tiny()
    file = model.open()
    assert file.quantization == "I2_S"
    assert file.size == model.path.stat().st_size
    assert file.sha256() == hashlib.sha256(model.path.read_bytes()).hexdigest()
    assert file.metadata["general.architecture"] == "bitnet-b1.58"
    assert file.weights["output"] is file.weights["token_embd"]
    assert len(file.weights) == 2 * 11 + 3
    for name, weight in file.weights.items():
        data = weight.load()
        if isinstance(weight, TernaryWeight):
            np.testing.assert_array_equal(unpack_ternary(data.codes, weight.shape[1]), model.codes[name])
            assert data.codes.base is not None
            assert not data.codes.flags.writeable
            assert data.scale == model.scales[name]
        else:
            source = model.tensors[f"{name.replace('output', 'token_embd') if name == 'output' else name}.weight"]
            assert data.dtype == source.dtype
            assert weight.dtype == ("f16" if source.ndim == 2 else "f32")
            np.testing.assert_array_equal(data, source)
        weight.release()


@pytest.mark.skipif(os.name == "nt", reason="Windows does not let a file that is mapped be replaced")
def test_the_hash_is_of_what_was_opened(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what has its name by now: a receipt would name a model that computed nothing."""
    monkeypatch.setattr(byte_source, "PIECE", 1 << 16)
    model = tiny()
    file, content = model.open(), model.path.read_bytes()
    other = model.path.with_name("other")
    other.write_bytes(content[::-1])
    other.replace(model.path)
    assert len(content) > 2 * byte_source.PIECE
    assert file.sha256() == hashlib.sha256(content).hexdigest()
    model.path.unlink()
    assert file.sha256() == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("dtype", [GGMLType.TQ1_0, GGMLType.TQ2_0])
def test_llama_cpps_ternary_types(tiny: Make, dtype: GGMLType) -> None:
    model = tiny("bitnet")
    name = "blk.1.ffn_down"  # the one with rows of 256 weights
    model.tensors[f"{name}.weight"] = encoded(model.codes[name] * np.float32(model.scales[name]), dtype)
    data = model.open().weights[name].load()
    np.testing.assert_array_equal(unpack_ternary(data.codes, 256), model.codes[name])
    assert data.scale == model.scales[name]


@pytest.mark.parametrize("dtype", [GGMLType.F32, GGMLType.F16, GGMLType.BF16])
def test_float_masters(tiny: Make, dtype: GGMLType) -> None:
    masters = np.random.default_rng().normal(0, 0.1, (128, 128)).astype(np.float32)
    model = tiny()
    model.tensors["blk.0.attn_q.weight"] = encoded(masters, dtype)
    data = model.open().weights["blk.0.attn_q"].load()
    assert data.scale == pytest.approx(np.abs(masters).mean(), rel=1e-3)
    wrong = unpack_ternary(data.codes, 128) != np.clip(np.rint(masters / data.scale), -1, 1)
    assert wrong.mean() < 0.01  # rounding of the masters themselves moves a few

    llama = tiny("llama")
    llama.tensors["blk.0.attn_q.weight"] = encoded(masters, dtype)
    with pytest.raises(ModelFileError, match="not ternary") as caught:
        llama.open().weights["blk.0.attn_q"].load()
    assert caught.value.field == "tensor 'blk.0.attn_q.weight'"
    llama.tensors["blk.0.attn_q.weight"] = encoded(llama.codes["blk.0.attn_q"] * np.float32(0.5), dtype)
    data = llama.open().weights["blk.0.attn_q"].load()
    np.testing.assert_array_equal(unpack_ternary(data.codes, 128), llama.codes["blk.0.attn_q"])
    assert data.scale == 0.5


def test_a_scale_of_its_own(tiny: Make) -> None:
    model = tiny("bitnet")
    model.tensors["blk.0.ffn_up.scale"] = np.array([0.25], np.float32)
    data = model.open().weights["blk.0.ffn_up"].load()
    assert data.scale == model.scales["blk.0.ffn_up"] * 0.25
    for wrong in (np.array([1, 2], np.float32), np.array([1], np.float16), np.array([np.nan], np.float32)):
        model.tensors["blk.0.ffn_up.scale"] = wrong
        with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.scale"):
            model.open()


@pytest.mark.parametrize("layout", ["arm", "columns"])
def test_other_layouts(tiny: Make, layout: str) -> None:
    model = tiny()
    codes = (model.codes["blk.0.attn_q"] + 1).astype(np.uint8)
    quarters = codes.reshape(-1, 4, 16) if layout == "arm" else codes.reshape(-1, 4, 128)
    packed = quarters[:, 0] << 6 | quarters[:, 1] << 4 | quarters[:, 2] << 2 | quarters[:, 3]
    tail = i2s_bytes(model.codes["blk.0.attn_q"], 0.5)[-32:]
    model.tensors["blk.0.attn_q.weight"] = TensorSource(
        (128, 128), GGMLType.I2_S, np.concatenate([packed.reshape(-1), tail])
    )
    data = model.open(i2s_layout=layout).weights["blk.0.attn_q"].load()
    np.testing.assert_array_equal(unpack_ternary(data.codes, 128), model.codes["blk.0.attn_q"])
    assert data.scale == 0.5
    with pytest.raises(InvalidInputError, match="official, arm, columns"):
        model.open(i2s_layout="other")


@pytest.mark.parametrize("dtype", [GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0])
def test_embeddings_become_f16(tiny: Make, dtype: GGMLType) -> None:
    model = tiny()
    table = model.tensors["token_embd.weight"]
    source = encoded(table, dtype)
    model.tensors["token_embd.weight"] = source
    weight = model.open().weights["token_embd"]
    assert isinstance(weight, DenseWeight)
    assert weight.dtype == "f16"
    assert isinstance(source.data, np.ndarray)
    expected = gguf.quants.dequantize(source.data, gguf.GGMLQuantizationType(dtype)).astype(np.float16)
    np.testing.assert_array_equal(weight.load(), expected)


@pytest.mark.parametrize("name", ["Q6_K", "Q4_K", "Q8_0", "Q4_0", "BF16", "TQ1_0", "TQ2_0"])
def test_what_the_rounding_of_embeddings_costs(tmp_path: Path, name: str) -> None:
    """Each value is within 2⁻¹¹ of itself, or 2⁻²⁵ where f16 is subnormal, of what the bytes stand for in float64."""
    rng = np.random.default_rng()
    dtype, theirs = GGMLType[name], gguf.GGMLQuantizationType[name]
    elements, size = BLOCKS[dtype]
    model = GGUF(Shape(hidden=256, vocab=300))
    blocks = rng.integers(0, 256, (300 * 256 // elements, size), dtype=np.uint8)
    for at in {"Q6_K": (208,), "Q4_K": (0, 2), "Q8_0": (0,), "Q4_0": (0,), "TQ1_0": (52,), "TQ2_0": (64,)}.get(
        name, ()
    ):
        scale = (10.0 ** rng.uniform(-4, -1, (len(blocks), 1))).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8)
    if name == "BF16":
        values = rng.normal(0, 10.0 ** rng.uniform(-6, 1, (300, 1)), (300, 256)).astype(np.float32)
        blocks = gguf.quants.quantize(values, theirs).reshape(-1, 2)
    model.tensors["token_embd.weight"] = TensorSource((300, 256), dtype, blocks)
    weight = open_model(model.write(tmp_path)).weights["token_embd"]
    assert isinstance(weight, DenseWeight)
    exact = gguf.quants.dequantize(blocks, theirs).reshape(300, 256).astype(np.float64)
    error = np.abs(weight.load().astype(np.float64) - exact)
    assert (error <= np.abs(exact) * 2.0**-11 + 2.0**-25).all()
    assert np.median(error / np.maximum(np.abs(exact), 1e-12)) < 2.0**-12
    # In F32 the same table is exact, which is the way out for whoever needs it.
    model.tensors["token_embd.weight"] = exact.astype(np.float32)
    weight = open_model(model.write(tmp_path)).weights["token_embd"]
    np.testing.assert_array_equal(weight.load(), exact)


BLOCKY = {"Q8_0": (0,), "Q4_0": (0,), "Q6_K": (208,), "Q4_K": (0, 2)}
"""Types that stay in their blocks, and where these have f16 numbers."""


def in_blocks(name: str, rng: np.random.Generator) -> TensorSource:
    """A table of 300 rows of random blocks."""
    elements, size = BLOCKS[GGMLType[name]]
    blocks = rng.integers(0, 256, (300 * 256 // elements, size), dtype=np.uint8)
    for at in BLOCKY[name]:
        blocks[:, at : at + 2] = (10.0 ** rng.uniform(-4, -2, (len(blocks), 1))).astype("<f2").view(np.uint8)
    return TensorSource((300, 256), GGMLType[name], blocks)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", BLOCKY)
def test_tables_stay_in_their_blocks_where_a_device_takes_them(tmp_path: Path, name: str, tied: bool) -> None:
    """As the file has them, and a CPU computes what it does with the gguf package's values in F32."""
    rng, theirs = np.random.default_rng(), gguf.GGMLQuantizationType[name]
    packed, plain = GGUF(Shape(hidden=256, vocab=300)), {}
    for table in ("token_embd.weight", *([] if tied else ["output.weight"])):
        source = packed.tensors[table] = in_blocks(name, rng)
        assert isinstance(source.data, np.ndarray)
        plain[table] = gguf.quants.dequantize(source.data, theirs).reshape(300, 256)
    path = packed.write(tmp_path)
    weights = open_model(path).weights_for((BLOCK_TABLES,))
    assert (weights["output"] is weights["token_embd"]) == tied
    for table, values in plain.items():
        weight = weights[table.removesuffix(".weight")]
        assert isinstance(weight, BlockWeight)
        assert weight.dtype == name.lower()
        np.testing.assert_array_equal(floats(weight.load(), 256, weight.dtype), values)
    assert weight_bytes(weights) < weight_bytes(open_model(path).weights)
    (tmp_path / "f32").mkdir()
    packed.tensors |= plain
    tokens, scores = rng.integers(0, 300, 40).tolist(), []
    for file in (path, packed.write(tmp_path / "f32")):
        with load_model(file, device="cpu") as model:
            scores.append(model.score(tokens))
    np.testing.assert_array_equal(scores[0], scores[1])


@pytest.mark.parametrize("name", BLOCKY)
def test_a_scale_that_is_not_finite_is_found_when_a_table_is_loaded(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng()
    model = GGUF(Shape(hidden=256, vocab=300))
    source = model.tensors["token_embd.weight"] = in_blocks(name, rng)
    assert isinstance(source.data, np.ndarray)
    block, at = rng.integers(len(source.data)), rng.choice(BLOCKY[name])
    source.data[block, at : at + 2] = np.array([rng.choice([np.nan, np.inf, -np.inf])], "<f2").view(np.uint8)
    for weights in ((file := open_model(model.write(tmp_path))).weights, file.weights_for((BLOCK_TABLES,))):
        with pytest.raises(ModelFileError, match=r"token_embd\.weight.*not finite"):
            weights["token_embd"].load()


def test_f32_embeddings_and_f16_norms(tiny: Make) -> None:
    model = tiny()
    table = model.tensors["token_embd.weight"].astype(np.float32) / 3
    norm = model.tensors["output_norm.weight"].astype(np.float16)
    model.tensors |= {"token_embd.weight": table, "output_norm.weight": norm}
    weights = model.open().weights
    np.testing.assert_array_equal(weights["token_embd"].load(), table)
    np.testing.assert_array_equal(weights["output_norm"].load(), norm.astype(np.float32))
    assert weights["output_norm"].dtype == "f32"


def test_values_too_large_for_f16(tiny: Make) -> None:
    model = tiny()
    table = model.tensors["token_embd.weight"].astype(np.float32)
    table[7, 7] = 1e6
    model.tensors["token_embd.weight"] = encoded(table, GGMLType.BF16)
    with pytest.raises(ModelFileError, match=r"token_embd\.weight.*too large for float16"):
        model.open().weights["token_embd"].load()


def test_untied_head(tiny: Make) -> None:
    model = tiny()
    model.tensors["output.weight"] = model.tensors["token_embd.weight"] * np.float16(2)
    weights = model.open().weights
    assert weights["output"] is not weights["token_embd"]
    np.testing.assert_array_equal(weights["output"].load(), model.tensors["output.weight"])


def test_every_weight_is_needed(tiny: Make) -> None:
    for name in list(tiny().tensors):
        model = tiny()
        del model.tensors[name]
        with pytest.raises(ModelFileError, match=r"is missing|not part of the architecture") as caught:
            model.open()
        # without the first sub-norm a model counts as one without, and the other ones are what does not belong
        assert caught.value.field == f"tensor {name!r}" or "sub_norm" in name


def test_every_shape_is_checked(tiny: Make) -> None:
    for name in list(tiny().tensors):
        model = tiny()
        shape = (3, 128) if name.startswith("blk") else (128, 3)
        model.tensors[name] = np.ones(shape, np.float32)
        with pytest.raises(ModelFileError, match="has the shape") as caught:
            model.open()
        assert caught.value.field == f"tensor {name!r}"
        entry = GGUFFile(model.path).tensors[name].entry
        assert caught.value.offset == entry
        assert model.path.read_bytes()[entry + 8 :].startswith(name.encode())


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("blk.0.attn_q.weight", GGMLType.Q8_0, "Q8_0 holds no ternary weights"),
        ("token_embd.weight", GGMLType.I8, "I8 cannot be read as numbers"),
    ],
)
def test_types_that_do_not_fit(tiny: Make, name: str, dtype: GGMLType, message: str) -> None:
    model = tiny()
    shape = (128, 128) if "attn" in name else (300, 128)
    size = 128 * 136 if dtype is GGMLType.Q8_0 else 300 * 128
    model.tensors[name] = TensorSource(shape, dtype, np.zeros(size, np.uint8))
    with pytest.raises(ModelFileError, match=message) as caught:
        model.open()
    assert caught.value.offset is not None


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight", "blk.2.attn_q.weight", "x"])
def test_tensors_that_do_not_belong(tiny: Make, name: str) -> None:
    model = tiny()
    model.tensors[name] = np.ones(128, np.float32)
    with pytest.raises(ModelFileError, match="not part of the architecture") as caught:
        model.open()
    assert caught.value.field == f"tensor {name!r}"
    assert caught.value.offset is not None


def test_a_great_number_of_layers_fails_at_once(tiny: Make) -> None:
    model = tiny()
    model.metadata[model.key("block_count")] = 2**31 - 1
    with pytest.raises(ModelFileError, match=r"blk\.2\.attn_norm\.weight.*is missing"):
        model.open()


def test_a_broken_scale_names_the_tensor(tiny: Make) -> None:
    model = tiny()
    model.scales["blk.1.attn_k"] = float("inf")
    model.i2s("blk.1.attn_k")
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_k\.weight.*scale is inf"):
        model.open().weights["blk.1.attn_k"].load()


def test_the_list_of_weights_is_the_model(tiny: Make) -> None:
    file = tiny().open()
    names = [name for name, _ in expected_weights(file.config)]
    assert {f"{name}.weight" for name in names} == set(file.gguf.tensors)
    assert set(bind_weights(file.gguf, file.config, "official")) == {*names, "output"}


def test_a_file_that_cannot_be_mapped_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Pyodide, where the files of a browser can be read but not mapped."""

    class Unmapped(GuardedMap):
        def __new__(cls, handle: int, *given: Any, **options: Any) -> Unmapped:
            if handle != -1:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            return super().__new__(cls, handle, *given, **options)

    content = os.urandom(10_000 + os.urandom(1)[0])
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(mapped, "GuardedMap", Unmapped)
    monkeypatch.setattr(mapped, "PIECE", 4096)
    file = mapped.MappedFile(tmp_path / "a")
    assert file.sha256() == hashlib.sha256(content).hexdigest()
    assert bytes(file.bytes(0, file.size)) == content  # still, after every piece has been released
    (tmp_path / "a").write_bytes(content[:-1])
    with pytest.raises(ModelFileError, match="cut short"):
        file.check()

    pieces = [b"", b"some"]
    monkeypatch.setattr(os, "read", lambda handle, size: pieces.pop())
    with pytest.raises(ModelFileError, match="cut short while it was read"):
        mapped.MappedFile(tmp_path / "a")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_weights_take_no_memory(tmp_path: Path) -> None:
    """A file of 64 MB is read tensor by tensor, while the process stays small."""
    weights = np.zeros((16384, 512), np.int8)
    tensors = {f"t{i}": TensorSource(weights.shape, GGMLType.I2_S, i2s_bytes(weights, 1.0)) for i in range(32)}
    write_gguf(tmp_path / "a", {}, tensors)
    program = """
import sys
from bitnet.core.gguf import GGUFFile
def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1])
file = GGUFFile(sys.argv[1])
before, most = resident(), 0
for tensor in file.tensors.values():
    file.data(tensor).sum()
    most = max(most, resident())
    file.release(tensor)
print(most - before, resident() - before)
"""
    output = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a"], capture_output=True, text=True, check=True
    ).stdout
    most, after = map(int, output.split())
    assert most < 8 * 1024
    assert after < 4 * 1024
