"""The command group, and the rest of what ``bitnet --help`` prints."""

from __future__ import annotations

import click

from bitnet.core.cli import plugins
from bitnet.core.cli.bench import bench
from bitnet.core.cli.cache import cache
from bitnet.core.cli.chat import chat
from bitnet.core.cli.completion import completion
from bitnet.core.cli.console import say
from bitnet.core.cli.convert import convert
from bitnet.core.cli.devices import devices
from bitnet.core.cli.embed import embed
from bitnet.core.cli.evaluate import evaluate, perplexity
from bitnet.core.cli.hub import list_models, pull, remove
from bitnet.core.cli.inspect import inspect
from bitnet.core.cli.narrow import fits_narrow
from bitnet.core.cli.receipt import receipt
from bitnet.core.cli.run import run
from bitnet.core.support import log
from bitnet.core.support.env import VARIABLES
from bitnet.core.support.system import core_version

EXIT_CODES = {
    0: "done",
    1: "any other error",
    2: "usage error: an invalid option, argument or input",
    3: "the requested device is not available",
    4: "a model file cannot be read, or cannot be downloaded from the hub",
    5: "a device failed during use",
    6: "a receipt does not hold, or the file is not a receipt",
    129: "ended because the terminal closed (SIGHUP)",
    130: "interrupted (Ctrl-C)",
    141: "the reader of the output closed it",
    143: "ended by SIGTERM",
}


class Commands(click.Group):
    """Our commands, in order, then other packages'. The help ends with environment variables and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *sorted(plugins.found().keys() - self.commands.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands:  # without searching other packages
            return self.commands[cmd_name]
        point = plugins.found().get(cmd_name)
        return plugins.absent(cmd_name) if point is None else plugins.load(point)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Environment"):
            formatter.write_dl([(f"{v.name}={v.values}", v.meaning) for v in VARIABLES], col_max=20)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        say(f"bitnet {core_version()}")
        ctx.exit()


def _print_commands(ctx: click.Context) -> None:
    """The commands, in 24 rows of 80 columns."""
    formatter = ctx.make_formatter()
    formatter.write_usage("bitnet", "COMMAND [OPTIONS]... | COMMAND --help | --help")
    group = ctx.command
    assert isinstance(group, Commands)
    group.format_commands(ctx, formatter)
    click.echo(formatter.getvalue().rstrip().replace("\n\n", "\n"))  # a row less


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show it.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run 1.58-bit language models on whatever processor this machine has.

    \b
    bitnet run "What is 17 + 25?"
    bitnet chat -m model.gguf
    bitnet devices
    """
    log.setup()
    if ctx.invoked_subcommand is None:
        _print_commands(ctx)


for _command in (
    run,
    chat,
    embed,
    devices,
    bench,
    inspect,
    pull,
    list_models,
    remove,
    convert,
    perplexity,
    evaluate,
    receipt,
    cache,
    completion,
):
    cli.add_command(_command)
fits_narrow(cli)
