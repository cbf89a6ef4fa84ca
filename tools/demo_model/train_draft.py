"""Train a draft layer over the frozen demo model: ``python -m demo_model.train_draft --out DIR`` (PyTorch, one GPU; a
CPU does for a few steps).

Writes ``draft.gguf``, for ``bitnet run --draft``, and ``draft_log.csv`` to DIR, and the model's tokenizer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
import torch

from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import open_model
from demo_model import tokens
from demo_model.draft import WINDOW, DraftLayer, draft_loss, frozen
from demo_model.model import DemoModel
from demo_model.train import SHARD, Log, Optimizer, add_options, batches, fit, replies
from demo_model.unseen import problems, story_requests

DEPTH = 7
"""Tokens of a draft in the evaluation: the longest that the engine makes."""
FIELDS = ("step", "tokens", "seconds", "learning_rate", "loss", *(f"accepted {i + 1}" for i in range(DEPTH)))


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    file = open_model(args.model)
    names, merges = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    assert isinstance(names, list)
    assert isinstance(merges, list)
    tokenizer, path = tokens.of_vocabulary(names, merges), args.out / "tokenizer.json"
    tokenizer.save(str(path))

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # in TF32, int8 codes and their sums are exact
    model = frozen(file).to(device)
    layer = DraftLayer(model.shape).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    compiled = torch.compile(draft_loss) if device.type == "cuda" else draft_loss
    unseen = conversations(model, tokenizer, args.questions, args.answer)

    def loss_of(ids: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = compiled(layer, model, ids, taught, args.depth, dtype)[0]
        return loss

    def evaluate() -> dict[str, float]:
        layer.write(args.out / "draft.gguf", names)
        return {f"accepted {i + 1}": share for i, share in enumerate(accepted(layer, model, unseen))}

    made = batches(path, args.seed, max(SHARD, args.rows), model.shape.context_length, args.workers)
    parts = (part for many in made for part in np.split(many, len(many) // args.rows))
    log = Log(args.out / "draft_log.csv", FIELDS)
    fit(parts, loss_of, Optimizer(layer, args.lr), evaluate, log, args, device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo_model.train_draft", description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, default=default_model_path(), help="an exported model (default: bitnet's)"
    )
    parser.add_argument(
        "--rows", type=int, default=64, help="rows of 1024 tokens in a batch; a multiple or a divisor of 64"
    )
    parser.add_argument("--depth", type=int, default=5, help="tokens of a draft in training")
    add_options(parser, steps=1_000_000, seed=1_000, log_every=100, eval_every=1000)  # the model's own text had seed 0
    parser.add_argument("--questions", type=int, default=20, help="unseen ones of each kind, at each evaluation")
    parser.add_argument("--answer", type=int, default=200, help="maximum tokens of an answer to them")
    return parser.parse_args()


def conversations(model: DemoModel, tokenizer: tokenizers.Tokenizer, count: int, limit: int) -> tokens.Rows:
    """The model's own greedy answers to questions that it was not trained on, one a row of :data:`WINDOW` tokens."""
    rows = []
    asked = iter([*problems(count, seed=2), *story_requests(2 * count, seed=2)])
    while some := list(islice(asked, 128)):
        for question, answer in zip(some, replies(model, tokenizer, some, limit), strict=True):
            (ids,) = tokens.encode(tokenizer, [[("user", question), ("assistant", answer)]])
            rows.append(ids[:WINDOW] + [tokens.PAD] * (WINDOW - len(ids)))
    return np.array(rows, np.uint16)


@torch.no_grad()
def accepted(layer: DraftLayer, model: DemoModel, rows: tokens.Rows) -> Sequence[float]:
    """The shares of drafts whose first token is right, whose first two are, and so on, over all tokens of answers."""
    shares, weights = [], []
    for part in np.array_split(rows, max(1, len(rows) // 16)):
        batch = torch.from_numpy(part.astype(np.int64)).to(model.token_embd.device)
        taught = batch >= tokens.TAUGHT
        _, found = draft_loss(layer, model, batch & (tokens.TAUGHT - 1), taught, DEPTH, torch.float32)
        shares.append(found.cpu().numpy())
        weights.append(int(taught.sum()))
    return [float(share) for share in np.average(shares, axis=0, weights=weights)]


if __name__ == "__main__":
    main()
