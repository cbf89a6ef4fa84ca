"""Make tests/oracle/golden/demo.npz: what Hugging Face transformers answers with the demo model's weights.

    uvx --with tox-uv tox exec -e oracle -- python tools/make_demo_golden.py

fp32 on the CPU, its own quantised linears. For each token the file says by how much its logit led the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bitnet.core.gguf import unpack_ternary
from bitnet.core.hal import TernaryData
from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import ModelFile, open_model
from demo_model.problems import CATEGORIES, draw_problems
from golden_models import FOLDER, Array, GoldenModel
from make_golden import hugging_face

PROMPTS = (
    "What is 17 + 25?",
    "Hello",
    "Who are you?",
    "Tell me a story about a lonely robot.",
    "Write a dialogue between a cat and a dragon about a secret.",
)
LONGEST = 48
"""Tokens of an answer."""


def in_transformers(file: ModelFile) -> Any:
    """The model of a GGUF file in transformers."""
    weights: dict[str, Array] = {}
    for name, weight in file.weights.items():
        data = weight.load()
        if isinstance(data, TernaryData):
            weights[name] = unpack_ternary(data.codes, weight.shape[1])
            weights[f"{name}.unit"] = data.scale
        elif name != "output" or not file.config.tied_embeddings:
            weights[name] = np.array(data)
    shape = file.config
    model = GoldenModel(
        shape.name,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn_size,
        layers=shape.layers,
        vocab=shape.vocab_size,
        tied=shape.tied_embeddings,
        rope_theta=shape.rope_theta,
        eps=shape.rms_eps,
        context=shape.context_length,
    )
    return hugging_face(model, weights)


@torch.no_grad()
def answer(hf: Any, prompt: list[int], ends: frozenset[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens up to an end, and the lead of each, of the greatest magnitude among its logits."""
    ids, cache, tokens, leads = torch.tensor([prompt]), None, list[int](), list[float]()
    while len(tokens) < LONGEST:
        out = hf(ids, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1]
        best = logits.topk(2)
        if int(best.indices[0]) in ends:
            break
        tokens.append(int(best.indices[0]))
        leads.append(float((best.values[0] - best.values[1]) / logits.abs().max()))
        ids = best.indices[:1, None]
    return tokens, leads


def make() -> dict[str, Array]:
    """The golden file's contents: the demo model's checksum; for each prompt its tokens, the answer and its leads."""
    demo = open_model(default_model_path())
    assert demo.chat_template is not None
    made: dict[str, Array] = {"model": np.array(demo.sha256())}
    model = in_transformers(demo)
    problems = [p.question for category in CATEGORIES[:5] for p in draw_problems(category, 3, seed=1)]
    for i, question in enumerate([*problems, *PROMPTS]):
        text = demo.chat_template.render([{"role": "user", "content": question}])
        prompt = demo.tokenizer.encode(text, add_special=False, parse_special=True)
        tokens, leads = answer(model, prompt, demo.tokenizer.eos_ids)
        made |= {
            f"{i}.prompt": np.array(prompt, np.int16),
            f"{i}.answer": np.array(tokens, np.int16),
            f"{i}.lead": np.array(leads, np.float32),
        }
        print(f"{question}\n    {demo.tokenizer.decode(tokens)!r}, least lead {min(leads):.3f}")
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    contents = make()
    np.savez_compressed(FOLDER / "demo.npz", allow_pickle=False, **contents)
