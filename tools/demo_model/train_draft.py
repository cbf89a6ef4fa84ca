"""Train a draft layer over the frozen demo model: ``python -m demo_model.train_draft --out DIR`` (PyTorch, one GPU; a
CPU does for a few steps).

Writes ``draft.gguf``, for ``bitnet run --draft``, and ``draft_log.csv`` to DIR, and the model's tokenizer.
"""

from __future__ import annotations

import argparse
import os
import time
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
from demo_model.train import SHARD, Log, Optimizer, batches, replies
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
    optimizer = Optimizer(layer, args.lr)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loss_of = torch.compile(draft_loss) if device.type == "cuda" else draft_loss
    unseen = conversations(model, tokenizer, args.questions, args.answer)

    started = time.monotonic()

    def seconds() -> float:
        return time.monotonic() - started

    log = Log(args.out / "draft_log.csv", FIELDS)
    total = torch.zeros((), device=device)
    step, since, first, done = 0, 0, 0.0, 0.0
    made = batches(path, args.seed, max(SHARD, args.rows), model.shape.context_length, args.workers)
    for rows in (part for many in made for part in np.split(many, len(many) // args.rows)):
        if done >= 1:
            break
        batch = torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
        loss, _ = loss_of(layer, model, batch & (tokens.TAUGHT - 1), batch >= tokens.TAUGHT, args.depth, dtype)
        rate = optimizer.step(loss, done)
        total += loss.detach()
        step, since = step + 1, since + 1
        if step == 1:  # which took long, for the loss was compiled
            first = seconds()
        done = max(step / args.steps, (seconds() - first) / max(1.0, args.minutes * 60 - first))
        evaluated = step % args.eval_every == 0 or done >= 1
        if evaluated or step % args.log_every == 0:
            entry: dict[str, object] = {"step": step, "tokens": step * rows.size, "seconds": round(seconds(), 1)}
            entry |= {"learning_rate": f"{rate:.2e}", "loss": f"{float(total) / since:.4f}"}
            total.zero_()
            since = 0
            if evaluated:
                found = accepted(layer, model, unseen)
                entry |= {f"accepted {i + 1}": f"{share:.4f}" for i, share in enumerate(found)}
                layer.write(args.out / "draft.gguf", names)
            log.write(entry)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo_model.train_draft", description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, default=default_model_path(), help="an exported model (default: bitnet's)"
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument(
        "--rows", type=int, default=64, help="rows of 1024 tokens in a batch; a multiple or a divisor of 64"
    )
    parser.add_argument("--depth", type=int, default=5, help="tokens of a draft in training")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1_000, help="of the text; the model's own was made with 0")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="end after so long, if not all steps are done by then"
    )
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that make text"
    )
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=1000)
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
