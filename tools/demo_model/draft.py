"""The draft layer of the demo model in PyTorch, as it is trained over the frozen model, and its GGUF file (ADR 0123).

Drafts are made as the engine makes them: the first token from the model's states, each further one from the layer's own
state and the token before it. So the layer is trained on its own states, several tokens deep.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource, i2s_bytes, write_gguf, writer
from bitnet.core.gguf.ternary import unpack_ternary
from bitnet.core.hal import TernaryWeight
from bitnet.core.model.file import ModelFile
from demo_model.export import ARCHITECTURE, sizes
from demo_model.model import BitLinear, Block, DemoModel, Norm, product
from demo_model.shape import Shape

WINDOW = 256
"""Tokens that the layer attends to at most in training; the first of each window has none before it."""

LATER = 0.8
"""Weight of each further token of a draft in the loss, as a share of that before it."""


def shape_of(file: ModelFile) -> Shape:
    """The shape of a demo model's file."""
    config = file.config
    return Shape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn_size=config.ffn_size,
        context_length=config.context_length,
        rms_eps=config.rms_eps,
        rope_theta=config.rope_theta,
    )


def frozen(file: ModelFile) -> DemoModel:
    """The model of a file, as it computes at inference; nothing of it is trained."""
    model = DemoModel(shape_of(file)).requires_grad_(False)
    matrices = {f"blk.{i}.{name}": part for i, block in enumerate(model.blocks) for name, part in _matrices(block)}
    for name, weight in file.weights.items():
        if isinstance(weight, TernaryWeight):
            codes, scale = weight.load()
            values = torch.from_numpy(unpack_ternary(codes, weight.shape[1]).astype(np.float32))
            # Numbers whose codes and mean magnitude are those of the file.
            matrices[name].copy_(values * (float(scale[0]) / values.abs().mean()))
        elif name != "output":
            model.dense()[name].copy_(torch.from_numpy(weight.load().astype(np.float32)))
    return model


def _matrices(block: nn.Module) -> list[tuple[str, Tensor]]:
    parts = [part for part in block.children() if isinstance(part, BitLinear)]
    return [(name, part.weights[name]) for part in parts for name in part.weights]


class DraftLayer(nn.Module):
    """One more layer, which predicts the token after the next one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.shape = shape
        self.enorm, self.hnorm = Norm(width, shape.rms_eps), Norm(width, shape.rms_eps)
        self.eh_proj = BitLinear(2 * width, {"eh_proj": width})
        self.block = Block(replace(shape, layers=1))
        self.head_norm = Norm(width, shape.rms_eps)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(WINDOW + 16), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def unrolled(
        self, embedded: list[Tensor], states: Tensor, run: Tensor, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """The layer's states after drafting one token, two tokens, and so on, at every position of some windows.

        Args:
            embedded: ``f32[B, W, hidden]`` for each token drafted: the embeddings of the tokens that follow a position.
            states: ``f32[B, W, hidden]``: the model's state before each position.
            run: ``i64[B, W]``: positions attend to those with the same number, up to themselves.

        Returns: ``f32[B, W, hidden]`` for each token drafted; the model's head makes logits of them.
        """
        length = states.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=states.device).triu(1)
        hidden_from = (later | (run[:, None, :] != run[:, :, None]))[:, None]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found: list[Tensor] = []
        for step, tokens in enumerate(embedded):
            x = self._joined(tokens, states, dtype)
            cos, sin = self.cos[step : step + length], self.sin[step : step + length]
            q, k, v = self.block.attended(x, cos, sin, dtype)
            keys.append(k)
            values.append(v)
            # Those accepted before, then the tokens that were drafted from the same position.
            scores = [(q @ keys[0].transpose(2, 3)).masked_fill(hidden_from, -torch.inf)]
            scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
            weights = (torch.cat(scores, -1).float() * self.shape.head_dim**-0.5).softmax(-1).to(dtype)
            attended = weights[..., :length] @ values[0]
            for i, own in enumerate(values[1:]):
                attended = attended + weights[..., length + i, None] * own
            states = self.head_norm(self.block.after(x, attended, dtype))
            found.append(states)
        return found

    def _joined(self, embedded: Tensor, states: Tensor, dtype: torch.dtype) -> Tensor:
        """``eh_proj`` of both halves, each rounded to int8 by itself, as the engine computes it."""
        codes, scale = self.eh_proj.ternary("eh_proj")
        ours, theirs = codes.chunk(2, dim=1)
        return product(self.enorm(embedded), ours, scale, dtype) + product(self.hnorm(states), theirs, scale, dtype)

    def write(self, file: Path, tokens: list[str]) -> None:
        """Write the layer as a draft file for a model with this vocabulary."""
        prefix = f"blk.{self.shape.layers}"
        tensors: dict[str, writer.Tensor] = {}
        for start, part in ((f"{prefix}.nextn.", self), (f"{prefix}.", self.block)):
            for module in part.children():
                for name in module.weights if isinstance(module, BitLinear) else ():
                    codes, scale = module.ternary(name)
                    array = codes.detach().cpu().numpy().astype(np.int8)
                    data = i2s_bytes(array, float(scale))
                    tensors[f"{start}{name}.weight"] = TensorSource(array.shape, GGMLType.I2_S, data)
        norms = {
            "nextn.enorm": self.enorm,
            "nextn.hnorm": self.hnorm,
            "nextn.shared_head_norm": self.head_norm,
            **{name: getattr(self.block, name) for name in ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm")},
        }
        tensors |= {f"{prefix}.{name}.weight": norm.weight.detach().cpu().numpy() for name, norm in norms.items()}
        write_gguf(file, self._metadata(tokens), tensors)

    def _metadata(self, tokens: list[str]) -> dict[str, MetadataValue]:
        return {
            "general.architecture": ARCHITECTURE,
            "general.type": "model",
            "general.name": "BitNet Demo, draft layer",
            "general.license": "mit",
            **sizes(replace(self.shape, layers=self.shape.layers + 1)),
            f"{ARCHITECTURE}.nextn_predict_layers": 1,
            "tokenizer.ggml.tokens": tokens,
        }


def draft_loss(
    layer: DraftLayer, model: DemoModel, tokens: Tensor, taught: Tensor, depth: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The loss over drafts of ``depth`` tokens behind every token that the model is taught to say, and the part of
    them that are right with all before them, ``f32[depth]``.

    The loss of a drafted token is its cross-entropy against the model's own distribution. ``tokens`` is ``i64[B, T]``,
    ``taught`` ``bool[B, T]``; T is a multiple of :data:`WINDOW` or less than it.
    """
    with torch.no_grad():
        states = model.hidden(tokens, torch.float32)
    window = min(WINDOW, tokens.shape[1])

    def windows(x: Tensor, ahead: int) -> Tensor:
        """What is so far ahead of each position, in windows; what comes around from the other end is not counted."""
        return x.roll(-ahead, 1).reshape(-1, window, *x.shape[2:])

    run = (taught & ~taught.roll(1, 1)).long().cumsum(1) * 2 + taught
    embedded = [windows(F.embedding(tokens, model.token_embd), ahead) for ahead in range(depth)]
    found = layer.unrolled(embedded, windows(states, -1), windows(run, 0), dtype)
    table = model.token_embd.to(dtype)
    position = windows(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), 0)
    counted = windows(taught, 0) & (position > 0)
    right, total, shares = counted, torch.zeros((), device=tokens.device), []
    for ahead, drafted in enumerate(found):
        # The drafted token and all before it belong to one answer.
        counted = counted & windows(taught, ahead + 1) & (position + ahead + 1 < tokens.shape[1])
        logits = F.linear(drafted.to(dtype), table).float()
        with torch.no_grad():
            wanted = F.linear(windows(states, ahead).to(dtype), table).float()
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.softmax(-1).flatten(0, 1), reduction="none")
        weight = counted.flatten().float()
        total = total + (losses * weight).sum() / weight.sum().clamp(min=1) * LATER**ahead
        likeliest = wanted.argmax(-1)
        right = right & counted & (logits.argmax(-1) == likeliest)
        shares.append(right.sum() / counted.sum().clamp(min=1))
        right = right & (likeliest == windows(tokens, ahead + 1))  # the next token follows what was drafted
    return total, torch.stack(shares)
