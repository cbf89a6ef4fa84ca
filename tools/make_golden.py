"""Make the golden files of tests/oracle: logits and greedy tokens by Hugging Face transformers, in fp32 on the CPU.

    uvx --with tox-uv tox -e oracle -- --no-header -q  # the live comparison
    python tools/make_golden.py [NAME …]                # rewrites tests/oracle/golden, where torch and transformers are

The linears are transformers' own *quantised* ones (int8 activations, ternary weights). Two right implementations may
still round an activation to different sides where it stands on a border between two int8 codes; one such step moves the
logits of a small model by about 1 %, and reaches all later tokens through the cache. So the model runs in float64 too,
and each row of logits is marked as *determined* or not: whether every int8 code it depends on is ``CLEAR`` times as far
from a border as float32 moves it. Prompts are tried until enough rows are; the file says how many were.

Long, because one program changes transformers' classes for each family and watches how they round.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # transformers compiles its BitLinear, which needs a C++ compiler

import copy
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from transformers.integrations.bitnet import BitLinear, pack_weights, replace_with_bitnet_linear
from transformers.models.bitnet.modeling_bitnet import BitNetRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from golden_models import CONTINUED, MODELS, PROMPTS, Array, GoldenModel, checksum

CLEAR = 5.0
"""How many times as far from a rounding border as float32 and float64 differ a code must be to count as determined."""

BATCH = 32
_NORMS = BitNetRMSNorm | GraniteRMSNorm | HunYuanDenseV1RMSNorm | LlamaRMSNorm | Qwen2RMSNorm | Qwen3RMSNorm
"""Classes whose weight is what multiplies."""

_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


_OTHER_NAMES = {
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "hunyuan": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
}
"""Names of a family's modules that others call otherwise."""


def module_name(weight: str, family: str = "") -> str:
    """``model.layers.3.mlp.up_proj`` of ``blk.3.ffn_up``; that of a product's input norm is the product's."""
    names = _MODULES | _OTHER_NAMES.get(family, {})
    if weight.startswith("blk."):
        _, layer, name = weight.split(".")
        return f"model.layers.{layer}.{names[name.removesuffix('_norm_in')]}"
    return names[weight]


def quantization(model: GoldenModel, mode: str = "offline") -> transformers.BitNetQuantConfig:
    return transformers.BitNetQuantConfig(
        modules_to_not_convert=["lm_head"], linear_class=model.linear, quantization_mode=mode
    )


def config(model: GoldenModel) -> transformers.PretrainedConfig:
    families = {
        "bitnet": transformers.BitNetConfig,
        "llama": transformers.LlamaConfig,
        "olmo": transformers.OlmoConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "minicpm": transformers.GraniteConfig,
        "qwen35": transformers.Qwen3_5TextConfig,
        "gemma3": transformers.Gemma3TextConfig,
        "hunyuan": transformers.HunYuanDenseV1Config,
    }
    return families[model.family](
        **_scales(model),
        **_hybrid(model),
        **_gemma(model),
        head_dim=model.head_dim,
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        **{"hidden_activation" if model.family == "gemma3" else "hidden_act": model.activation},
        max_position_embeddings=model.context,
        rms_norm_eps=model.eps,
        rope_parameters=_rope_parameters(model),
        tie_word_embeddings=model.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )


def _scales(model: GoldenModel) -> dict[str, float]:
    """MiniCPM's scales as Granite has them: transformers' Granite computes the same with them."""
    if model.family != "minicpm":
        return {}
    embedding, depth, base = model.scales
    return {
        "attention_multiplier": model.head_dim**-0.5,
        "embedding_multiplier": embedding,
        "residual_multiplier": depth / model.layers**0.5,
        "logits_scaling": model.hidden / base,
    }


def _gemma(model: GoldenModel) -> dict[str, Any]:
    """All layers attend to everything, as Microsoft's code has it."""
    if model.family != "gemma3":
        return {}
    return {"layer_types": ["full_attention"] * model.layers, "query_pre_attn_scalar": model.head_dim}


def _rope_parameters(model: GoldenModel) -> dict[str, Any]:
    found = {"rope_type": "default", "rope_theta": model.rope_theta} | _rope(model) | _partial(model)
    return {"full_attention": found, "sliding_attention": found} if model.family == "gemma3" else found


def _hybrid(model: GoldenModel) -> dict[str, Any]:
    net = model.recurrent
    if net is None:
        return {}
    return {
        "linear_num_key_heads": net.k_heads,
        "linear_num_value_heads": net.v_heads,
        "linear_key_head_dim": net.k_dim,
        "linear_value_head_dim": net.v_dim,
        "linear_conv_kernel_dim": net.taps,
        "layer_types": ["linear_attention" if net.at(i) else "full_attention" for i in range(model.layers)],
    }


def _partial(model: GoldenModel) -> dict[str, Any]:
    return {"partial_rotary_factor": model.rotated / model.head_dim} if model.rotated is not None else {}


def _rope(model: GoldenModel) -> dict[str, Any]:
    """transformers takes LongRoPE's long factors once a text is long; here a model has a context from the start."""
    rope = dict(model.rope or {})
    if "long_factor" in rope and model.context > rope["original_max_position_embeddings"]:
        rope["short_factor"] = rope["long_factor"]
    return rope


def hugging_face(model: GoldenModel, weights: Mapping[str, Array] | None = None) -> Any:
    """The model in transformers, with its quantised linears; ``weights`` in the form of the model's own take their
    place."""
    families = {
        "bitnet": transformers.BitNetForCausalLM,
        "llama": transformers.LlamaForCausalLM,
        "olmo": transformers.OlmoForCausalLM,
        "qwen2": transformers.Qwen2ForCausalLM,
        "qwen3": transformers.Qwen3ForCausalLM,
        "minicpm": transformers.GraniteForCausalLM,
        "qwen35": transformers.Qwen3_5ForCausalLM,
        "gemma3": transformers.Gemma3ForCausalLM,
        "hunyuan": transformers.HunYuanDenseV1ForCausalLM,
    }
    hf = families[model.family](config(model)).to(torch.float32).eval()
    if model.group is None:
        hf = replace_with_bitnet_linear(hf, modules_to_not_convert=["lm_head"], quantization_config=quantization(model))
    weights = model.weights() if weights is None else weights
    for name, array in weights.items():
        if name.endswith(".unit"):
            continue
        if name.endswith(".bias"):
            _set_bias(hf.get_submodule(module_name(name.removesuffix(".bias"))), torch.from_numpy(array))
            continue
        if name.endswith((".ssm_dt", ".ssm_a")):
            block = hf.get_submodule(f"model.layers.{name.split('.')[1]}.linear_attn")
            value = torch.from_numpy(array if name.endswith("dt") else np.log(-array))
            setattr(
                block, "dt_bias" if name.endswith("dt") else "A_log", torch.nn.Parameter(value, requires_grad=False)
            )
            continue
        module, unit = hf.get_submodule(module_name(name, model.family)), weights.get(f"{name}.unit")
        if name.endswith("_norm_in"):
            _norm_input(module, torch.from_numpy(array), model.eps)
        elif isinstance(module, Qwen3_5RMSNorm | Gemma3RMSNorm):  # whose weight is what is added to 1
            module.weight = torch.nn.Parameter(torch.from_numpy(array) - 1, requires_grad=False)
        elif isinstance(module, torch.nn.Conv1d):
            module.weight = torch.nn.Parameter(torch.from_numpy(array)[:, None], requires_grad=False)
        elif unit is None:
            module.weight = torch.nn.Parameter(torch.from_numpy(array).float(), requires_grad=False)
        elif model.group is not None:
            owner, _, last = module_name(name).rpartition(".")
            setattr(hf.get_submodule(owner), last, GroupLinear(model, array, unit, biased=f"{name}.bias" in weights))
        elif model.linear == "bitlinear":
            module.weight = pack_weights(torch.from_numpy(array).clone())
            module.weight_scale = torch.from_numpy(1 / unit)  # this class divides by it
        else:
            module.weight = torch.nn.Parameter(torch.from_numpy(array).float(), requires_grad=False)
            module.weight_scale = torch.from_numpy(unit)
    if model.tied:
        hf.lm_head.weight = hf.model.embed_tokens.weight
    if model.block is not None:
        matrix = hadamard(model, model.hidden)
        hf.lm_head.register_forward_pre_hook(lambda _, args: (args[0] @ matrix.to(args[0].dtype),))
        hf.model.embed_tokens.weight.data = hf.model.embed_tokens.weight.data @ matrix.T
    return hf


def hadamard(model: GoldenModel, width: int) -> torch.Tensor:
    """``[width, width]``: what multiplies a row from the right to transform it; its inverse is its transpose."""
    assert model.block is not None
    matrix = np.ones((1, 1))
    while len(matrix) < model.block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = np.kron(np.eye(width // model.block), matrix / np.sqrt(model.block))
    return torch.from_numpy(model.signs(width)[:, None] * blocks).float()


def _norm_input(module: torch.nn.Module, weight: torch.Tensor, eps: float) -> None:
    """Give a product a norm of its own input."""
    module.norm = Qwen3RMSNorm(len(weight), eps)
    module.norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.register_forward_pre_hook(lambda own, args: (own.norm(args[0]),))


def _set_bias(module: torch.nn.Module, bias: torch.Tensor) -> None:
    """A layer's bias, which transformers' own have as a parameter or as a buffer."""
    assert module.bias is not None
    assert module.bias.shape == bias.shape
    is_parameter = isinstance(module.bias, torch.nn.Parameter)
    module.bias = torch.nn.Parameter(bias, requires_grad=False) if is_parameter else bias


class GroupLinear(torch.nn.Module):
    """A linear layer of ternary weights with a scale for each group of columns, its input rounded to int8 by row."""

    def __init__(self, model: GoldenModel, codes: Array, units: Array, *, biased: bool) -> None:
        super().__init__()
        self.turn = None if model.block is None else hadamard(model, codes.shape[1])
        weight = codes * np.repeat(units.astype(np.float32), codes.shape[1] // units.shape[1], axis=1)
        self.weight = torch.nn.Parameter(torch.from_numpy(weight), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(len(weight)), requires_grad=False) if biased else None

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.turn is None else x @ self.turn.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.turned(x)
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        return torch.nn.functional.linear((x / scale).round().clamp(-128, 127) * scale, self.weight, self.bias)


class Watched:
    """A model in float32, and in float64 beside it, both watched for the inputs of their quantised layers."""

    def __init__(self, model: GoldenModel, hf: Any) -> None:
        self.model, self.hf = model, hf
        self._exact = copy.deepcopy(hf).double()
        for module in self._exact.modules():
            if isinstance(module, BitLinear):
                module.dtype = torch.float64
            elif isinstance(module, _NORMS):
                module.forward = types.MethodType(_norm_of_its_type, module)
            elif isinstance(module, Qwen3_5RMSNorm | Gemma3RMSNorm):
                module.forward = types.MethodType(_centred_norm_of_its_type, module)
            elif isinstance(module, Qwen3_5RMSNormGated):
                module.forward = types.MethodType(_gated_norm_of_its_type, module)
            elif isinstance(module, OlmoLayerNorm):
                module.forward = types.MethodType(_layer_norm_of_its_type, module)
        self._seen: dict[tuple[Any, int, str], list[torch.Tensor]] = {}
        for layer, part in [(i, part) for i in range(model.layers) for part in self._parts(i)]:
            for watched in (self.hf, self._exact):
                module = watched.get_submodule(module_name(f"blk.{layer}.{part}"))
                module.register_forward_pre_hook(self._watch(watched, layer, part))
        self.run(np.arange(model.vocab)[:, None], 0)
        self.calm: Array = np.flatnonzero(np.all([self._clear(0, part) for part in self._cached(0)], axis=0))
        """Tokens whose codes in the first layer are clear: what they put into its cache depends on nothing else."""

    def _cached(self, layer: int) -> tuple[str, ...]:
        """Products of a layer before its state or cache whose inputs are quantised each for itself."""
        if self.model.input_norms:
            return "attn_q", "attn_k", "attn_v"
        return ("attn_qkv",) if self.model.recurrent is not None and self.model.recurrent.at(layer) else ("attn_q",)

    def _parts(self, layer: int) -> tuple[str, ...]:
        """All such products of a layer."""
        cached = self._cached(layer)
        up = ("ffn_up",) if self.model.input_norms else ()
        return *cached, "ssm_out" if "attn_qkv" in cached else "attn_output", "ffn_gate", *up, "ffn_down"

    def _watch(self, watched: Any, layer: int, part: str) -> Callable[[Any, tuple[torch.Tensor]], None]:
        def hook(_: Any, args: tuple[torch.Tensor]) -> None:
            module = watched.get_submodule(module_name(f"blk.{layer}.{part}"))
            y = (module.turned(args[0]) if isinstance(module, GroupLinear) else args[0]).double()
            quotient = 127 * y / y.abs().amax(-1, keepdim=True).clamp(min=1e-5)
            self._seen.setdefault((watched, layer, part), []).append(quotient)

        return hook

    def _clear(self, layer: int, part: str) -> Array:
        """``bool[batch, n]``: which tokens' codes are clear of a border at one layer's input."""
        quotient, exact = (torch.cat(self._seen[w, layer, part], 1) for w in (self.hf, self._exact))
        gap = (quotient - quotient.floor() - 0.5).abs().amin(-1)
        clear: Array = (gap > CLEAR * (quotient - exact).abs().amax(-1)).numpy()
        return clear

    @torch.no_grad()
    def run(self, prompts: Array, count: int) -> tuple[Array, Array, Array]:
        """Feed ``prompts[batch, n]`` and ``count`` greedy tokens after them.

        Returns:
            Logits ``f32[batch, n + count, V]``; the greedy tokens ``[batch, count]``; and ``bool[batch, n + count]``,
            which rows of the logits are determined: their own token's codes are clear, and all those that reach them
            through keys and values, which the last layer's after its attention do not.
        """
        self._seen.clear()
        ids, cache, tokens, rows = torch.from_numpy(prompts.astype(np.int64)), None, [], []
        text = ids
        for i in range(count + 1):
            out = self.hf(ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            rows.append(out.logits.numpy())
            if i < count:
                text = torch.cat([text, ids], 1)
        tokens = text[:, prompts.shape[1] :].numpy()
        self._exact(text)
        determined: Array = np.ones(text.shape, bool)
        for _, layer, part in self._seen:
            first = part in self._cached(layer)
            own, through_cache = self._clear(layer, part), first or layer < self.model.layers - 1
            determined &= np.logical_and.accumulate(own, axis=1) if through_cache else own
        return np.concatenate(rows, axis=1), tokens, determined

    def continued(
        self, length: int, prompt: Callable[[int], Array], attempts: int = 20_000
    ) -> tuple[Array, Array, Array, int]:
        """A prompt of some length, continued greedily, that is determined where such a one can be found.

        At the least the row after the prompt is, and after a single token those of the continuation (but with recurrent
        layers, whose states depend on more codes). In several layers that takes more luck the longer the prompt is, and
        is given up; in a single one a row depends on few codes but its own token's.

        Args:
            prompt: Makes the prompt of an attempt.
            attempts: How many prompts to try; after them one that is not determined is taken.

        Returns:
            The tokens ``[n + CONTINUED]``, their logits, which rows are determined, and how many prompts were tried.
        """
        wanted = slice(length - 1, None if length == 1 and self.model.recurrent is None else length)
        if self.model.layers > 1 and length > 7:
            attempts = 1
        if self.model.recurrent is not None:
            attempts = min(attempts, 2 * BATCH)
        batch = min(attempts, BATCH if length <= 40 else 1)
        for first in range(0, attempts, batch):
            prompts = np.stack([prompt(first + i) for i in range(batch)])
            good = np.flatnonzero(self.run(prompts, CONTINUED)[2][:, wanted].all(axis=1))
            for i in good if first + batch < attempts else [*good, batch - 1]:
                # Alone, a prompt is summed up in another order than in a batch: it must still be determined.
                logits, tokens, rows = (a[0] for a in self.run(prompts[i : i + 1], CONTINUED))
                if rows[wanted].all() or (i == batch - 1 and first + batch >= attempts):
                    return np.concatenate([prompts[i], tokens]), logits, rows, first + int(i) + 1
        raise AssertionError("the last prompt is always taken")


def _norm_of_its_type(self: Any, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm in the type of its input; transformers' own computes it in float32 whatever the model's type is."""
    out: torch.Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
    return out


def _centred_norm_of_its_type(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
    return out


def _gated_norm_of_its_type(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _norm_of_its_type(self, x) * torch.nn.functional.silu(gate)
    return out


def _layer_norm_of_its_type(self: Any, x: torch.Tensor) -> torch.Tensor:
    """LayerNorm in the type of its input, as above, with the epsilon that transformers' own has in its code."""
    return torch.nn.functional.layer_norm(x, self.normalized_shape, eps=1e-5)


def make(model: GoldenModel) -> dict[str, Array]:
    """A golden file's contents for each prompt: its tokens and the greedy ones after it, and rows of logits with their
    places and whether they are determined."""
    watched, made = Watched(model, hugging_face(model)), dict[str, Array]()
    for length in PROMPTS:
        prompt = partial(model.prompt, length, watched.calm)
        text, logits, determined, attempts = watched.continued(length, prompt)
        within = np.flatnonzero(determined[:length]) if determined[:length].any() else np.arange(length)
        some = within[np.linspace(0, len(within) - 1, 4).astype(int)]
        rows = np.unique([*some, *range(length - 1, length + CONTINUED)])
        made |= {
            f"{length}.text": text.astype(np.int16),
            f"{length}.rows": rows.astype(np.int16),
            f"{length}.logits": logits[rows],
            f"{length}.determined": determined[rows],
            f"{length}.attempts": np.array(attempts),
        }
        share = f"{determined[rows].sum()} of {len(rows)} rows determined"
        print(f"{model.name}: {length} tokens, prompt {attempts}, {share}", flush=True)
    made["weights"] = np.array(checksum(model.weights()))
    made["versions"] = np.array([f"transformers {transformers.__version__}", f"torch {torch.__version__}"])
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    for golden in [model for model in MODELS if not sys.argv[1:] or model.name in sys.argv[1:]]:
        contents = make(golden)
        golden.path.parent.mkdir(exist_ok=True)
        np.savez_compressed(golden.path, allow_pickle=False, **contents)
        print(f"{golden.path.name}: {golden.path.stat().st_size} bytes", flush=True)
