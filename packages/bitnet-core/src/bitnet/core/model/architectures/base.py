"""What a family's record says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bitnet.core.gguf import MetadataValue
from bitnet.core.hal import Activation

RopeStyle = Literal["neox", "interleaved"]
ACTIVATIONS: Mapping[str, Activation] = {
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class HFClass:
    """A class that ``config.json`` names under ``architectures``.

    Attributes:
        name: Such as ``LlamaForCausalLM``.
        architecture: The GGUF name of its models.
        defaults: Values of keys that ``config.json`` lacks: the defaults of the class's own configuration. None:
            derived from other keys.
        model_type: The ``model_type`` that stands for the class where ``architectures`` is missing, or None.
    """

    name: str
    architecture: str
    defaults: Mapping[str, Any]
    model_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family of models with one graph.

    Attributes:
        gguf_names: Values of ``general.architecture``.
        hf_classes: Classes of Hugging Face folders.
        title: The published models' name, from the activation and ``tokenizer.ggml.pre``.
        rope_style: How rotary embeddings pair the elements that they rotate.
        activation: The activation of a GGUF file that names none, from its metadata.
        floats: What float weights are in a folder without a quantisation: ``master`` weights, which are quantised at
            every use, ``ternary`` values already, ternary values with a scale for each of the ``groups`` of columns or
            each of the ``rows``, or those of a model that is ``not ternary``, which is refused.
        master_weights: Whether float weights of a GGUF file are master weights.
        sub_norms: Whether folders' models have RMSNorms before the output projections; a GGUF file's tensors say it.
        head_norms: Whether folders' models have RMSNorms of q's and k's heads; a GGUF file's tensors say it.
        norms_last: Whether those norms come after the rotary embedding.
        ntk_alpha: Whether folders' ``dynamic`` scaling of rotary frequencies may have an ``alpha``, which stretches the
            base once for all positions.
        qkv_biases: Whether q, k and v have biases.
        layer_norms: Whether the norms of the residual stream are LayerNorms without weights.
        eps: The norms' epsilon, where folders have no key for it.
        stream_scales: Whether embeddings, residuals and logits have scales.
        ffn_norm: GGUF name of the norm before the feed-forward layer.
        recurrent: Whether some layers are recurrent (Gated DeltaNet).
        output_gate: Whether the attention's result is multiplied by a gate, whose rows are in ``attn_q``.
        experts: Whether the feed-forward layers are mixtures of experts, and some layers attend to a window.
        input_norms: Whether a GGUF file may have RMSNorms of the inputs of each product.
        sandwiched: Whether sub-layers' results have RMSNorms, and embeddings are multiplied by the square root of their
            width.
    """

    gguf_names: tuple[str, ...]
    hf_classes: tuple[HFClass, ...]
    title: Callable[[Activation, str], str]
    rope_style: RopeStyle
    activation: Callable[[Mapping[str, MetadataValue]], Activation] = lambda metadata: "silu"
    floats: Literal["master", "ternary", "groups", "rows", "not ternary"] = "not ternary"
    master_weights: bool = False
    sub_norms: bool = False
    head_norms: bool = False
    norms_last: bool = False
    ntk_alpha: bool = False
    qkv_biases: bool = False
    layer_norms: bool = False
    eps: float | None = None
    stream_scales: bool = False
    ffn_norm: str = "ffn_norm"
    recurrent: bool = False
    output_gate: bool = False
    experts: bool = False
    input_norms: bool = False
    sandwiched: bool = False

    @property
    def partly_rotated(self) -> bool:
        """Whether heads may be rotated in part."""
        return self.recurrent or self.experts


LLAMA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The defaults of transformers' ``LlamaConfig`` (5.23), on which those of other classes are built."""
QWEN2_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""The defaults of transformers' ``Qwen2Config`` (5.23)."""
