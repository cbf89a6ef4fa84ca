"""``bitnet batch``. ``bitnet --help`` imports this module, so it imports the server inside functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bitnet.core.cli.console import note, progress
from bitnet.core.cli.options import FileName, context_option, load, model_options
from bitnet.core.errors import InvalidInputError


@click.command()
@click.option("-i", "--input", metavar="FILE", type=FileName(), required=True, help="Requests, one JSON object a line.")
@click.option("-o", "--output", metavar="FILE", type=FileName(), required=True, help="File for the answers.")
@click.option("--resume", is_flag=True, help="Go on with an output file that a run has begun.")
@model_options
@context_option
@click.option(
    "-np",
    "--parallel",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=16,
    show_default=True,
    help="Maximum requests that run at the same time.",
)
def batch(**params: Any) -> None:
    """Answer a file of requests in the format of OpenAI's batches.

    \b
    bitnet batch -m model.gguf -i prompts.jsonl -o answers.jsonl

    The model is that of -m, whatever the rows name. Answers are written as they come; custom_id says whose each is.
    An error is its row's answer, and the others go on.
    """
    import asyncio

    from bitnet.server.batch.rows import Answers, keep_answered, read_rows
    from bitnet.server.batch.run import run_batch

    source, target = params["input"], params["output"]
    rows = read_rows(source)
    answered: set[str] = set()
    if target.exists():
        if not params["resume"]:
            raise InvalidInputError(f"{target} is there already.", hint="Add --resume to go on with it.")
        answered = keep_answered(target, [row.id for row in rows])
    left = [row for row in rows if row.id not in answered]
    if answered:
        note(f"{len(answered)} of {len(rows)} rows have their answers.")
    if not left:
        return
    answers = Answers(target)
    try:
        with load(params, max_seqs=params["parallel"]) as model, progress("Answering") as shown:
            outcome = asyncio.run(run_batch(model, left, answers, parallel=params["parallel"], progress=shown))
    except KeyboardInterrupt:
        note(f"Interrupted; the answers so far are in {target}. Go on with --resume.")
        raise
    finally:
        answers.close()
        _remove_empty(target)
    rate = outcome.tokens / outcome.seconds
    note(f"{outcome.rows} rows in {outcome.seconds:.1f} s, {outcome.tokens} tokens generated ({rate:.0f} tokens/s).")
    if outcome.refused:
        note(f"{outcome.refused} of them are errors: their status_code is not 200.")


def _remove_empty(file: Path) -> None:
    """Remove the output of a run that answered nothing: the next one needs no --resume."""
    if file.is_file() and not file.stat().st_size:
        file.unlink()
