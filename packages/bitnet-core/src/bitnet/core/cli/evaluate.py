"""``bitnet perplexity`` and ``bitnet eval``: measurements of a model's quality."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from bitnet.core.cli.console import print_json, progress, read_text, say
from bitnet.core.cli.options import FileName, json_option, load, model_options
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


@click.group("eval", no_args_is_help=False)
def evaluate() -> None:
    """Ask a model questions that have known answers."""


@evaluate.command()
@click.option(
    "-n", "--problems", metavar="N", type=int, default=500, show_default=True, help="Problems of each category."
)
@click.option("-s", "--seed", metavar="N", type=int, default=0, show_default=True, help="Which problems are drawn.")
@click.option("--parallel", metavar="N", type=int, default=16, show_default=True, help="Problems asked at a time.")
@model_options
@json_option
def demo(problems: int, seed: int, parallel: int, as_json: bool, **params: Any) -> None:
    """Ask the demo model problems it was not trained on.

    Counts the right answers. The exit status is 1 if there are fewer than the model is claimed to get.
    """
    from bitnet.core.evaluation import demo_eval

    with load(params, max_seqs=parallel) as model, progress("problems") as update:
        report = demo_eval.run(model, problems=problems, seed=seed, progress=update)
    if as_json:
        print_json(report.to_json())
    else:
        say(f"{label(report.model)} on {report.device}, seed {report.seed}", *report.table().splitlines())
    if not report.passed:
        raise click.exceptions.Exit(1)
