"""Converted models hold the weights, the tokenizer and the settings of the folder they came from.

Long, because each family of models and each fault of a folder is tested through the same few helpers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import BitNetError, InvalidInputError, ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource, i2s_bytes, unpack_ternary, write_gguf
from bitnet.core.model import ModelFile, open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.model.hf_checkpoint import interleave
from bitnet.core.model.rope import LongRope, Yarn

Make = Callable[..., Any]
OURS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def converted(path: Path, **options: Any) -> ModelFile:
    target = path.parent / "out.gguf"
    convert_model(path, target, **options)
    assert {p.name for p in target.parent.iterdir()} <= {"model", "out.gguf", path.name}
    return open_model(target)


def ternary(model: ModelFile, name: str) -> tuple[np.ndarray, float]:
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    weight = model.weights[f"blk.{layer}.{OURS[rest]}"]
    data: Any = weight.load()
    return unpack_ternary(data.codes, weight.shape[1]), float(data.scale[0])


def from_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def test_packed_weights(folder: Make) -> None:
    source = folder()
    source.pack("autobitlinear", 1.5)
    seen: list[tuple[int, int]] = []
    model = converted(source.write(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    for name, codes in source.codes.items():
        got, scale = ternary(model, name)
        np.testing.assert_array_equal(got, codes)
        assert scale == 1.5
    config = model.config
    assert (config.architecture, config.activation, config.rope_style) == ("bitnet-b1.58", "relu2", "neox")
    assert (config.hidden_size, config.ffn_size, config.layers, config.heads, config.kv_heads) == (64, 128, 2, 4, 2)
    assert (config.vocab_size, config.context_length, config.rope_theta) == (source.size, 128, 500_000.0)
    assert config.rms_eps == pytest.approx(1e-5)
    assert config.sub_norms
    assert config.tied_embeddings
    assert config.name == "model"
    assert model.quantization == "I2_S"
    table = from_bf16(source.tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.weights["token_embd"].load(), table.astype(np.float16))
    for ours, theirs in {
        "output_norm": "model.norm",
        "blk.1.attn_norm": "model.layers.1.input_layernorm",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
        "blk.0.attn_sub_norm": "model.layers.0.self_attn.attn_sub_norm",
        "blk.0.ffn_sub_norm": "model.layers.0.mlp.ffn_sub_norm",
    }.items():
        np.testing.assert_array_equal(model.weights[ours].load(), from_bf16(source.tensors[f"{theirs}.weight"]))


def test_bitlinear_divides_by_its_scale(folder: Make) -> None:
    source = folder()
    source.pack("bitlinear", 1.5)
    del source.config["quantization_config"]["linear_class"]  # it is the default
    model = converted(source.write())
    for name, codes in source.codes.items():
        got, scale = ternary(model, name)
        np.testing.assert_array_equal(got, codes)
        assert scale == np.float32(1 / 1.5)


@pytest.mark.parametrize("kind", ["online", "none", "1bitLLM"])
def test_master_weights(folder: Make, kind: str) -> None:
    source = folder("BitnetForCausalLM" if kind == "1bitLLM" else "BitNetForCausalLM")
    rng = np.random.default_rng()
    masters = {name: rng.normal(0, 0.05, codes.shape).astype(np.float32) for name, codes in source.codes.items()}
    source.tensors |= {f"{name}.weight": values for name, values in masters.items()}
    if kind == "online":
        source.config["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        }
    if kind == "1bitLLM":
        source.config["hidden_act"] = "silu"
        for old, new in (("attn_sub_norm", "inner_attn_ln"), ("ffn_sub_norm", "ffn_layernorm")):
            source.tensors = {name.replace(old, new): tensor for name, tensor in source.tensors.items()}
    model = converted(source.write())
    if kind == "1bitLLM":
        assert (model.config.architecture, model.config.activation) == ("bitnet", "silu")
    for name, values in masters.items():
        got, scale = ternary(model, name)
        exact = np.abs(values.astype(np.float64)).mean()
        assert scale == pytest.approx(exact, rel=1e-6)
        clear = np.abs(np.abs(values / exact) % 1 - 0.5) > 1e-5
        np.testing.assert_array_equal(got[clear], np.clip(np.rint(values / exact), -1, 1)[clear])


def test_unpacked_codes_with_a_scale(folder: Make) -> None:
    source = folder()
    source.pack("autobitlinear", 2.0)
    for name, codes in source.codes.items():
        source.tensors[f"{name}.weight"] = codes.astype(np.float32) * np.float32(0.5)
    model = converted(source.write())
    for name, codes in source.codes.items():
        got, scale = ternary(model, name)
        np.testing.assert_array_equal(got, codes)
        assert scale == 1.0


def test_llama_rows_are_reordered_for_its_rotation(folder: Make) -> None:
    """Scores of rotated q and k are the same: halves paired in Hugging Face's order, neighbours in the GGUF's."""
    source = folder("LlamaForCausalLM")
    source.pack("bitlinear")
    source.config["tie_word_embeddings"] = False
    source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"]
    model = converted(source.write())
    assert (model.config.rope_style, model.config.activation, model.config.sub_norms) == ("interleaved", "silu", False)
    assert not model.config.tied_embeddings
    rng = np.random.default_rng()
    x, y = rng.normal(size=(2, 64))
    angles = {5: 5.0 * 10.0 ** -np.arange(8), 9: 9.0 * 10.0 ** -np.arange(8)}

    def rotated(v: np.ndarray, position: int, pairs: tuple[slice, slice]) -> np.ndarray:
        first, second = pairs
        cos, sin = np.cos(angles[position]), np.sin(angles[position])
        out = np.empty_like(v)
        out[first], out[second] = v[first] * cos - v[second] * sin, v[second] * cos + v[first] * sin
        return out

    halves, neighbours = (slice(0, 8), slice(8, 16)), (slice(0, 16, 2), slice(1, 16, 2))
    q, k = (source.codes[f"model.layers.1.self_attn.{n}_proj"] for n in "qk")
    our_q, our_k = (ternary(model, f"model.layers.1.self_attn.{n}_proj")[0] for n in "qk")
    assert (our_q != q).any()
    for head in range(4):
        rows, key_rows = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
        theirs = rotated(q[rows] @ x, 9, halves) @ rotated(k[key_rows] @ y, 5, halves)
        ours = rotated(our_q[rows] @ x, 9, neighbours) @ rotated(our_k[key_rows] @ y, 5, neighbours)
        assert ours == pytest.approx(theirs)
    np.testing.assert_array_equal(
        ternary(model, "model.layers.1.self_attn.v_proj")[0], source.codes["model.layers.1.self_attn.v_proj"]
    )
    np.testing.assert_array_equal(interleave(np.arange(8, dtype=np.int8)[:, None], 2)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7])


def test_many_files(folder: Make) -> None:
    source = folder()
    source.pack("autobitlinear")
    model = converted(source.write(shards=3))
    for name, codes in source.codes.items():
        np.testing.assert_array_equal(ternary(model, name)[0], codes)


def test_tokenizer_and_chat_template(folder: Make) -> None:
    source = folder()
    source.pack("autobitlinear")
    model = converted(source.write())
    tokenizer = model.tokenizer
    assert tokenizer.vocab_size == source.size
    text = "The cat's 1234 mats,\n\n  naïve 😀 the rat"
    assert tokenizer.encode(text, add_special=False) == source.tokenizer.encode(text).ids
    ids = [source.tokenizer.token_to_id(t) for t in ("<|begin|>", "<|end|>", "<|eot_id|>")]
    assert tokenizer.bos_id == ids[0]
    assert tokenizer.eos_ids == set(ids[1:])
    assert tokenizer.encode("") == []  # its tokenizer.json adds no begin token
    assert model.chat_template is not None
    assert model.chat_template.render([{"content": "x"}]) == "<|begin|>x"

    source.settings |= {"add_bos_token": True, "chat_template": [{"name": "default", "template": "D"}, {"name": "x"}]}
    model = converted(source.write())
    assert model.tokenizer.encode("") == [ids[0]]
    assert model.chat_template is not None
    assert model.chat_template.render([]) == "D"

    (source.path / "chat_template.jinja").write_text("J")
    model = converted(source.path)
    assert model.chat_template is not None
    assert model.chat_template.render([]) == "J"


@pytest.mark.parametrize("new", [False, True])
def test_rotary_scaling(folder: Make, new: bool) -> None:
    source = folder("LlamaForCausalLM")
    source.pack("bitlinear")
    scaling: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    if new:
        source.config["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 10_000.0, **scaling}
    else:
        source.config |= {"rope_scaling": {"rope_type": "llama3", **scaling}, "rope_theta": 10_000.0}
    model = converted(source.write())
    assert model.config.rope_theta == 10_000.0
    factors = model.config.rope_freq_factors
    assert factors is not None
    for i, factor in enumerate(factors):
        frequency = 10_000.0 ** (-2 * i / 16)
        length = 2 * np.pi / frequency
        if length < 64 / 4:
            expected = frequency
        elif length > 64:
            expected = frequency / 8
        else:
            smooth = (64 / length - 1) / 3
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert frequency / factor == pytest.approx(expected, rel=1e-6)
    assert set(np.round(factors, 3)) > {1.0, 8.0}

    source.config.pop("rope_scaling", None)  # it counts where both are there
    source.config["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    np.testing.assert_array_equal(converted(source.write()).config.rope_freq_factors, np.full(8, 4))


def reshaped(folder: Make, architecture: str) -> Any:
    """A folder of Llama's tensors as one of another architecture that has the same tensors."""
    source = folder("LlamaForCausalLM")
    source.pack("bitlinear")
    source.config["architectures"] = [architecture]
    return source


def test_qwen3(folder: Make) -> None:
    source = reshaped(folder, "Qwen3ForCausalLM")
    source.config |= {"head_dim": 16, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    norms = np.random.default_rng().uniform(0.5, 2, (2, 2, 16)).astype(np.float32)
    for layer in range(2):
        for i, name in enumerate(("q_norm", "k_norm")):
            source.tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = norms[layer, i]
    model = converted(source.write())
    assert (model.config.architecture, model.config.rope_style, model.config.head_norms) == ("qwen3", "neox", True)
    assert model.config.rope_scaling == Yarn(4.0, 128)
    np.testing.assert_array_equal(model.weights["blk.1.attn_k_norm"].load(), norms[1, 1])
    for name, codes in source.codes.items():
        np.testing.assert_array_equal(ternary(model, name)[0], codes)


def test_hunyuan(folder: Make) -> None:
    source = reshaped(folder, "HunYuanDenseV1ForCausalLM")
    source.config |= {"head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
    norms = np.random.default_rng().uniform(0.5, 2, (2, 2, 16)).astype(np.float32)
    for layer in range(2):
        for i, name in enumerate(("query_layernorm", "key_layernorm")):
            source.tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = norms[layer, i]
    model = converted(source.write())
    assert (model.config.architecture, model.config.rope_style, model.config.head_norms) == (
        "hunyuan-dense",
        "neox",
        True,
    )
    assert model.config.rope_theta == pytest.approx(source.config["rope_theta"] * 1000 ** (16 / 14), rel=1e-6)
    np.testing.assert_array_equal(model.weights["blk.1.attn_q_norm"].load(), norms[1, 0])
    np.testing.assert_array_equal(model.weights["blk.1.attn_k_norm"].load(), norms[1, 1])
    for name, codes in source.codes.items():
        np.testing.assert_array_equal(ternary(model, name)[0], codes)


def biased(folder: Make, kind: str = "bitlinear") -> tuple[Any, dict[str, np.ndarray]]:
    """A folder of Qwen2's, and its biases by their GGUF names; those of q are in BF16."""
    source, biases = reshaped(folder, "Qwen2ForCausalLM"), {}
    source.pack(kind)
    for name, codes in source.codes.items():
        layer, part = name.split(".")[2], name.split(".")[-1].removesuffix("_proj")
        if part in ("q", "k", "v"):
            bias = np.random.default_rng().normal(size=len(codes)).astype(np.float32)
            short = (bias.view(np.uint32) >> 16).astype(np.uint16)
            source.tensors[f"{name}.bias"] = short if part == "q" else bias
            # AutoBitLinear multiplies the sum of product and bias by the scale, BitLinear adds the bias to the result.
            factor = np.float32(1.5 if kind == "autobitlinear" else 1)
            biases[f"blk.{layer}.attn_{part}.bias"] = factor * (from_bf16(short) if part == "q" else bias)
    return source, biases


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_qwen2(folder: Make, kind: str) -> None:
    """Biases of q, k and v come through a folder, and through a file into another."""
    source, biases = biased(folder, kind)
    model = converted(source.write())
    assert (model.config.architecture, model.config.rope_style, model.config.qkv_biases) == ("qwen2", "neox", True)
    again = source.path.parent / "again.gguf"
    convert_model(model.path, again)
    for file in (model, open_model(again)):
        for name, bias in biases.items():
            assert file.gguf.tensors[name].type.name == "F32"
            np.testing.assert_array_equal(file.weights[name].load(), bias)
    for name, codes in source.codes.items():
        np.testing.assert_array_equal(ternary(model, name)[0], codes)


def test_a_bias_that_is_missing_or_unknown(folder: Make) -> None:
    source, _ = biased(folder)
    bias = source.tensors.pop("model.layers.1.self_attn.k_proj.bias")
    refused(source.write(), "blk.1.attn_k.bias")
    source.tensors["model.layers.1.self_attn.k_proj.bias"] = bias[:-1]
    refused(source.write(), "according to config.json it must be (32,)")
    source.tensors["model.layers.1.self_attn.k_proj.bias"] = bias
    source.tensors["model.layers.1.self_attn.o_proj.bias"] = np.zeros(64, np.float32)
    refused(source.write(), "is not part of the architecture qwen2")


def test_olmo(folder: Make) -> None:
    """No norm has a weight, and its epsilon is in no key."""
    source = reshaped(folder, "OlmoForCausalLM")
    norms = [name for name in source.tensors if "norm" in name]
    for name in norms[1:]:
        del source.tensors[name]
    refused(source.write(), "is not part of the architecture olmo")
    del source.tensors[norms[0]]
    source.config["clip_qkv"] = 8.0
    refused(source.write(), "clip_qkv")
    source.config["clip_qkv"] = None
    model = converted(source.write())
    config = model.config
    assert (config.architecture, config.rope_style, config.layer_norms) == ("olmo", "interleaved", True)
    assert config.rms_eps == pytest.approx(1e-5)
    assert not any("norm" in name for name in model.gguf.tensors)
    for name, codes in source.codes.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-1])
        expected = interleave(codes, heads) if heads else codes
        np.testing.assert_array_equal(ternary(model, name)[0], expected)
    again = source.path.parent / "again.gguf"
    convert_model(model.path, again)
    assert open_model(again).config == config


def test_minicpm(folder: Make) -> None:
    source = reshaped(folder, "MiniCPMForCausalLM")
    short, long = np.random.default_rng().uniform(1, 9, (2, 8)).astype(np.float32).tolist()
    rope = {"type": "longrope", "short_factor": short, "long_factor": long, "original_max_position_embeddings": 32}
    source.config |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "rope_scaling": rope}
    model = converted(source.write())
    config = model.config
    assert (config.architecture, config.rope_style, config.sub_norms) == ("minicpm", "interleaved", False)
    assert config.rope_scaling == LongRope(tuple(short), tuple(long), 32)
    assert config.rope_attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
    assert config.embedding_scale == 12
    assert config.residual_scale == pytest.approx(1.4 / math.sqrt(2))
    assert config.logit_scale == pytest.approx(16 / 64)
    again = source.path.parent / "again.gguf"
    convert_model(model.path, again)
    assert open_model(again).config == config


def test_weights_of_minicpm_are_ternary_already(folder: Make) -> None:
    """BitCPM4's folders hold floats that training rounded, and no quantisation settings."""
    source = reshaped(folder, "MiniCPMForCausalLM")
    del source.config["quantization_config"]
    for name, codes in source.codes.items():
        del source.tensors[f"{name}.weight_scale"]
        source.tensors[f"{name}.weight"] = codes * np.float32(0.25)
    model = converted(source.write())
    for name in source.codes:
        assert ternary(model, name)[1] == 0.25
    name = "model.layers.0.mlp.up_proj"
    source.tensors[f"{name}.weight"] = source.codes[name] * np.linspace(1, 2, 128, dtype=np.float32)[:, None]
    with pytest.raises(ModelFileError, match="more than one magnitude"):
        converted(source.write())


ROPE: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "yarn", "factor": "4"}, "factor"),
    ({"rope_type": "yarn", "factor": 4.0, "truncate": False}, "truncate"),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.5},
        "original_max_position_embeddings",
    ),
    ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}, "attention_factor"),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 9.0}, "beta_fast"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}, "short_factor"),
    ({"rope_type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}, "short_factor"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
]


@pytest.mark.parametrize(("rope", "field"), ROPE)
def test_rotary_scalings_that_cannot_be(folder: Make, rope: dict[str, Any], field: str) -> None:
    source = folder("LlamaForCausalLM")
    source.pack("bitlinear")
    source.config["rope_scaling"] = rope
    refused(source.write(), field)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Gemma3ForCausalLM", "GGUF files are"),
        ("OLMoForCausalLM", "OLMo-BitNet"),
        ("OLMoModelForCausalLM", "OLMo-BitNet"),
    ],
)
def test_architectures_that_are_refused_with_a_reason(folder: Make, name: str, why: str) -> None:
    refused(reshaped(folder, name).write(), why)


CONFIG: list[tuple[str, Any, str]] = [
    ("architectures", ["GPT2LMHeadModel"], "not supported"),
    ("architectures", "Llama", "not supported"),
    ("architectures", None, "not supported"),
    ("hidden_size", None, "according to config.json it must be"),
    ("hidden_size", "64", "not a positive integer"),
    ("num_attention_heads", 0, "not a positive integer"),
    ("intermediate_size", 64, "according to config.json it must be"),
    ("num_hidden_layers", 3, "is missing"),
    ("num_hidden_layers", 1, "is not part of the architecture"),
    ("rms_norm_eps", -1, "not a positive number"),
    ("rope_theta", "x", "not a positive number"),
    ("hidden_act", "gelu", "'gelu' is not supported"),
    ("hidden_act", ["silu"], "is not supported"),
    ("rope_scaling", {"type": "ntk", "factor": 2}, "'ntk' is not supported"),
    ("rope_scaling", [1], "not an object"),
    ("rope_scaling", {"type": "linear"}, "not a positive number"),
    ("use_sliding_window", True, "every token attends to all"),
    ("sparse_config", {"topk": 64}, "every token attends to all"),
    ("vocab_size", 100, "according to config.json it must be (100, 64)"),
    ("quantization_config", {"quant_method": "gptq"}, "'gptq' is not supported"),
    ("quantization_config", {"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm"),
    ("quantization_config", {"quant_method": "bitnet", "modules_to_not_convert": ["a.b"]}, "modules_to_not_convert"),
]


def refused(path: Path, message: str) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        convert_model(path, path.parent / "out.gguf")
    assert message in str(caught.value)
    assert caught.value.field is not None
    assert list(path.parent.iterdir()) == [path]  # nothing half-written is left
    return caught.value


@pytest.mark.parametrize(("key", "value", "message"), CONFIG)
def test_configurations_that_cannot_be(folder: Make, key: str, value: Any, message: str) -> None:
    source = folder()
    source.pack("autobitlinear")
    source.config[key] = value
    refused(source.write(), message)


def test_a_llama_that_is_not_ternary(folder: Make) -> None:
    source = folder("LlamaForCausalLM")
    source.pack("bitlinear")
    del source.config["quantization_config"]
    refused(source.write(), "not a 1.58-bit model")


def change(source: Any, name: str, tensor: np.ndarray | None) -> None:
    source.pack("autobitlinear")
    if tensor is None:
        del source.tensors[name]
    else:
        source.tensors[name] = tensor


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "is missing"),
        (f"{Q}.weight", None, "is missing"),
        (f"{Q}.weight_scale", None, "not a ternary matrix with a scale"),
        (f"{Q}.weight_scale", np.ones(2, np.float32), "is not a scale"),
        (f"{Q}.weight_scale", np.array([np.nan], np.float32), "not finite"),
        (f"{Q}.weight", np.full((16, 64), 0xFF, np.uint8), "code 3"),
        (f"{Q}.weight", np.zeros((8, 64), np.uint8), "according to config.json it must be"),
        (f"{Q}.weight", np.arange(4096, dtype=np.float32).reshape(64, 64), "not ternary"),
        (f"{Q}.weight", np.zeros((4, 4, 64), np.uint8), "not a ternary matrix"),
        (f"{Q}.bias", np.zeros(64, np.float32), "is not part of the architecture"),
        ("model.embed_tokens.weight", np.zeros((75, 64), np.uint8), "it must be F32"),
        ("model.norm.weight", np.full(64, np.inf, np.float32), "not finite"),
    ],
)
def test_tensors_that_do_not_fit(folder: Make, name: str, tensor: np.ndarray | None, message: str) -> None:
    source = folder()
    change(source, name, tensor)
    refused(source.write(), message)


@pytest.mark.parametrize(("scale", "message"), [(0.0, "is 0, but the weights"), (1e-45, "its scale is")])
def test_scales_that_nothing_can_be_divided_by(folder: Make, scale: float, message: str) -> None:
    source = folder()
    source.pack("bitlinear")
    source.tensors[f"{Q}.weight_scale"] = np.array([scale], np.float32)
    refused(source.write(), message)


def test_folders_that_are_no_model(folder: Make, tmp_path: Path) -> None:
    source = folder()
    source.pack("autobitlinear")
    for name, content in (
        ("config.json", None),
        ("config.json", b"{"),
        ("config.json", b"[1]"),
        ("config.json", b"[" * 100_000),
        ("tokenizer.json", None),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b"x"),
        ("model.safetensors", None),
    ):
        path = source.write()
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content)
        with pytest.raises(ModelFileError):
            convert_model(path, tmp_path / "out.gguf")
        assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("places", [{"a": "../x.safetensors"}, {"a": 5}, ["a"], {"a": "absent.safetensors"}])
def test_indexes_that_point_elsewhere(folder: Make, places: Any) -> None:
    source = folder()
    source.pack("autobitlinear")
    path = source.write()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelFileError):
        convert_model(path, path.parent / "out.gguf")


def test_other_ways_to_cut_words_are_refused(folder: Make) -> None:
    from tokenizers import pre_tokenizers

    source = folder()
    source.pack("autobitlinear")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    source.tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    refused(source.write(), "splits text in an unsupported way")


def test_gguf_to_gguf(folder: Make, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    source = folder()
    source.pack("autobitlinear")
    original = converted(source.write())
    metadata = dict(original.metadata)
    tensors: dict[str, Any] = {}
    for name, info in original.gguf.tensors.items():
        tensors[name] = TensorSource(info.shape, info.type, original.gguf.data(info))
    hidden = rng.integers(-1, 2, (64, 128), dtype=np.int8)
    tensors["blk.0.ffn_down.weight"] = TensorSource(hidden.shape, GGMLType.F32, hidden * np.float32(0.5))
    tensors["blk.0.ffn_down.scale"] = np.array([4], np.float32)
    write_gguf(tmp_path / "in.gguf", metadata, tensors)
    model = converted(tmp_path / "in.gguf")
    assert model.quantization == "I2_S"
    assert model.gguf.tensors["blk.0.ffn_down.weight"].type is GGMLType.I2_S
    assert "blk.0.ffn_down.scale" not in model.gguf.tensors
    got, scale = ternary(model, "model.layers.0.mlp.down_proj")
    np.testing.assert_array_equal(got, hidden)
    assert scale == 2.0
    for name, codes in source.codes.items():
        if name != "model.layers.0.mlp.down_proj":
            np.testing.assert_array_equal(ternary(model, name)[0], codes)
    assert model.config.activation == original.config.activation
    assert model.tokenizer.encode("the cat") == original.tokenizer.encode("the cat")


def test_source_and_target_are_one(folder: Make, tmp_path: Path) -> None:
    source = folder()
    source.pack("autobitlinear")
    model = converted(source.write())
    before = model.path.read_bytes()
    (tmp_path / "link.gguf").hardlink_to(model.path)
    for target in (model.path, tmp_path / "link.gguf"):
        with pytest.raises(InvalidInputError, match="is the model to convert"):
            convert_model(model.path, target)
    assert model.path.read_bytes() == before
    with pytest.raises(BitNetError, match="cannot be opened"):
        convert_model(tmp_path / "absent", tmp_path / "out2.gguf")


def test_code_3_is_refused(folder: Make, tmp_path: Path) -> None:
    source = folder()
    source.pack("autobitlinear")
    model = converted(source.write())
    tensors: dict[str, Any] = {
        name: TensorSource(info.shape, info.type, model.gguf.data(info)) for name, info in model.gguf.tensors.items()
    }
    codes = i2s_bytes(np.ones((64, 64), np.int8), 1.0)
    codes[0] = 0xFF
    tensors["blk.0.attn_q.weight"] = TensorSource((64, 64), GGMLType.I2_S, codes)
    write_gguf(tmp_path / "in.gguf", dict(model.metadata), tensors)
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q\.weight.*code 3"):
        convert_model(tmp_path / "in.gguf", tmp_path / "bad.gguf")
    assert not (tmp_path / "bad.gguf").exists()


def safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"", 0),
        (b"\1\0\0", 0),
        (safetensors(b"{}", length=2**63), 0),
        (safetensors(b"{}", length=3), 0),
        (safetensors(b"{"), 8),
        (safetensors(b"[]"), 8),
        (safetensors(b"\xff\xff"), 8),
        (safetensors(b"[" * 100_000), 8),
        (safetensors(b'{"t": 1}'), 8),
        (safetensors(b'{"t": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', bytes(8)), 8),
        (safetensors(b'{"t": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 0]}}'), 8),
    ],
)
def test_broken_safetensors(folder: Make, content: bytes, offset: int) -> None:
    source = folder()
    path = source.write()
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        convert_model(path, path.parent / "out.gguf")
    assert caught.value.offset == offset
    assert caught.value.field is not None
    assert caught.value.path == path / "model.safetensors"
