"""``bitnet launch``. ``bitnet --help`` imports this module, so it imports the server inside functions."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from bitnet.core.cli.options import context_option, model_options
from bitnet.core.errors import BitNetError
from bitnet.server.launch.clients import CLIENTS

_OWN = ("client", "words")


@click.command()
@click.argument("client", type=click.Choice([*CLIENTS]))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@model_options
@context_option
@click.pass_context
def launch(ctx: click.Context, /, client: str, words: tuple[str, ...], **params: Any) -> None:
    """Start a server, and claude, codex or opencode on it.

    WORDS after -- are the agent's own. The server ends with the agent.

    \b
    bitnet launch claude -m model.gguf
    bitnet launch codex -m model.gguf -c 65536 -- exec "Explain this folder"
    """
    from bitnet.core.cli.console import note
    from bitnet.server.launch.served import served

    chosen = CLIENTS[client]
    program = shutil.which(chosen.program)
    if program is None:
        raise BitNetError(
            f"{chosen.title} is not installed: there is no {chosen.program} on the PATH.",
            hint=f"npm install -g {chosen.package}",
        )
    with served(_given(ctx), note) as endpoint:
        kept = {name: value for name, value in os.environ.items() if name not in chosen.unset}
        command = [program, *chosen.words(endpoint), *words]
        with _ctrl_c_is_the_clients():
            import subprocess

            status = subprocess.run(command, env={**kept, **chosen.variables(endpoint)}, check=False).returncode
    ctx.exit(status if status >= 0 else 128 - status)


def _given(ctx: click.Context) -> Sequence[str]:
    """The options that are not at their defaults, as ``bitnet serve`` takes them."""
    found: list[str] = []
    for param in ctx.command.params:
        name = param.name or ""
        value = ctx.params.get(name)
        if name in _OWN or value is None or value == param.get_default(ctx):
            continue
        if isinstance(param, click.Option) and param.is_flag:
            found.append(param.opts[0] if value else param.secondary_opts[0])
        else:
            found += [param.opts[0], str(value)]
    return found


@contextmanager
def _ctrl_c_is_the_clients() -> Iterator[None]:
    """In this context, Ctrl-C ends only what the client does at the moment, if it wants that."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
