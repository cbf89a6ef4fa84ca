"""``bitnet batch``. ``bitnet --help`` imports this module, so it imports the server inside functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import note, progress
from bitnet.core.cli.options import LOAD_OPTIONS, FileName, context_option, load, model_options
from bitnet.core.errors import InvalidInputError
from bitnet.server.commands.options import check_ray, cluster_options

if TYPE_CHECKING:
    from bitnet.server.batch.rows import Row

Done = Callable[[str, int, dict[str, Any]], None]
"""Called with a row's id, and status and body of its answer."""


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
    help="Maximum requests that run at the same time, on each replica.",
)
@cluster_options
def batch(**params: Any) -> None:
    """Answer a file of requests in the format of OpenAI's batches.

    \b
    bitnet batch -m model.gguf -i prompts.jsonl -o answers.jsonl
    bitnet batch -m model.gguf -i prompts.jsonl -o answers.jsonl --ray --address auto --replicas 4

    The model is that of -m, whatever the rows name. Answers are written as they come; custom_id says whose each is.
    An error is its row's answer, and the others go on.
    """
    from bitnet.server.batch.rows import Answers, keep_answered, read_rows
    from bitnet.server.batch.run import Outcome

    if params["replicas"] == "auto":
        raise click.UsageError("--replicas auto is for servers; name a number.")
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
    answers, outcome, began = Answers(target), Outcome(), time.perf_counter()
    try:
        with progress("Answering") as shown:

            def done(id: str, status: int, body: dict[str, Any]) -> None:
                answers.add(id, status, body)
                outcome.count(status, body)
                shown(outcome.rows, len(left))

            (_on_ray if params["ray"] else _here)(params, left, done)
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


def _here(params: dict[str, Any], rows: Sequence[Row], done: Done) -> None:
    """Answer rows in this process."""
    import asyncio

    from bitnet.server.http.offline import answer_rows, offline

    with load(params, max_seqs=params["parallel"]) as model, offline(model, params["parallel"]) as app:
        asyncio.run(answer_rows(app, rows, done))


def _on_ray(params: dict[str, Any], rows: Sequence[Row], done: Done) -> None:
    """Answer rows on a cluster."""
    import os

    check_ray("data", "ray", "pyarrow", "pandas")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray writes warnings about Ray Data on the terminal
    from bitnet.server.ray.cluster import connected

    options = {name: params[name] for name in LOAD_OPTIONS if name in params} | {"max_seqs": params["parallel"]}
    with connected(params["address"]):
        from bitnet.server.data import answer_on_cluster  # Ray has been set up

        wanted = {"replicas": params["replicas"] or 1, "cpus": params["threads"], "gpus": params["gpus_per_replica"]}
        answer_on_cluster(rows, done, params["model"], options, **wanted)


def _remove_empty(file: Path) -> None:
    """Remove the output of a run that answered nothing: the next one needs no --resume."""
    if file.is_file() and not file.stat().st_size:
        file.unlink()
