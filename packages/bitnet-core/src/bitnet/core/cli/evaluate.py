"""``bitnet perplexity`` and ``bitnet eval``: measurements of a model's quality."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import click

from bitnet.core.cli.console import print_json, progress, read_text, say
from bitnet.core.cli.options import FileName, json_option, load, model_options
from bitnet.core.errors import InvalidInputError
from bitnet.core.support.foreign import label

CHUNK = 512


@click.command()
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    type=FileName(),
    required=True,
    help="The text; '-' is standard input.",
)
@click.option(
    "-c",
    "--context",
    "--ctx-size",
    metavar="N",
    type=int,
    help="Tokens per chunk; the second half of each is scored.  [default: 512, or the model's context if less]",
)
@model_options
@json_option
def perplexity(file: Path, as_json: bool, **params: Any) -> None:
    """Measure the perplexity of a text, as llama-perplexity does.

    \b
    bitnet perplexity -m model.gguf -f wiki.test.raw
    """
    text = read_text(None if str(file) == "-" else file)
    with load(params, max_seqs=1) as model:
        tokens = model.tokenizer.encode(text, parse_special=False)
        chunk = params["context"] or min(CHUNK, model.context)
        with progress("perplexity") as update:
            for result in model.perplexity(tokens, context=chunk):
                update(result.chunks, len(tokens) // chunk)
        if as_json:
            print_json({"model": str(model.path), "device": model.device.name, **dataclasses.asdict(result)})
        else:
            say(f"perplexity {result.value:.4f} ± {result.error:.4f} ({result.tokens} tokens scored)")


@click.command("eval")
@click.argument("file", type=FileName())
@click.option("-n", "--questions", metavar="N", type=int, help="Questions of each category, the first ones; else all.")
@click.option("--parallel", metavar="N", type=int, default=16, show_default=True, help="Questions asked at a time.")
@model_options
@json_option
def evaluate(file: Path, questions: int | None, parallel: int, as_json: bool, **params: Any) -> None:
    """Ask a model the questions of a JSONL file, and count the right replies.

    \b
    bitnet eval questions.jsonl -m model.gguf

    A line is an object with "question" and what a right reply is like: "number" (its last number), "equals" (all of
    it), "contains" or "lacks" (one text or several). "category" counts questions together. A line with "category" and
    "claim", from 0 to 1, names the share that is expected. The exit status is 1 if a claim is missed.
    """
    from bitnet.core.evaluation.questions import read_questions, run

    if questions is not None and questions < 1:
        raise InvalidInputError(f"--questions is {questions}; it must be at least 1.")
    asked, claims = read_questions(read_text(None if str(file) == "-" else file))
    if questions is not None:
        seen: Counter[str] = Counter()
        asked = [q for q in asked if (seen.update([q.category]), seen[q.category] <= questions)[1]]
    with load(params, max_seqs=parallel) as model, progress("questions") as update:
        report = run(model, asked, claims, progress=update)
    if as_json:
        print_json(report.to_json())
    else:
        say(f"{label(report.model)} on {report.device}", *report.table().splitlines())
    if not report.passed:
        raise click.exceptions.Exit(1)
