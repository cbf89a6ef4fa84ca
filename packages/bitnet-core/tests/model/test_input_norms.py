"""Model files with a norm before each product, of Qwen 3's and Gemma 3's shape (BitNet-embedding)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_embedder
from bitnet.core.cli import main
from bitnet.core.engine.setup import refusals
from bitnet.core.errors import ModelFileError
from bitnet.core.hal import EMBEDDERS, DeviceInfo, KVDtype, Limits, NormQuant, NormTokens, TernaryMatmul
from bitnet.core.model.program import build_program
from bitnet.core.reference.device import NUMPY_INFO

HIDDEN, FFN, HEAD = 128, 256, 32
INPUTS = {f"attn_{part}": HIDDEN for part in ("q", "k", "v", "output")}
INPUTS |= {"ffn_gate": HIDDEN, "ffn_up": HIDDEN, "ffn_down": FFN}
"""Columns of each product."""


@pytest.fixture(params=["qwen3", "gemma3"])
def embedding(request: pytest.FixtureRequest, tiny: Callable[..., Any]) -> Any:
    model = tiny(request.param)
    rng = np.random.default_rng()

    def norm(size: int) -> Any:
        return rng.uniform(0.5, 1.5, size).astype(np.float16)

    for layer in range(2):
        block = f"blk.{layer}."
        del model.tensors[f"{block}attn_sub_norm.weight"], model.tensors[f"{block}ffn_sub_norm.weight"]
        for name, columns in INPUTS.items():
            model.tensors[f"{block}{name}_norm_in.weight"] = norm(columns)
        for name in ("attn_q_norm", "attn_k_norm"):
            model.tensors[f"{block}{name}.weight"] = norm(HEAD)
        for name in ("post_attention_norm", "post_ffw_norm") if request.param == "gemma3" else ():
            model.tensors[f"{block}{name}.weight"] = norm(HIDDEN)
    for name in [name for name in model.tensors if name.endswith(("attn_norm.weight", "ffn_norm.weight"))]:
        model.tensors[name] = norm(HIDDEN)
    model.metadata["tokenizer.ggml.pre"] = "qwen2"
    model.metadata["tokenizer.ggml.add_eos_token"] = True
    model.metadata[model.key("pooling_type")] = 1
    for name in model.codes:
        model.scales[name] = 0.1
        model.i2s(name)
    return model


def test_each_product_has_a_norm_of_its_own(embedding: Any) -> None:
    file = embedding.open()
    program = build_program(file.config, file.weights, limits=Limits(4, max_blocks=2), num_blocks=2, head=False)
    norms = {}
    for norm, product in zip(program.ops, program.ops[1:], strict=False):
        if isinstance(product, TernaryMatmul) and isinstance(norm, NormQuant):
            assert (product.x, product.scale) == (norm.out, norm.scale)
            norms[product.weights] = norm.weight, norm.x, product.column
    for layer in range(2):
        for name, column in (("attn_q", 0), ("attn_k", 128), ("attn_v", 192), ("ffn_gate", 0), ("ffn_up", FFN)):
            weight = f"blk.{layer}.{name}"
            assert norms[(weight,)] == (f"{weight}_norm_in", "normed", column)
        assert norms[(f"blk.{layer}.attn_output",)][:2] == (f"blk.{layer}.attn_output_norm_in", "attn")
    first = [op for op in program.ops if isinstance(op, NormTokens) and not op.add]
    assert [op.weight for op in first] == [f"blk.{i}.{name}" for i in range(2) for name in ("attn_norm", "ffn_norm")]


def test_gemma_scales_what_sub_layers_add(embedding: Any) -> None:
    """The stream is divided by what embeddings are multiplied by, so that the table stays as it is in the file."""
    file = embedding.open()
    program = build_program(file.config, file.weights, limits=Limits(4, max_blocks=2), num_blocks=2)
    added = [op for op in program.ops if isinstance(op, NormTokens) and op.add]
    products = [op for op in program.ops if isinstance(op, TernaryMatmul) and op.add]
    table = embedding.tensors["token_embd.weight"]
    np.testing.assert_array_equal(file.weights["token_embd"].load(), table)
    assert file.weights["token_embd"].dtype == "f16"
    if embedding.architecture == "qwen3":
        assert (len(added), len(products)) == (0, 4)
        return
    assert (len(added), len(products)) == (4, 0)
    assert [op.weight for op in added][:2] == ["blk.0.post_attention_norm", "blk.0.post_ffw_norm"]
    stored = embedding.tensors["blk.1.post_ffw_norm.weight"].astype(np.float32)
    np.testing.assert_allclose(file.weights["blk.1.post_ffw_norm"].load(), stored / HIDDEN**0.5, rtol=1e-6)
    first = next(op for op in program.ops if isinstance(op, NormTokens))
    assert np.isclose(first.eps, 1e-5 / HIDDEN)
    assert (file.config.activation, file.config.rope_style) == ("gelu_tanh", "neox")


def test_devices_agree_and_every_norm_counts(embedding: Any) -> None:
    """Vectors of short texts; another weight of any one norm gives others."""
    texts = np.random.default_rng().integers(0, 256, (12, 5)).tolist()
    before = None
    for device in ("cpu", "cpu:numpy"):
        with load_embedder(embedding.write(), device=device, kv_dtype="f32") as embedder:
            assert embedder.pooling == "mean"
            assert embedder.tokens("ab")[-1] == 257  # ends every text
            vectors = embedder.embed(texts)
        if before is not None:
            assert np.median((vectors * before).sum(axis=1)) >= 0.9999
        before = vectors
    assert before is not None
    names = [f"blk.0.{name}_norm_in" for name in INPUTS]
    names += ["blk.0.post_ffw_norm", "blk.0.post_attention_norm"] if embedding.architecture == "gemma3" else []
    for name in names:
        kept = embedding.tensors[f"{name}.weight"]
        embedding.tensors[f"{name}.weight"] = kept * np.linspace(0.1, 2, len(kept)).astype(np.float16)
        with load_embedder(embedding.write(), device="cpu", kv_dtype="f32") as embedder:
            assert np.median((embedder.embed(texts) * before).sum(axis=1)) < 0.9999, name
        embedding.tensors[f"{name}.weight"] = kept


@pytest.mark.nightly(unless_changed=("kernels", "packages/bitnet-core/src/bitnet/core/gpu"))
@pytest.mark.parametrize("kv_dtype", ["f32", "i8"])
def test_gpus_agree(embedding: Any, gpus: Sequence[DeviceInfo], kv_dtype: KVDtype) -> None:
    """The CPU's vectors, of texts of any length, on every device that has the operations."""
    rng, path = np.random.default_rng(), embedding.write()
    texts = [rng.integers(0, 256, length).tolist() for length in (1, 2, 5, 9, 17, 33, 40)]

    def vectors(device: str) -> Any:
        with load_embedder(path, device=device, kv_dtype=kv_dtype) as embedder:
            return embedder.embed(texts)

    expected = vectors("cpu")
    for info in gpus:
        if EMBEDDERS in info.features:
            assert np.median((vectors(info.name) * expected).sum(axis=1)) >= 0.9999, info.name


@pytest.mark.parametrize("name", INPUTS)
def test_a_missing_norm_is_named(embedding: Any, name: str) -> None:
    del embedding.tensors[f"blk.1.{name}_norm_in.weight"]
    with pytest.raises(ModelFileError, match="is missing") as caught:
        embedding.open()
    assert caught.value.field == f"tensor 'blk.1.{name}_norm_in.weight'"


def test_norms_of_some_layers_are_refused(embedding: Any) -> None:
    for name in INPUTS:
        del embedding.tensors[f"blk.0.{name}_norm_in.weight"]
    with pytest.raises(ModelFileError, match="not part of the architecture"):
        embedding.open()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window", 512, "another base in layers that attend to a window"),
        ("final_logit_softcapping", 30.0, "limited logits"),
        ("attn_logit_softcapping", 50.0, "limited scores"),
        ("attention.query_pre_attn_scalar", 168, "only the head's 32 elements"),
    ],
)
def test_what_gemma_files_may_ask_for(embedding: Any, key: str, value: object, message: str) -> None:
    embedding.metadata[embedding.key(key)] = value
    if embedding.architecture == "qwen3":
        embedding.open()  # no key of Qwen 3's
        return
    with pytest.raises(ModelFileError, match=message) as caught:
        embedding.open()
    assert caught.value.field == f"metadata 'gemma3.{key}'"


def test_devices_without_them_say_so(embedding: Any) -> None:
    (why,) = refusals(embedding.open(), [replace(NUMPY_INFO, features=())]).values()
    assert why == "it computes no norms before each product or after each sub-layer."


def test_inspect_tells(embedding: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(embedding.write())]) == 0
    said = capsys.readouterr().out
    assert "norms before each product" in said
    assert ("norms after each sub-layer" in said) == (embedding.architecture == "gemma3")
