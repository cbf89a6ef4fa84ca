"""A model file of Ternary-Bonsai's kind: Qwen3's shape, and a scale for each group of columns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import BitNetError, load_model
from bitnet.core.cli import main
from bitnet.core.engine import setup
from bitnet.core.errors import ModelFileError, UnsupportedProgramError
from bitnet.core.gguf import GGMLType, GGUFFile, TensorSource, unpack_ternary
from bitnet.core.hal import TERNARY_TABLES, DenseWeight, TernaryWeight
from bitnet.core.model.convert import convert_model
from bitnet.core.model.file import ModelFile

GROUP = {GGMLType.Q2_0: 64, GGMLType.Q2_0_G128: 128}


def q2_0(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bytes of a Q2_0 tensor of ``codes[N, K]`` in {0, 1, 2} and ``scales[N, groups]``."""
    blocks = codes.reshape(scales.size, -1, 4).astype(np.uint8)
    packed = blocks[..., 0] | blocks[..., 1] << 2 | blocks[..., 2] << 4 | blocks[..., 3] << 6
    return np.concatenate([scales.reshape(-1, 1).astype("<f2").view(np.uint8), packed], axis=1).reshape(-1)


@pytest.fixture(params=GROUP, ids=["g64", "g128"])
def bonsai(request: pytest.FixtureRequest, tiny: Callable[..., Any]) -> Any:
    """The small model with Q2_0 throughout, embedding included; its scales by tensor."""
    dtype, model, rng = request.param, tiny("qwen3"), np.random.default_rng()
    model.units = {}

    def store(name: str, codes: np.ndarray) -> None:
        n, k = codes.shape
        scales = (rng.uniform(0.5, 2, (n, k // GROUP[dtype])) / k**0.5).astype(np.float16)
        model.units[name] = scales
        model.tensors[f"{name}.weight"] = TensorSource(codes.shape, dtype, q2_0(codes + 1, scales))

    for name, codes in model.codes.items():
        store(name, codes)
    model.embedding = rng.integers(-1, 2, model.tensors["token_embd.weight"].shape, dtype=np.int8)
    store("token_embd", model.embedding)
    for layer in range(2):
        for name in ("attn_sub_norm", "ffn_sub_norm"):
            del model.tensors[f"blk.{layer}.{name}.weight"]
        for name in ("attn_q_norm", "attn_k_norm"):
            model.tensors[f"blk.{layer}.{name}.weight"] = rng.uniform(0.5, 2, 32).astype(np.float32)
    model.metadata["tokenizer.ggml.pre"] = "qwen2"
    return model


def test_weights_are_the_files(bonsai: Any) -> None:
    file = bonsai.open()
    assert (file.config.head_norms, file.config.activation, file.config.rope_style) == (True, "silu", "neox")
    for name, codes in bonsai.codes.items():
        weight = file.weights[name]
        assert isinstance(weight, TernaryWeight)
        data = weight.load()
        np.testing.assert_array_equal(unpack_ternary(data.codes, codes.shape[1]), codes)
        np.testing.assert_array_equal(data.scale, bonsai.units[name])
    table, units = file.weights["token_embd"].load(), bonsai.units["token_embd"]
    np.testing.assert_array_equal(table, bonsai.embedding * units.repeat(128 // units.shape[1], 1))


def test_devices_agree(bonsai: Any) -> None:
    """Log-probabilities of a text: a code on a rounding border moves them a little, a wrong scale by ones."""
    path, scores = bonsai.write(), []
    tokens = np.random.default_rng().integers(0, 256, 60).tolist()
    for device in ("cpu", "cpu:numpy"):
        with load_model(path, device=device) as model:
            scores.append(model.score(tokens))
    assert scores[0].std() > 0.5
    np.testing.assert_allclose(scores[0], scores[1], atol=0.25)
    assert np.median(abs(scores[0] - scores[1])) < 0.02


def untie(model: Any) -> None:
    """Give the model a head of its own, of the embedding's type."""
    dtype, rng = model.tensors["token_embd.weight"].type, np.random.default_rng()
    model.head = rng.integers(-1, 2, model.embedding.shape, dtype=np.int8)
    scales = rng.uniform(0.05, 0.2, (len(model.head), model.head.shape[1] // GROUP[dtype])).astype(np.float16)
    model.units["output"] = scales
    model.tensors["output.weight"] = TensorSource(model.head.shape, dtype, q2_0(model.head + 1, scales))


@pytest.mark.parametrize("tied", [True, False])
def test_tables_stay_ternary_where_a_device_takes_them(bonsai: Any, tied: bool) -> None:
    if not tied:
        untie(bonsai)
    file = bonsai.open()
    assert isinstance(file.weights_for(())["token_embd"], DenseWeight)
    weights = file.weights_for((TERNARY_TABLES,))
    assert (weights["output"] is weights["token_embd"]) == tied
    for name, codes in {"token_embd": bonsai.embedding, "output": bonsai.embedding if tied else bonsai.head}.items():
        data = weights[name].load()
        np.testing.assert_array_equal(unpack_ternary(data.codes, codes.shape[1]), codes)
        np.testing.assert_array_equal(data.scale, bonsai.units["token_embd" if tied else name])


def test_a_tables_rows_can_be_looked_up_in_the_file(bonsai: Any) -> None:
    table = bonsai.open().weights_for((TERNARY_TABLES,))["token_embd"].blocks()
    raw = bonsai.tensors["token_embd.weight"].data.reshape(len(bonsai.embedding), -1)
    np.testing.assert_array_equal(table.data, raw)
    blocks = raw.reshape(-1, 2 + len(table.place) // 4)
    digits = (blocks[:, table.place] * table.factor).astype(np.int32) * table.base >> 8
    np.testing.assert_array_equal(digits.reshape(len(raw), -1) - 1, bonsai.embedding)
    scales = np.ascontiguousarray(blocks[:, table.scale_at :][:, :2]).view("<f2")
    np.testing.assert_array_equal(scales.reshape(len(raw), -1), bonsai.units["token_embd"])


def test_a_scale_that_is_not_finite_is_found_before_rows_are_looked_up(bonsai: Any) -> None:
    rng, units = np.random.default_rng(), bonsai.units["token_embd"]
    units[rng.integers(len(units)), rng.integers(units.shape[1])] = rng.choice([np.nan, np.inf, -np.inf])
    tensor = bonsai.tensors["token_embd.weight"]
    data = q2_0(bonsai.embedding + 1, units)
    bonsai.tensors["token_embd.weight"] = TensorSource(tensor.shape, tensor.type, data)
    weight = bonsai.open().weights_for((TERNARY_TABLES,))["token_embd"]
    with pytest.raises(ModelFileError, match=r"token_embd\.weight.*not finite"):
        weight.blocks()


def test_a_table_with_codes_of_3_is_not_ternary(bonsai: Any) -> None:
    """Another quantiser's 2 bits: 3 stands for 2, and the table is dense as before, whatever the device."""
    untie(bonsai)
    bonsai.embedding[7, 9], tensor = 2, bonsai.tensors["token_embd.weight"]
    bonsai.tensors["token_embd.weight"] = TensorSource(
        tensor.shape, tensor.type, q2_0(bonsai.embedding + 1, bonsai.units["token_embd"])
    )
    weights = bonsai.open().weights_for((TERNARY_TABLES,))
    assert isinstance(weights["token_embd"], DenseWeight)
    assert isinstance(weights["output"], TernaryWeight)
    assert weights["token_embd"].load()[7, 9] == 2 * bonsai.units["token_embd"][7, 0]


@pytest.mark.parametrize("tied", [True, False])
def test_ternary_tables_give_what_dense_ones_do(bonsai: Any, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """The same layers on the same device: scores of a text, from fewer bytes."""
    if not tied:
        untie(bonsai)
    path, tokens = bonsai.write(), np.random.default_rng().integers(0, 256, 60).tolist()
    found = []
    for dense in (False, True):
        if dense:
            monkeypatch.setattr(ModelFile, "weights_for", lambda self, features: self.weights)
        with load_model(path, device="cpu") as model:
            model.generate("abc", max_tokens=2, ignore_eos=True)
            found.append(
                (model.score(tokens), model.stats().weight_bytes, {k.partition("_")[0] for k in model.kernels})
            )
    (scores, size, kernels), (dense_scores, dense_size, dense_kernels) = found
    np.testing.assert_allclose(scores, dense_scores, atol=1e-4)
    assert size < dense_size
    assert ("table" in kernels, "table" in dense_kernels) == (True, False)


def test_the_cpu_stands_in_for_a_gpu_that_nobody_asked_for(
    bonsai: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = []

    def refuse(file: Any, device: Any, **options: Any) -> Any:
        opened.append(device.info.name)
        if len(opened) == 1:
            raise UnsupportedProgramError("it cannot.", device=device.info.name)
        return original(file, device, **options)

    original = setup.open_engine
    monkeypatch.setattr("bitnet.core.loading.open_engine", refuse)
    path = bonsai.write()
    with caplog.at_level(logging.WARNING), load_model(path) as model:
        assert model.device.backend == "cpu"
    assert "The CPU runs it." in caplog.text
    opened.clear()
    with pytest.raises(UnsupportedProgramError):
        load_model(path, device="cpu")


def test_inspect_tells(bonsai: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bonsai.write())]) == 0
    said = capsys.readouterr().out
    group = bonsai.tensors["blk.0.attn_q.weight"].type
    assert "norms of heads" in said
    assert f"median of groups of {GROUP[group]}" in said
    assert f"ternary: 15 {group.name} (a scale for each {GROUP[group]} columns)" in said


def test_what_has_one_scale_cannot_hold_it(bonsai: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="I2_S holds one for the whole matrix"):
        convert_model(bonsai.write(), tmp_path / "out.gguf", dtype="i2_s")
    assert not (tmp_path / "out.gguf").exists()


def test_a_scale_tensor_beside_scales_of_blocks(bonsai: Any) -> None:
    bonsai.tensors["blk.1.attn_q.scale"] = np.array([2], np.float32)
    with pytest.raises(BitNetError, match="the blocks have scales of their own"):
        bonsai.open()


@pytest.mark.parametrize("shape", [lambda n, k: (n * k,), lambda n, k: (2 * k,), lambda n, k: (1, n, k)])
def test_a_first_projection_of_another_shape_is_named(
    bonsai: Any, shape: Callable[[int, int], tuple[int, ...]]
) -> None:
    """It is the one whose blocks say what shares a scale."""
    name = "blk.0.attn_q.weight"
    (n, k), dtype = bonsai.tensors[name].shape, bonsai.tensors[name].type
    wrong = shape(n, k)
    size = bonsai.tensors[name].data.size * int(np.prod(wrong)) // (n * k)
    bonsai.tensors[name] = TensorSource(wrong, dtype, np.full(size, 60, np.uint8))  # scales that are not alike
    bonsai.tensors[name].data[:2] = 1
    with pytest.raises(ModelFileError, match="according to the metadata it must be") as caught:
        bonsai.open()
    assert name in str(caught.value)


def test_half_a_description_of_a_transform_is_refused(bonsai: Any) -> None:
    """Bonsai 2: the weights are in a basis that activations are rotated into before each product."""
    bonsai.metadata["prism.hadamard.block_size"] = 1024
    with pytest.raises(ModelFileError, match="is missing") as caught:
        bonsai.open()
    assert caught.value.field == "metadata 'prism.hadamard.version'"


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_of_zeros_are_no_groups(tiny: Callable[..., Any], tmp_path: Path, apart: bool) -> None:
    """Quantisers give them the scale 0: the model has one scale a matrix all the same, in its blocks or apart."""
    model = tiny()
    for name, codes in model.codes.items():
        codes[:, :64] = 0
        scales = np.zeros((len(codes), codes.shape[1] // 64), np.float16)
        scales[:, 1:] = 1 if apart else model.scales[name]
        model.tensors[f"{name}.weight"] = TensorSource(codes.shape, GGMLType.Q2_0, q2_0(codes + 1, scales))
        if apart:
            model.tensors[f"{name}.scale"] = np.array([model.scales[name]], np.float32)
    weights = model.open().weights
    for name, codes in model.codes.items():
        weight: Any = weights[name]
        assert weight.group is None
        codes_read, scale = weight.load()
        np.testing.assert_array_equal(unpack_ternary(codes_read, codes.shape[1]), codes)
        assert scale.tolist() == [model.scales[name]]
    convert_model(model.path, tmp_path / "out.gguf")
    assert GGUFFile(tmp_path / "out.gguf").tensors["blk.0.attn_q.weight"].type is GGMLType.I2_S
