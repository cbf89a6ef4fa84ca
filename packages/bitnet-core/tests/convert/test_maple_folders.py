"""Folders of Maple's kind, Hugging Face's and MLX's, become the same model as a GGUF file of the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.cli import main
from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource, write_gguf
from bitnet.core.gguf.blocks import encode_blocks
from bitnet.core.hal import DenseWeight, TernaryWeight
from bitnet.core.model import ModelFile, open_model
from bitnet.core.model.convert import convert_model
from bitnet.core.text.words import QWEN2_WORDS
from random_maple import metadata, parts
from random_qwen35 import write_safetensors, write_tokenizer
from random_shapes import ExpertShape

SHAPE = ExpertShape(
    layers=2, interval=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=320, experts=5, used=2, window=16
)
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "token_embd": "model.word_embeddings",
    "output_norm": "model.norm",
    "output": "lm_head",
}
CONFIG = {
    "architectures": ["MapleForCausalLM"],
    "model_type": "maple",
    "vocab_size": SHAPE.vocab,
    "hidden_size": SHAPE.hidden,
    "intermediate_size": 4096,  # which nothing uses
    "moe_intermediate_size": SHAPE.ffn,
    "num_hidden_layers": SHAPE.layers,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.kv_heads,
    "head_dim": SHAPE.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": SHAPE.context,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": SHAPE.rope_theta, "rope_type": "default", "partial_rotary_factor": 0.5},
    "sliding_window": SHAPE.window,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "nope_on_global_attention": True,
    "num_experts": SHAPE.experts,
    "num_experts_per_tok": SHAPE.used,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def bf16(values: np.ndarray) -> tuple[str, np.ndarray]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "only numbers that BF16 holds"
    return "BF16", (bits >> 16).astype(np.uint16)


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest numbers of 8 significant bits, which BF16 and F16 hold."""
    fraction, exponent = np.frexp(values)
    nearest: np.ndarray = np.ldexp(np.round(fraction * 256) / 256, exponent).astype(np.float32)
    return nearest


class Maple:
    """One model's numbers: floats by name, and codes with a scale for each row."""

    def __init__(self) -> None:
        rng = np.random.default_rng()
        self.floats: dict[str, np.ndarray] = {}
        self.rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for part in parts(SHAPE):
            if part.kind == "ternary":
                codes = rng.integers(0, 3, part.shape, np.uint8)
                codes[..., 0] = 2  # no row is all zeros, whose scale nothing would tell
                self.rows[part.gguf] = codes, rounded(rng.uniform(0.01, 0.1, part.shape[:-1]))
            else:
                spread = part.shape[-1] ** -0.5 if part.kind != "norm" else 0.1
                self.floats[part.gguf] = rounded(rng.normal(part.kind == "norm", spread, part.shape))

    def gguf(self, path: Path) -> ModelFile:
        tensors: dict[str, Any] = {}
        for name, values in self.floats.items():
            table = name in ("token_embd", "output")
            tensors[f"{name}.weight"] = values.astype(np.float16) if table else values
        for name, (codes, scales) in self.rows.items():
            blocks = scales.astype(np.float16).reshape(-1).repeat(codes.shape[-1] // 256)
            data = encode_blocks(GGMLType.TQ2_0, codes.reshape(-1, 256), blocks)
            tensors[f"{name}.weight"] = TensorSource(codes.shape, GGMLType.TQ2_0, data)
        write_gguf(path, metadata(SHAPE), tensors)
        return open_model(path)

    def hugging_face(self) -> dict[str, tuple[str, np.ndarray]]:
        arrays = {f"{module(name)}.weight": bf16(values) for name, values in self.floats.items()}
        for name, (codes, scales) in self.rows.items():
            values = (codes.astype(np.float32) - 1) * scales[..., None]
            if codes.ndim == 2:
                arrays[f"{module(name)}.weight"] = bf16(values)
                continue
            _, layer, which = name.split(".")
            for expert in range(len(codes)):
                proj = which.removeprefix("ffn_").removesuffix("_exps")
                arrays[f"model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.weight"] = bf16(values[expert])
        return arrays

    def mlx(self, *, affine: bool = False) -> dict[str, tuple[str, np.ndarray]]:
        """Codes with a scale for each row, or ``affine``: with scales and biases for each 128 columns."""
        arrays = {f"{module(name)}.weight": bf16(values) for name, values in self.floats.items()}
        for name, (codes, scales) in self.rows.items():
            base = module(name)
            words = codes.reshape(*codes.shape[:-1], -1, 16).astype(np.uint32) << np.arange(0, 32, 2, dtype=np.uint32)
            arrays[f"{base}.weight"] = ("U32", np.bitwise_or.reduce(words, axis=-1))
            if affine:
                each = scales[..., None].repeat(codes.shape[-1] // 128, axis=-1)
                arrays |= {f"{base}.scales": bf16(each), f"{base}.biases": bf16(-each)}
            else:
                arrays[f"{base}.row_alpha"] = bf16(scales)
        return arrays


def module(name: str) -> str:
    """The module of a GGUF tensor in folders."""
    block, _, base = name.rpartition(".")
    if base.endswith("_exps"):
        found = f"mlp.switch_mlp.{base.removeprefix('ffn_').removesuffix('_exps')}_proj"
    else:
        found = MODULES[base]
    return f"model.layers.{block.partition('.')[2]}.{found}" if block else found


def folder(path: Path, arrays: dict[str, tuple[str, np.ndarray]], **values: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({k: v for k, v in (CONFIG | values).items() if v is not ...}))
    write_tokenizer(path, SHAPE, QWEN2_WORDS)
    write_safetensors(path / "model.safetensors", arrays)
    return path


def converted(path: Path, **options: Any) -> ModelFile:
    convert_model(path, path.parent / "out.gguf", **options)
    return open_model(path.parent / "out.gguf")


def same(ours: ModelFile, theirs: ModelFile) -> None:
    """Every code, scale and float, and all that the program depends on."""
    for name in ("experts", "windows", "rotary_dim", "rope_theta", "rms_eps", "ffn_size", "head_norms", "activation"):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        found = ours.weights[name]
        if isinstance(weight, TernaryWeight):
            assert isinstance(found, TernaryWeight)
            assert (found.shape, found.group) == (weight.shape, weight.group)
            for a, b in zip(found.load(), weight.load(), strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert isinstance(found, DenseWeight)
            assert isinstance(weight, DenseWeight)
            assert found.dtype == weight.dtype
            np.testing.assert_array_equal(found.load(), weight.load(), err_msg=name)


KINDS: dict[str, tuple[Callable[[Maple], dict[str, tuple[str, np.ndarray]]], dict[str, Any]]] = {
    "hf": (Maple.hugging_face, {}),
    "mlx rows": (Maple.mlx, {"quantization": {"bits": 4, "group_size": 64}}),
    "mlx affine": (lambda maple: maple.mlx(affine=True), {"quantization": {"bits": 2, "group_size": 128}}),
}


@pytest.mark.parametrize("dtype", [None, "tq1_0", "tq2_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model(tmp_path: Path, kind: str, dtype: str | None) -> None:
    """Bit for bit what the GGUF file of the same numbers holds."""
    maple, (arrays, values) = Maple(), KINDS[kind]
    same(converted(folder(tmp_path / "f", arrays(maple), **values), dtype=dtype), maple.gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens(tmp_path: Path, kind: str) -> None:
    maple, (arrays, values) = Maple(), KINDS[kind]
    paths = converted(folder(tmp_path / "f", arrays(maple), **values)).path, maple.gguf(tmp_path / "m.gguf").path
    prompt, answers = np.random.default_rng().integers(0, 300, 40).tolist(), []
    for path in paths:
        with load_model(path, device="cpu") as model:
            answers.append(model.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True).tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_tables_of_numbers(tmp_path: Path, bits: int) -> None:
    """MLX's embedding and head: groups of 64 columns, ``scale * code + bias``, rounded to float16 once."""
    maple, rng = Maple(), np.random.default_rng()
    arrays = maple.mlx()
    for name in ("token_embd", "output"):
        base, shape = module(name), (SHAPE.vocab, SHAPE.hidden)
        codes = rng.integers(0, 1 << bits, shape, np.uint32)
        scales, biases = (rounded(rng.normal(0, 0.01, (SHAPE.vocab, SHAPE.hidden // 64))) for _ in range(2))
        words = codes.reshape(SHAPE.vocab, -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
        arrays[f"{base}.weight"] = ("U32", np.bitwise_or.reduce(words, axis=-1))
        arrays |= {f"{base}.scales": bf16(scales), f"{base}.biases": bf16(biases)}
        exact = codes * scales.astype(np.float64).repeat(64, axis=1) + biases.astype(np.float64).repeat(64, axis=1)
        maple.floats[name] = exact.astype(np.float32)
    model = converted(folder(tmp_path / "f", arrays, quantization={"bits": bits, "group_size": 64}))
    for name in ("token_embd", "output"):
        found, exact = model.weights[name], maple.floats[name]
        assert isinstance(found, DenseWeight)
        assert found.dtype == "f16"
        error = abs(found.load().astype(np.float64) - exact)
        assert (error <= 2.0**-11 * abs(exact) + 2.0**-24).all()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("nope_on_global_attention", ..., "only True is supported"),
        ("nope_on_global_attention", False, "only True is supported"),
        ("norm_topk_prob", False, "only True is supported"),
        ("num_shared_experts", 1, "only 0 is supported"),
        ("routed_scaling_factor", 2.5, "only 1 is supported"),
        ("num_experts", ..., "not a positive integer"),
        ("num_experts", 1 << 30, "the limit is 4096"),
        ("num_experts", [5], "not a positive integer"),
        ("num_experts_per_tok", 6, "is 6 of 5 experts"),
        ("moe_intermediate_size", ..., "not a positive integer"),
        ("moe_intermediate_size", 1 << 20, "makes a width of"),
        ("sliding_window", ..., "not a positive integer"),
        ("sliding_window", -4, "not a positive integer"),
        ("layer_types", ..., "2 of sliding_attention or full_attention"),
        ("layer_types", ["sliding_attention"], "2 of sliding_attention or full_attention"),
        ("layer_types", ["sliding_attention", "linear_attention"], "2 of sliding_attention or full_attention"),
        ("num_hidden_layers", 1 << 20, "the limit is 1024"),
        ("rms_norm_eps", ..., "not a positive number"),
        ("quantization", {"bits": 3, "group_size": 64}, "2 or 4 or 8 bits"),
    ],
)
def test_invalid_values(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        converted(folder(tmp_path / "f", Maple().hugging_face(), **{key: value}))
    assert caught.value.field == key


def first(arrays: dict[str, tuple[str, np.ndarray]], end: str) -> str:
    return next(name for name in arrays if name.endswith(end))


UP = "model.layers.1.mlp.experts.3.up_proj.weight"
SWITCH = "model.layers.1.mlp.switch_mlp.up_proj"


def _expert(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, Any]], None]:
    def apply(arrays: dict[str, Any]) -> None:
        arrays[UP] = ("BF16", change(arrays[UP][1].copy()))

    return apply


def _three_numbers(values: np.ndarray) -> np.ndarray:
    values[7, 5] = 0x3F40  # 0.75, beside the row's scale
    return values


HOSTILE: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "an expert is missing": ("hf", lambda a: a.pop(UP), "expert 3: is missing"),
    "an expert too many": (
        "hf",
        lambda a: a.update({UP.replace(".3.", ".5."): a[UP]}),
        "is not part of the architecture maple",
    ),
    "an expert of another shape": (
        "hf",
        _expert(lambda v: v[:-1]),
        r"according to config.json it must be \(256, 256\)",
    ),
    "a row of three numbers": ("hf", _expert(_three_numbers), "columns 0 to 255 of row 7 are not ternary"),
    "an expert of codes": ("hf", lambda a: a.update({UP: ("U8", np.zeros((256, 256), np.uint8))}), "is U8"),
    "no scales of rows": ("mlx rows", lambda a: a.pop(f"{SWITCH}.row_alpha"), "no matching scales and biases"),
    "scales of fewer rows": (
        "mlx rows",
        lambda a: a.update({f"{SWITCH}.row_alpha": ("BF16", np.zeros((5, 255), np.uint16))}),
        "a number for each row",
    ),
    "scales that are not finite": (
        "mlx rows",
        lambda a: a.update({f"{SWITCH}.row_alpha": ("BF16", np.full((5, 256), 0x7F80, np.uint16))}),
        "not finite",
    ),
    "scales that float16 lacks": (
        "mlx rows",
        lambda a: a.update({f"{SWITCH}.row_alpha": ("BF16", np.full((5, 256), 0x7F00, np.uint16))}),
        "float16 cannot represent the scale",
    ),
    "codes of 3": (
        "mlx rows",
        lambda a: a.update({f"{SWITCH}.weight": ("U32", np.full((5, 256, 16), 0xFFFFFFFF, np.uint32))}),
        "has the code 3",
    ),
    "experts of another number": (
        "mlx rows",
        lambda a: a.update({f"{SWITCH}.weight": ("U32", a[f"{SWITCH}.weight"][1][:4])}),
        "a number for each row",
    ),
    "codes of 5 bits": (
        "mlx rows",
        lambda a: a.update({f"{SWITCH}.weight": ("U32", np.zeros((5, 256, 40), np.uint32))}),
        "codes of 2 bits",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that names the tensor, no file, and no traceback for who types the command."""
    kind, change, message = HOSTILE[case]
    arrays, values = KINDS[kind]
    found = arrays(Maple())
    change(found)
    path = folder(tmp_path / "f", found, **values)
    with pytest.raises(ModelFileError, match=message) as caught:
        converted(path)
    assert "tensor" in (caught.value.field or "")
    assert not (tmp_path / "out.gguf").exists()
    assert main(["convert", str(path), str(tmp_path / "out.gguf")]) == 4
    assert "Traceback" not in capsys.readouterr().err


def test_inspect_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = converted(folder(tmp_path / "f", Maple().mlx(), quantization={"bits": 4, "group_size": 64}))
    assert main(["inspect", str(model.path)]) == 0
    said = capsys.readouterr().out
    for part in ("(maple, Maple)", "5 experts a layer, 2 a token", "windows of 16 in 1 layers", "experts Q2_0"):
        assert part in said
    assert "of which a token reads" in said
    assert "runs on: " in said
