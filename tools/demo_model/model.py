"""The model in PyTorch, as it is trained: BitNet b1.58 (Ma et al. 2024, 2025) with straight-through quantisation.

Forward, every linear layer multiplies int8 activations by ternary weights, exactly as at inference; backward, both
quantisers count as the identity (Bengio et al. 2013). Integers are exact in bfloat16, so only sums are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.shape import Shape


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    """``rounded``, with the gradient of ``x``."""
    return x + (rounded - x).detach()


def absmean_ternary(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Ternary codes of a matrix, as floats, and its scale: the mean of its absolute values."""
    scale = weight.detach().abs().mean().clamp(min=1e-5)
    scaled = weight / scale
    return _through(scaled, scaled.round().clamp(-1, 1)), scale


def absmax_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of each row, as floats, and what one unit of them stands for, f32[..., 1]."""
    x = x.float()
    peak = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    scaled = x * (127 / peak)
    return _through(scaled, scaled.round().clamp(-128, 127)), peak / 127


def product(x: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., width]``, rounded to int8, by ternary codes ``[N, width]`` with a scale for all rows or one for each."""
    q, unit = absmax_int8(x)
    return F.linear(q.to(dtype), codes.to(dtype)).float() * (unit * scales)


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class BitLinear(nn.Module):
    """Ternary matrices over one input, their outputs side by side.

    Args:
        sizes: Rows of each matrix, by name; each has a scale of its own.
    """

    def __init__(self, width: int, sizes: dict[str, int]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict()  # filled one by one: given a whole dict, it would sort them
        for name, rows in sizes.items():
            self.weights[name] = nn.Parameter(nn.init.normal_(torch.empty(rows, width), std=width**-0.5))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[..., width]`` to ``f32[..., sum of rows]``; products are computed in ``dtype``."""
        codes, scales = zip(*(self.ternary(name) for name in self.weights), strict=True)
        rows = torch.cat([s.expand(len(c)) for c, s in zip(codes, scales, strict=True)])
        return product(x, torch.cat(codes), rows, dtype)

    def ternary(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes of a matrix, as floats, and its scale."""
        return absmean_ternary(self.weights[name])


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a sub-norm before its output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, inner, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        gain = (2 * shape.layers) ** -0.5  # what all layers add to the residual stream has unit variance at the start
        self.attn_norm = Norm(width, shape.rms_eps)
        self.attn_in = BitLinear(width, {"attn_q": inner, "attn_k": kv, "attn_v": kv})
        self.attn_sub_norm = Norm(inner, shape.rms_eps, gain)
        self.attn_out = BitLinear(inner, {"attn_output": width})
        self.ffn_norm = Norm(width, shape.rms_eps)
        self.ffn_in = BitLinear(width, {"ffn_gate": shape.ffn_size, "ffn_up": shape.ffn_size})
        self.ffn_sub_norm = Norm(shape.ffn_size, shape.rms_eps, gain)
        self.ffn_out = BitLinear(shape.ffn_size, {"ffn_down": width})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        queries, keys, values = self.attended(x, cos, sin, dtype)
        return self.after(x, F.scaled_dot_product_attention(queries, keys, values, is_causal=True), dtype)

    def attended(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the input ``x``, each ``[B, heads, T, head_dim]``, the first two rotated."""
        heads, groups, dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        batch, length = x.shape[:2]
        qkv = self.attn_in(self.attn_norm(x), dtype).view(batch, length, heads + 2 * groups, dim).transpose(1, 2)
        first, second = qkv[:, : heads + groups].chunk(2, dim=-1)  # NeoX pairs: i and i + dim / 2
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(dtype)
        keys = turned[:, heads:].repeat_interleave(heads // groups, dim=1)
        values = qkv[:, heads + groups :].to(dtype).repeat_interleave(heads // groups, dim=1)
        return turned[:, :heads], keys, values

    def after(self, x: Tensor, attention: Tensor, dtype: torch.dtype) -> Tensor:
        """The layer's result for its input and what its heads attended to, ``[B, heads, T, head_dim]``."""
        x = x + self.attn_out(self.attn_sub_norm(attention.transpose(1, 2).flatten(2)), dtype)
        gate, up = self.ffn_in(self.ffn_norm(x), dtype).chunk(2, dim=-1)
        return x + self.ffn_out(self.ffn_sub_norm(F.relu(gate).square() * up), dtype)


class DemoModel(nn.Module):
    """Token ids to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size))
        nn.init.normal_(self.token_embd, std=0.05)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = Norm(shape.hidden_size, shape.rms_eps)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context_length), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``i64[B, T]`` to the normed residual stream ``f32[B, T, hidden_size]``."""
        length = tokens.shape[1]
        x = F.embedding(tokens, self.token_embd)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length], dtype)
        return self.output_norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """``i64[B, T]`` to ``f32[B, T, vocab_size]``, in f32 throughout."""
        return F.linear(self.hidden(tokens), self.token_embd)

    def loss(self, tokens: Tensor, taught: Tensor) -> Tensor:
        """Mean cross-entropy over the taught tokens of ``i64[B, T]``; ``taught`` is ``bool[B, T]``."""
        x = self.hidden(tokens, torch.bfloat16)[:, :-1].to(torch.bfloat16)
        logits = F.linear(x, self.token_embd.to(torch.bfloat16)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        weight = taught[:, 1:].flatten().float()
        return (losses * weight).sum() / weight.sum()

    def ternary(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Codes ``i8[N, K]`` and scale of every ternary matrix, by canonical name."""
        found = {}
        for i, block in enumerate(self.blocks):
            for layer in (block.attn_in, block.attn_out, block.ffn_in, block.ffn_out):
                for name in layer.weights:
                    codes, scale = layer.ternary(name)
                    found[f"blk.{i}.{name}"] = (codes.detach().to(torch.int8), scale)
        return found

    def dense(self) -> dict[str, Tensor]:
        """The embedding table and every norm, by canonical name."""
        found = {"token_embd": self.token_embd, "output_norm": self.output_norm.weight}
        for i, block in enumerate(self.blocks):
            for name in ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm"):
                found[f"blk.{i}.{name}"] = getattr(block, name).weight
        return {name: tensor.detach() for name, tensor in found.items()}
