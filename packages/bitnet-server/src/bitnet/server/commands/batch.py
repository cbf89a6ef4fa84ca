"""``bitnet batch``. ``bitnet --help`` imports this module, so it imports the server inside functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import note, progress
from bitnet.core.cli.options import FileName, context_option, load, model_options
from bitnet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from bitnet.core import Model
    from bitnet.server.batch.rows import Answers, Row
    from bitnet.server.batch.run import Outcome

AHEAD = 4
"""Number of requests that wait while others run, so that a place is never empty."""


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

    source, target = params["input"], params["output"]
    rows = read_rows(source)
    answered: set[str] = set()
    if target.exists():
        if not params["resume"]:
            raise InvalidInputError(f"{target} is there already.", hint="Add --resume to go on with it.")
        answered = {one.id for one in keep_answered(target, {row.id for row in rows})}
    left = [row for row in rows if row.id not in answered]
    if answered:
        note(f"{len(answered)} of {len(rows)} rows have their answers.")
    if not left:
        return
    answers, began = Answers(target), time.perf_counter()
    try:
        with load(params, max_seqs=params["parallel"]) as model, progress("Answering") as shown:
            began = time.perf_counter()
            outcome = asyncio.run(_answer(model, left, answers, params["parallel"], shown))
    except KeyboardInterrupt:
        note(f"Interrupted; the answers so far are in {target}. Go on with --resume.")
        raise
    finally:
        answers.close()
        _remove_empty(target)
    seconds = time.perf_counter() - began
    rate = outcome.tokens / seconds
    note(f"{outcome.rows} rows in {seconds:.1f} s, {outcome.tokens} tokens generated ({rate:.0f} tokens/s).")
    if outcome.refused:
        note(f"{outcome.refused} of them are errors: their status_code is not 200.")


async def _answer(
    model: Model, rows: Sequence[Row], answers: Answers, parallel: int, shown: Callable[[int, int], None]
) -> Outcome:
    """Answer rows with the server's application, in this process. An error is its row's answer."""
    from bitnet.server.batch.run import Outcome, run_rows
    from bitnet.server.http.app import App
    from bitnet.server.models.service import Source
    from bitnet.server.models.settings import Settings
    from bitnet.server.models.state import State

    settings = Settings(max_seqs=parallel, page=False, max_stored=0)
    state = State([Source((model.path.stem,), model.path, lambda: model, reloads=False)], settings)
    state.pool.open()
    app, outcome = App(state), Outcome()

    async def answer(row: Row) -> None:
        body = {name: value for name, value in row.body.items() if name != "model"}
        status, found = await app.ask(row.path, body)
        answers.add(row.id, status, found)
        outcome.count(status, found)
        shown(outcome.rows, len(rows))

    try:
        await run_rows(rows, answer, state.shared.places + AHEAD)
    finally:
        state.close()
    return outcome


def _remove_empty(file: Path) -> None:
    """Remove the output of a run that answered nothing: the next one needs no --resume."""
    if file.is_file() and not file.stat().st_size:
        file.unlink()
