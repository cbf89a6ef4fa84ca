"""``bitnet inspect``: its output for good files, for odd ones, and for those that cannot be run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.devices.plugin import BackendReport
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.hal import ProbeResult, ProbeStatus
from bitnet.core.reference import NUMPY_INFO
from bitnet.core.support.units import size

Bitnet = Callable[..., Any]
MAKER = Path(__file__).resolve().parents[4] / "tools" / "make_random_model.py"


def test_a_good_file(bitnet: Bitnet, model: Path) -> None:
    ran = bitnet("inspect", model, "--json")
    assert (ran.status, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert document["size"] == model.stat().st_size
    assert document["model"]["layers"] == 2
    assert document["metadata"]["general.architecture"] == "bitnet-b1.58"
    assert document["metadata"]["tokenizer.ggml.tokens"]["count"] == 512
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    query = tensors["blk.1.attn_q.weight"]
    assert (query["type"], query["shape"], query["bytes"]) == ("I2_S", [128, 128], 128 * 128 // 4 + 32)
    codes = query["statistics"]
    assert codes["minus"] + codes["zero"] + codes["plus"] == 1
    assert 0.3 < codes["zero"] < 0.37
    assert tensors["output_norm.weight"]["statistics"] is None
    text = bitnet("inspect", model).out
    assert "random-2x128 (bitnet-b1.58, BitNet b1.58 (2B4T)): 2 layers, 128 wide, 4 heads of 32 over 2 KV heads" in text
    assert document["family"] == "BitNet b1.58 (2B4T)"
    for name in (*document["metadata"], *tensors):
        assert name in text


def test_devices_that_run_a_model_and_what_the_others_lack(
    bitnet: Bitnet, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {one["name"]: one["refuses"] for one in json.loads(bitnet("inspect", model, "--json").out)["devices"]}
    assert found["cpu:numpy"] is None
    assert (
        f"runs on: {', '.join(name for name, reason in found.items() if reason is None)}"
        in bitnet("inspect", model).out
    )
    maple = tmp_path / "maple.gguf"
    subprocess.run([sys.executable, MAKER, "--preset", "maple-small", maple], check=True, stdout=subprocess.DEVNULL)
    lacking = replace(NUMPY_INFO, backend="gpu", index="0", features=())
    report = BackendReport("gpu", "", "", ProbeResult(ProbeStatus.OK, devices=[NUMPY_INFO, lacking]))
    monkeypatch.setattr("bitnet.core.devices.registry.list_devices", lambda: [report])
    text = bitnet("inspect", maple).out
    assert "runs on: cpu:numpy\n" in text
    assert "not on gpu:0: it computes no mixtures of experts" in text


def test_what_is_odd_is_warned_about_and_what_cannot_run_is_still_shown(
    bitnet: Bitnet, random_model: Any, tmp_path: Path
) -> None:
    shape = random_model.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512)
    tensors = dict(random_model.tensors(shape, 0))
    ones = np.full(128 * 128 // 4 + 32, 0b10101010, np.uint8)
    ones[-32:-28] = np.array([0.5], "<f4").view(np.uint8)
    tensors["blk.0.attn_q.weight"] = TensorSource((128, 128), GGMLType.I2_S, ones)
    random_model.write_gguf(tmp_path / "odd.gguf", random_model.metadata(shape), tensors)
    ran = bitnet("inspect", "odd.gguf")
    assert ran.status == 0
    assert ran.err.startswith("bitnet: warning: blk.0.attn_q.weight: 0% of its weights are zero")
    (query,) = [t for t in json.loads(bitnet("inspect", "odd.gguf", "--json").out)["tensors"] if t["warnings"]]
    assert (query["name"], query["statistics"]["plus"], query["statistics"]["scale"]) == (
        "blk.0.attn_q.weight",
        1.0,
        0.5,
    )

    metadata = random_model.metadata(shape) | {"general.architecture": "mamba"}
    random_model.write_gguf(tmp_path / "mamba.gguf", metadata, tensors)
    ran = bitnet("inspect", "mamba.gguf")
    assert ran.status == 4
    assert "blk.0.attn_q.weight" in ran.out
    assert ran.err.splitlines()[-1].startswith("bitnet: error: mamba.gguf")


def test_numbers_that_json_does_not_have(bitnet: Bitnet, random_model: Any, tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"a": float("inf"), "b": -float("inf"), "c": np.array([0.5, np.nan], np.float32)}
    random_model.write_gguf(tmp_path / "a.gguf", metadata, {"norm": np.ones(3, np.float32)})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(bitnet("inspect", "a.gguf", "--json").out, parse_constant=refuse)
    assert document["metadata"] == {"a": "inf", "b": "-inf", "c": [0.5, "nan"]}


def test_memory_before_loading(bitnet: Bitnet, random_model: Any, tmp_path: Path) -> None:
    """A model with recurrent layers and transforms: weights at two bits, f32 states twice, keys and values as f16."""
    shape = random_model.PRESETS["bonsai-27b-small"]
    random_model.make_model(tmp_path / "hybrid.gguf", shape)
    ran = bitnet("inspect", "hybrid.gguf", "--json")
    assert (ran.status, ran.err) == (0, "")
    document = json.loads(ran.out)
    expected = 0
    for tensor in document["tensors"]:
        count = int(np.prod(tensor["shape"]))
        expected += count // 4 + 2 * count // 128 if tensor["type"] == "PQ2_0" else 4 * count
    assert document["memory"]["weights"] == expected
    state = 6 * 128 * 128 + 3 * (2 * 2 * 128 + 6 * 128)
    assert document["memory"]["state"] == 2 * 4 * 3 * state
    assert document["model"]["hadamard"]["signs"] == [256, 512, 768]
    text = bitnet("inspect", "hybrid.gguf").out
    assert "3 recurrent layers (6 value heads of 128 over 2 key heads of 128, convolutions of 4)" in text
    assert "Hadamard transforms of 256" in text
    assert "2.45 MB for the states of a sequence" in text
    assert "context 4096" in text


def test_memory_of_one_bit(bitnet: Bitnet, random_model: Any, tmp_path: Path) -> None:
    """Of Q1_0, an eighth of a byte for each weight of a layer's products is spared, and none of the tables'."""
    shape = replace(random_model.PRESETS["bonsai-27b-small"], encoding=GGMLType.Q1_0)
    random_model.make_model(tmp_path / "bits.gguf", shape)
    document = json.loads(bitnet("inspect", "bits.gguf", "--json").out)
    products = [t for t in document["tensors"] if t["type"] == "Q1_0" and t["name"].startswith("blk.")]
    ternary = [
        t for t in products if not t["name"].endswith(("ssm_alpha.weight", "ssm_beta.weight"))
    ]  # those become f32
    assert document["memory"]["spared"] == sum(int(np.prod(t["shape"])) // 8 for t in ternary) > 0
    memory = document["memory"]
    assert (
        f"a bit a weight: {size(memory['weights'] - memory['spared'])} of weights" in bitnet("inspect", "bits.gguf").out
    )


def test_memory_of_other_models(bitnet: Bitnet, model: Path) -> None:
    memory = json.loads(bitnet("inspect", model, "--json").out)["memory"]
    assert memory["state"] == 0
    assert memory["position"] == 2 * (2 * 2 * 2 * 32) + 4 * 32  # k and v of 2 heads in 2 layers as f16, and angles
