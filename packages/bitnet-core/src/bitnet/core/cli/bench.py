"""``bitnet bench``: how fast a model is here, and how fast this machine could be."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.bench_plot import limit_of
from bitnet.core.cli.console import print_json, progress, say
from bitnet.core.cli.options import (
    THREADS_DEFAULT,
    FileName,
    device_option,
    i2s_layout_option,
    json_option,
    kv_dtype_option,
    load,
    model_file_option,
    strict_option,
    verbose_option,
)
from bitnet.core.support.foreign import label
from bitnet.core.support.units import scaled, size

if TYPE_CHECKING:
    from bitnet.core.api import Model
    from bitnet.core.evaluation.bench import Measurement

_CONTEXT = "the context for --n-prompt, --n-gen and --n-depth"


def _numbers(
    ctx: click.Context, param: click.Parameter, text: str | None, *, least: int = 0, most: float = math.inf
) -> list[int]:
    """``512`` or ``128,512``, each in ``least … most``."""
    try:
        numbers = [] if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 128,512.", ctx, param) from None
    for number in numbers:
        if number < least:
            raise click.BadParameter(f"{number} is less than {least}.", ctx, param)
        if number > most:
            raise click.BadParameter(f"{number} is more than {most}.", ctx, param)
    return numbers


@click.command()
@model_file_option
@click.option(
    "-p",
    "--n-prompt",
    metavar="N,...",
    callback=_numbers,
    default="512",
    show_default=True,
    help="Prompt lengths to measure prefill with; 0: none.",
)
@click.option(
    "-n",
    "--n-gen",
    metavar="N,...",
    callback=_numbers,
    default="128",
    show_default=True,
    help="Numbers of tokens to measure decode with; 0: none.",
)
@click.option(
    "-d",
    "--n-depth",
    metavar="N,...",
    callback=_numbers,
    default="0",
    show_default=True,
    help="Tokens already in the KV cache before each measurement.",
)
@click.option(
    "-np",
    "--parallel",
    metavar="N,...",
    callback=partial(_numbers, least=1),
    default="1",
    show_default=True,
    help="Sequences decoded at the same time.",
)
@click.option(
    "-r",
    "--repetitions",
    metavar="N",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Repetitions of each measurement, after one uncounted warm-up.",
)
@click.option(
    "-b",
    "--batch-size",
    metavar="N",
    type=int,
    default=512,
    show_default=True,
    help="Maximum prompt tokens per step.",
)
@click.option(
    "-t",
    "--threads",
    metavar="N,...",
    callback=partial(_numbers, least=1, most=1024),
    help=f"CPU threads.  {THREADS_DEFAULT}",
)
@click.option(
    "--plot",
    metavar="FILE",
    type=FileName(),
    help="Plot the results to this PNG or SVG file.",
)
@device_option
@strict_option
@kv_dtype_option
@i2s_layout_option
@verbose_option
@json_option
def bench(
    model: Path | None,
    device: str | None,
    strict: bool | None,
    n_prompt: list[int],
    n_gen: list[int],
    n_depth: list[int],
    parallel: list[int],
    repetitions: int,
    batch_size: int,
    threads: list[int],
    plot: Path | None,
    as_json: bool,
    **params: Any,
) -> None:
    """Measure prefill and decode in tokens per second.

    On a CPU, the same run also measures the machine's limits for that number of threads: how fast it reads memory,
    which bounds decode, and how fast it multiplies int8, which bounds prefill.

    \b
    bitnet bench -m model.gguf
    bitnet bench -m model.gguf -p 0 -n 64 -d 512,4096 -t 1,2
    bitnet bench -m model.gguf --plot speed.svg
    """
    from bitnet.core.cli.bench_plot import check_plot, write_plot
    from bitnet.core.cpu.device import CpuDevice
    from bitnet.core.devices.select import select_device
    from bitnet.core.evaluation.bench import Workload, device_limits, measure
    from bitnet.core.support.log import logger

    tests = [Workload("prefill", p, depth) for depth in n_depth for p in n_prompt if p]
    tests += [Workload("decode", n, depth, s) for depth in n_depth for s in parallel for n in n_gen if n]
    if not tests:
        raise click.UsageError("there is nothing to measure: -p and -n are both 0.")
    if plot is not None:
        check_plot(plot)
    context, most = max(test.context for test in tests), max(test.parallel for test in tests)
    results: list[Measurement] = []
    for count in threads or (None,):
        with closing(select_device(device, threads=count, strict=strict).open()) as opened:
            sizes = {"context": context, "max_seqs": most, "step_tokens": batch_size}
            named = {"model": model, **params}
            with load(named, context_name=_CONTEXT, device=opened, prompt_lookup=False, **sizes) as loaded:
                if not as_json:
                    say(*_header(loaded, opened.threads if isinstance(opened, CpuDevice) else None))
                for test in tests:
                    with progress(test.name) as update:
                        probe = partial(device_limits, opened)
                        result = measure(loaded, test, repeats=repetitions, limits=probe, progress=update)
                    results.append(result)
                    if result.dispatches is not None:
                        logger.info("%s: %d dispatches a step", test.name, result.dispatches)
                    if not as_json:
                        say(_line(result))
                document = {"model": str(loaded.path), "name": loaded.config.name, "device": loaded.device.name}
                title, device_title = _titles(loaded)
    if as_json:
        print_json({**document, "results": [_document(result) for result in results]})
    if plot is not None:  # last, so that a failure to write it does not lose the numbers
        write_plot(plot, title, device_title, results)


def _titles(model: Model) -> tuple[str, str]:
    """The model with its size, and the device."""
    from bitnet.core.gguf.split import model_bytes

    device = model.device
    return (
        f"{label(model.config.name)} ({size(model_bytes(model.path))})",
        f"{device.name}, {label(device.description)}",
    )


def _header(model: Model, threads: int | None) -> tuple[str, str]:
    title = " on ".join(_titles(model))
    if threads is not None:
        title += f", {threads} thread{'' if threads == 1 else 's'}"
    return title, f"{'test':<20}{'tokens/s':>10}  {'±':>8}   reached"


def _line(result: Measurement) -> str:
    reached = []
    if result.bytes_per_step is not None and result.read is not None:
        reached += [f"{size(result.bytes_per_step)} a step", f"{size(result.read)}/s"]
    if result.test.kind == "prefill" or result.bound == "int8":
        reached.append(f"{scaled(result.int8)}MAC/s")
    if result.fraction is not None:
        reached.append(
            "from the caches, not memory" if result.in_cache else f"{result.fraction:.1%} of {limit_of(result)}"
        )
    return f"{result.test.name:<20}{result.mean:>10.2f}  {result.deviation:>8.2f}   {', '.join(reached)}"


def _document(result: Measurement) -> dict[str, Any]:
    test, limits = result.test, result.limits
    return {
        "test": test.name,
        **asdict(test),
        "threads": limits and limits.threads,
        "samples": list(result.samples),
        "tokens_per_second": result.mean,
        "deviation": result.deviation,
        "bytes_per_step": result.bytes_per_step,
        "read_bytes_per_second": result.read,
        "read_bandwidth": limits and limits.read,
        "int8_products_per_second": result.int8,
        "int8_peak": limits and limits.int8,
        "bound": result.bound,
        "fraction": result.fraction,
        "dispatches_per_step": result.dispatches,
    }
