"""``bitnet completion``: the script that makes a shell complete commands, options, devices and model files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

COMPLETE_VAR = "_BITNET_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash   eval "$(bitnet completion bash)"                      in ~/.bashrc
    zsh    eval "$(bitnet completion zsh)"                       in ~/.zshrc, after compinit
    fish   bitnet completion fish | source                       in ~/.config/fish/config.fish
    """
    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(ctx.find_root().command, {}, "bitnet", COMPLETE_VAR).source())
