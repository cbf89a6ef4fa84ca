"""Types, checks and headings of the commands' options."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from bitnet.core.cli.options import F, FileName, model_options
from bitnet.core.errors import BitNetError

GROUPS = {
    "Clients": (
        "alias",
        "model_alias",
        "any_model",
        "api_key",
        "api_key_file",
        "cors",
        "page",
        "mcp",
        "file_storage",
        "slot_save_path",
    ),
    "Limits": (
        "parallel",
        "max_queue",
        "max_queue_tokens",
        "max_memory",
        "max_stored",
        "max_file_storage",
        "reasoning_budget",
        "timeout",
        "max_body",
        "drain",
    ),
    "Cluster": ("ray", "address", "replicas", "min_replicas", "gpus_per_replica", "write_config"),
    "Network": ("host", "port", "uds", "root_path", "ssl_certfile", "ssl_keyfile", "log_format"),
}
"""Maps headings of the help to the options under them; all other options are under the model's heading."""


class Finite(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Grouped(click.Command):
    """A command whose help groups its options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {name for names in GROUPS.values() for name in names}
        model = [p.name for p in self.get_params(ctx) if p.name not in named]
        for heading, names in {"Model": model, **GROUPS}.items():
            records = [p.get_help_record(ctx) for p in self.get_params(ctx) if p.name in names]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record is not None])


def not_empty(ctx: click.Context, param: click.Option, given: Any) -> Any:
    if not all(one.strip() for one in (given if param.multiple else (given,))):
        what = str(param.metavar).lower()
        raise click.BadParameter(f"the {what} is empty; leave the option out for the default.", ctx, param)
    return given


def model_aliases(ctx: click.Context, param: click.Option, given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The patterns, each with its model's name."""
    found = tuple((pattern, name) for pattern, _, name in (one.partition("=") for one in given))
    if any(not pattern or not name for pattern, name in found):
        raise click.BadParameter("write the pattern, =, and the name of a model that is served.", ctx, param)
    return found


def mcp_servers(ctx: click.Context, param: click.Option, given: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses, whose origins go into the page's Content-Security-Policy as they are."""
    for one in given:
        if not re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(:\d{1,5})?(/[!-~]*)?", one):
            raise click.BadParameter(f"{one} is no address such as https://tools.example/mcp.", ctx, param)
    if given and not ctx.params.get("page", True):
        raise click.UsageError("--mcp is for the page, and --no-page leaves it out.", ctx)
    return given


def cluster_only(ctx: click.Context, param: click.Option, given: Any) -> Any:
    if given is not None and not ctx.params.get("ray"):
        raise click.UsageError(f"{param.opts[0]} needs --ray.", ctx)
    return given


def replicas(ctx: click.Context, param: click.Option, given: str | None) -> Any:
    """The number of replicas, or ``auto``."""
    cluster_only(ctx, param, given)
    if given is None or given == "auto":
        return given
    try:
        return click.IntRange(1, 10_000)(given, param, ctx)
    except click.BadParameter:
        raise click.BadParameter(f"{given} is neither auto nor a number from 1 to 10,000.", ctx, param) from None


def cluster_options(function: F) -> F:
    """The options of commands that run on a cluster."""
    for option in (
        click.option(
            "--gpus-per-replica",
            metavar="F",
            type=Finite(min=0, max=64),
            callback=cluster_only,
            help="GPUs that each replica gets, such as 1 or 0.5.  [default: 1 if the cluster has any]",
        ),
        click.option(
            "--replicas",
            metavar="N|auto",
            callback=replicas,
            help="Replicas of each model; auto: as many as the load needs.  [default: 1]",
        ),
        click.option(
            "--address",
            metavar="ADDRESS",
            callback=cluster_only,
            help="Cluster: auto for this machine's, or HOST:PORT.  [default: a new one on this machine]",
        ),
        click.option("--ray", is_flag=True, is_eager=True, help="Run on a Ray cluster."),
    ):
        function = option(function)
    return function


def check_ray(*modules: str) -> None:
    """Check that modules that come with an extra are there.

    Args:
        modules: The extra, and then its modules.

    Raises:
        BitNetError: One is missing.
    """
    from importlib.util import find_spec

    extra, *needed = modules
    if not all(find_spec(name) for name in needed):
        raise BitNetError("--ray needs Ray, which is not installed.", hint=f'pip install "bitnet-server[{extra}]"')


def root_path(ctx: click.Context, param: click.Option, given: str) -> str:
    """The path with a slash before it and none after it."""
    if not given.isascii() or not given.isprintable() or " " in given:
        raise click.BadParameter("the path must be of ASCII characters without spaces.", ctx, param)
    return f"/{given.strip('/')}".rstrip("/")


def several_models(function: F) -> F:
    """:data:`model_options`, with a repeatable ``-m``."""
    decorated = model_options(function)
    (option,) = (p for p in decorated.__click_params__ if p.name == "model")  # type: ignore[attr-defined]
    option.multiple = True
    option.help = (
        "GGUF model, hf:ORG/NAME[:FILE] or s3://BUCKET/KEY (gs, az); repeatable.  [default: the small one here]"
    )
    return decorated


models_option = click.option(
    "--models",
    metavar="FOLDER",
    type=FileName(),
    help="Folder of models, which are loaded on demand, as are those in the hub's cache.  [default: none]",
)
isolate_option = click.option(
    "--isolate", is_flag=True, help="Run each model in a process of its own, so that a crash takes one model."
)

mcp_option = click.option(
    "--mcp",
    metavar="URL",
    multiple=True,
    callback=mcp_servers,
    help="MCP server (streamable HTTP) whose tools the page may offer to models; repeatable.  [default: none]",
)
