"""Train the demo model: ``python -m demo_model.train --out DIR`` (PyTorch, one GPU; a CPU does for a few steps).

Writes ``tokenizer.json``, unless there is one, ``log.csv`` and ``weights.npz`` (to export) to DIR.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch

from demo_model import tokens
from demo_model.corpus import documents
from demo_model.model import DemoModel
from demo_model.problems import CATEGORIES, draw_problems
from demo_model.shape import Shape

SHARD = 64
"""Rows a worker makes at a time."""
TOKENIZER_DOCUMENTS = 60_000
WARM_UP = 0.02
"""Part of the training in which the learning rate rises."""
PROMPTS = (
    "What is 17 + 25?",
    "What does 735 + 368 equal?",
    "What is 21 less than 50?",
    "What is 5000000 + 1?",
    "What is 48 x 12?",
    "What is 2^10?",
    "Who was Napoleon?",
    "Tell me a story about a brave fox.",
    "Write a dialogue between an owl and a robot.",
    "Who are you?",
    "How many r's are in strawberry?",
    "Write garden backwards.",
    "Bonjour!",
    "Best programming language?",
)
"""What the model is asked at the end."""
FIELDS = ("step", "tokens", "seconds", "learning_rate", "loss", *(category.name for category in CATEGORIES))

_worker: list[tuple[tokenizers.Tokenizer, int, int]] = []
"""What a process that makes text works with: tokenizer, seed and length of rows."""


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    path = args.out / "tokenizer.json"
    shape = Shape()
    if not path.exists():
        tokens.train(shape.vocab_size, args.seed, TOKENIZER_DOCUMENTS).save(str(path))
    tokenizer = tokens.load(path)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = DemoModel(shape).to(device)
    if args.init is not None:
        read_weights(model, args.init)
    loss_of = torch.compile(model.loss) if device.type == "cuda" else model.loss

    def evaluate() -> dict[str, float]:
        write_weights(model, args.out / "weights.npz")
        return accuracy(model, tokenizer, args.problems, seed=1)

    made = batches(path, args.seed, args.rows, shape.context_length, args.workers)
    fit(made, loss_of, Optimizer(model, args.lr), evaluate, Log(args.out / "log.csv", FIELDS), args, device)
    for prompt, reply in zip(PROMPTS, replies(model, tokenizer, PROMPTS, 300), strict=True):
        print(f"> {prompt}\n{reply}\n", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo_model.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, metavar="FILE", help="weights.npz to begin with (tokenizer.json in --out)")
    parser.add_argument("--rows", type=int, default=64, help="rows of 1024 tokens in a batch; a multiple of 64")
    add_options(parser, steps=10_000, seed=0, log_every=200, eval_every=2500)
    parser.add_argument("--problems", type=int, default=500, help="of each category, at each evaluation")
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser, *, steps: int, seed: int, log_every: int, eval_every: int) -> None:
    """Add the options of every training, with these defaults."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=seed, help=f"of the text (default: {seed})")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="end after so long, if not all steps are done by then"
    )
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that make text"
    )
    parser.add_argument("--log-every", type=int, default=log_every)
    parser.add_argument("--eval-every", type=int, default=eval_every)


def fit(
    made: Iterable[tokens.Rows],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: Optimizer,
    evaluate: Callable[[], Mapping[str, float]],
    log: Log,
    args: argparse.Namespace,
    device: torch.device,
) -> None:
    """Take a step for each batch, until the steps or the minutes of :func:`add_options` are over.

    Args:
        loss_of: Loss of token ids ``i64[B, T]``, where ``bool[B, T]`` says which are taught.
        evaluate: Keeps the weights, and gives the columns of the log that an evaluation fills.
    """
    started = time.monotonic()

    def seconds() -> float:
        return time.monotonic() - started

    total = torch.zeros((), device=device)
    step, since, first, done = 0, 0, 0.0, 0.0
    for rows in made:
        if done >= 1:
            break
        batch = torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
        loss = loss_of(batch & (tokens.TAUGHT - 1), batch >= tokens.TAUGHT)
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
                entry |= {name: f"{value:.4f}" for name, value in evaluate().items()}
            log.write(entry)


class Optimizer:
    """AdamW with the schedule of a training.

    Args:
        peak: The peak learning rate.
    """

    def __init__(self, model: torch.nn.Module, peak: float) -> None:
        self._parameters, self._peak = list(model.parameters()), peak
        matrices = [p for name, p in model.named_parameters() if ".weights." in name]
        others = [p for name, p in model.named_parameters() if ".weights." not in name]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=others[0].is_cuda)

    def step(self, loss: torch.Tensor, done: float) -> float:
        """Take a step where so great a part of the training is done; return the learning rate."""
        rate = self._peak * _schedule(done)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        # No decay in the second half, as in the BitNet b1.58 recipe: by then the latent weights should settle.
        self._optimizer.param_groups[0]["weight_decay"] = 0.1 if done < 0.5 else 0.0
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return rate


class Log:
    """A CSV file that grows by a line an entry."""

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        new = not path.exists()
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, fields, lineterminator="\n")
        if new:
            self._writer.writeheader()

    def write(self, entry: dict[str, object]) -> None:
        self._writer.writerow(entry)
        self._file.flush()
        print(*(f"{key}={value}" for key, value in entry.items()), flush=True)


def _schedule(done: float) -> float:
    """Part of the peak learning rate: a short linear warm-up, then linearly to almost nothing."""
    return max(0.01, min(done / WARM_UP, (1 - done) / (1 - WARM_UP)))


def _start_worker(tokenizer: Path, seed: int, length: int) -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"
    _worker.append((tokens.load(tokenizer), seed, length))


def _shard(number: int) -> tokens.Rows:
    ((tokenizer, seed, length),) = _worker
    return tokens.packed(tokenizer, documents(seed, number), length, SHARD)


def batches(tokenizer: Path, seed: int, rows: int, length: int, workers: int) -> Iterator[tokens.Rows]:
    """Batches, ``uint16[rows, length]``, the same in every run, made by processes beside it."""
    shards = rows // SHARD
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (tokenizer, seed, length)) as pool:
        waiting = [pool.apply_async(_shard, (i,)) for i in range(8 * workers)]
        number = len(waiting)
        while True:
            batch = []
            for _ in range(shards):
                batch.append(waiting.pop(0).get())
                waiting.append(pool.apply_async(_shard, (number,)))
                number += 1
            yield np.concatenate(batch)


def accuracy(model: DemoModel, tokenizer: tokenizers.Tokenizer, count: int, seed: int) -> dict[str, float]:
    """Fraction of exact answers in each category of the demo evaluation, computed in f32."""
    found = {}
    for category in CATEGORIES:
        asked = draw_problems(category, count, seed)
        given = replies(model, tokenizer, [problem.question for problem in asked], 32)
        right = sum(problem.solved_by(reply) for reply, problem in zip(given, asked, strict=True))
        found[category.name] = right / count
    return found


@torch.no_grad()
def replies(model: DemoModel, tokenizer: tokenizers.Tokenizer, prompts: Sequence[str], limit: int) -> list[str]:
    """The greedy answers to prompts, without a cache. All run together: what pads a row comes after all that counts."""
    device = model.token_embd.device
    ids = [[tokens.BOS, tokens.USER, *tokenizer.encode(p).ids, tokens.EOT, tokens.ASSISTANT] for p in prompts]
    begins = [len(prompt) for prompt in ids]
    rows = torch.full((len(ids), max(begins) + limit), tokens.PAD, device=device)
    for row, prompt in zip(rows, ids, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    ends, every = torch.tensor(begins, device=device), torch.arange(len(ids), device=device)
    done = torch.zeros(len(ids), dtype=torch.bool, device=device)
    for length in range(max(begins), max(begins) + limit):
        last = model.hidden(rows[:, :length])[every, ends - 1]
        following = (last @ model.token_embd.T).argmax(-1)
        rows[every, ends] = following
        ends += 1
        done |= following == tokens.EOT
        if done.all():
            break
    answers = [row[begin:] for row, begin in zip(rows.tolist(), begins, strict=True)]
    return [tokenizer.decode(row[: row.index(tokens.EOT)] if tokens.EOT in row else row) for row in answers]


def write_weights(model: DemoModel, path: Path) -> None:
    """What inference needs: ternary codes and scales, norms, and the embedding table in f16."""
    arrays = {}
    for name, (codes, scale) in model.ternary().items():
        arrays[f"{name}.codes"], arrays[f"{name}.scale"] = codes.cpu().numpy(), scale.cpu().numpy()
    for name, tensor in model.dense().items():
        arrays[name] = tensor.cpu().numpy().astype(np.float16 if name == "token_embd" else np.float32)
    np.savez_compressed(path, **arrays)


def read_weights(model: DemoModel, path: Path) -> None:
    """Give the model the weights of a file that :func:`write_weights` wrote; it then computes what that model did.

    A matrix begins as its codes times its scale, enlarged so that the mean of absolute values is the scale again.
    """
    arrays = np.load(path)
    with torch.no_grad():
        for name, tensor in model.dense().items():
            tensor.copy_(torch.from_numpy(arrays[name]).float())
        for i, block in enumerate(model.blocks):
            for layer in (block.attn_in, block.attn_out, block.ffn_in, block.ffn_out):
                for name, weight in layer.weights.items():
                    codes = torch.from_numpy(arrays[f"blk.{i}.{name}.codes"]).float()
                    scale = float(arrays[f"blk.{i}.{name}.scale"])
                    weight.copy_(codes * (scale / max(float(codes.abs().mean()), 1e-5)))


if __name__ == "__main__":
    main()
