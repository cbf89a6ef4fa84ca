"""``bitnet bench-serve``: measures a server under load. ``bitnet --help`` imports this module."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import note, print_json, say
from bitnet.core.cli.options import FileName, json_option
from bitnet.core.errors import BitNetError
from bitnet.server.commands.options import Finite

if TYPE_CHECKING:
    from bitnet.server.bench.client import Outcome

OBJECTIVES = ("ttft", "tpot", "e2el")


def _objectives(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[str, float]:
    """Parse ``ttft:200`` or ``ttft:200,tpot:20``: maximum milliseconds."""
    found = {}
    for part in ",".join(given).split(",") if given else ():
        name, _, value = part.strip().partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in OBJECTIVES or not 0 < found[name] < float("inf"):
            raise click.BadParameter(
                f"{part!r} is not an objective such as ttft:200; use {', '.join(OBJECTIVES)}, in ms.", ctx, param
            )
    return found


def _fields(ctx: click.Context, param: click.Parameter, given: str | None) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        found = json.loads(given or "{}")
    except ValueError as error:
        raise click.BadParameter(f"{given!r} is not JSON: {error}.", ctx, param) from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{given!r} is not a JSON object.", ctx, param)
    return found


POSITIVE = Finite(min=0, min_open=True)


class Rate(click.FloatRange):
    """A number of requests a second; inf is all at once."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if math.isnan(rate := super().convert(value, param, ctx)):
            self.fail(f"{value} is not a number.", param, ctx)
        return rate


@click.command("bench-serve")
@click.option("--base-url", metavar="URL", default="http://127.0.0.1:8080", show_default=True, help="The server.")
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="/v1/completions or /v1/chat/completions.",
)
@click.option("--model", metavar="NAME", help="Model to query.  [default: the first that the server lists]")
@click.option("--api-key", metavar="KEY", envvar="BITNET_API_KEY", show_envvar=True, help="The server's API key.")
@click.option(
    "--num-prompts", metavar="N", type=click.IntRange(1), default=100, show_default=True, help="Requests to send."
)
@click.option(
    "--request-rate",
    metavar="R",
    type=Rate(min=0, min_open=True),
    default=float("inf"),
    show_default=True,
    help="Requests per second, on average; inf: all at once.",
)
@click.option(
    "--burstiness",
    metavar="B",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Shape of the gaps at a finite rate: 1: Poisson process; lower: burstier; higher: steadier.",
)
@click.option(
    "--max-concurrency", metavar="N", type=click.IntRange(1), help="Maximum concurrent requests.  [default: no limit]"
)
@click.option(
    "--random-input-len",
    "--input-len",
    metavar="N",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Random tokens per prompt.",
)
@click.option(
    "--random-output-len",
    "--output-len",
    metavar="N",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Tokens to generate per request.",
)
@click.option(
    "--random-range-ratio",
    metavar="R",
    type=Finite(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Fraction by which each length may be smaller or larger.",
)
@click.option(
    "--random-prefix-len",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Additional random tokens that begin every prompt.",
)
@click.option(
    "--dataset-path",
    metavar="FILE",
    type=FileName(),
    help='Read prompts from this file: lines of {"prompt": "…", "output_tokens": N}.',
)
@click.option(
    "--seed", metavar="N", type=click.IntRange(0), default=0, show_default=True, help="Seed of prompts and gaps."
)
@click.option("--temperature", metavar="T", type=Finite(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", metavar="P", type=Finite(0, 1), help="Top-p of the sampling.  [default: the server's]")
@click.option("--ignore-eos/--no-ignore-eos", default=False, show_default=True, help="Continue after the end of text.")
@click.option(
    "--extra-body",
    metavar="JSON",
    callback=_fields,
    help='Further fields of every request, such as {"tool_choice": "auto"}.',
)
@click.option(
    "--goodput",
    metavar="NAME:MS,...",
    multiple=True,
    callback=_objectives,
    help="Objectives for goodput, in ms, such as ttft:200,tpot:20; repeatable.",
)
@json_option
def bench_serve(**params: Any) -> None:
    """Measure a server under load: latencies, throughput, goodput.

    Works with any server that speaks OpenAI's API. The metrics are those of vLLM's command of the same name.

    \b
    bitnet bench-serve --num-prompts 200 --max-concurrency 64 --ignore-eos
    bitnet bench-serve --request-rate 4 --goodput ttft:500,tpot:50
    """
    import asyncio

    from bitnet.server.bench.client import Target, measure
    from bitnet.server.bench.metrics import summary
    from bitnet.server.bench.prompts import Random, read_prompts

    url = params["base_url"].rstrip("/").removesuffix("/v1")
    fields: dict[str, Any] = {"temperature": params["temperature"]}
    fields |= {name: params[name] for name in ("top_p", "ignore_eos") if params[name]}
    fields |= params["extra_body"]
    target = Target(
        url=url, endpoint=params["endpoint"], model=params["model"], api_key=params["api_key"], fields=fields
    )
    output = params["random_output_len"]
    source: Any = Random(
        input=params["random_input_len"],
        output=output,
        spread=params["random_range_ratio"],
        prefix=params["random_prefix_len"],
    )
    if params["dataset_path"] is not None:
        source = read_prompts(Path(params["dataset_path"]), output)
    outcome = asyncio.run(
        measure(
            target,
            source,
            count=params["num_prompts"],
            rate=params["request_rate"],
            burstiness=params["burstiness"],
            concurrency=params["max_concurrency"],
            seed=params["seed"],
        )
    )
    found = summary(outcome.answers, outcome.failures.total(), outcome.seconds, params["goodput"])
    if params["as_json"]:
        given = {name: params[name] for name in ("endpoint", "num_prompts", "burstiness", "max_concurrency", "seed")}
        rate = params["request_rate"]
        given["request_rate"] = rate if rate < float("inf") else "inf"  # JSON has no infinity
        print_json({"base_url": url, **given, **fields, **found, "errors": dict(outcome.failures)})
    else:
        _show(found, params["goodput"])
    _tell_failures(outcome)


def _show(found: dict[str, Any], slos: dict[str, float]) -> None:
    from bitnet.server.bench.metrics import LATENCIES, PERCENTILES

    lines = [
        ("Requests", f"{found['completed']} completed, {found['failed']} failed, in {found['duration']:.2f} s"),
        ("Tokens", f"{found['total_input_tokens']:,} in prompts, {found['total_output_tokens']:,} generated"),
        ("Request throughput", f"{found['request_throughput']:.2f} requests/s"),
        ("Output throughput", f"{found['output_throughput']:,.1f} tokens/s"),
        ("Total throughput", f"{found['total_token_throughput']:,.1f} tokens/s"),
    ]
    if slos:
        limits = ", ".join(f"{name} ≤ {most:g} ms" for name, most in slos.items())
        lines.append(("Goodput", f"{found['request_goodput']:.2f} requests/s with {limits}"))
    say(*(f"{name:<20}{value}" for name, value in lines), "")
    columns = ("mean", "median", *(f"p{p}" for p in PERCENTILES))
    say(f"{'milliseconds':<48}" + "".join(f"{column:>10}" for column in columns))
    for name, meaning in LATENCIES.items():
        values = [found[f"{column}_{name}_ms"] for column in columns]
        cells = "".join(f"{'-' if value is None else f'{value:,.2f}':>10}" for value in values)
        say(f"{f'{name.upper()}  {meaning}':<48}{cells}")


def _tell_failures(outcome: Outcome) -> None:
    """Report how requests failed.

    Raises:
        BitNetError: No request was answered.
    """
    for why, count in outcome.failures.most_common():
        note(f"{count} requests failed: {why}")
    if not outcome.answers:
        raise BitNetError("no request was answered.")
