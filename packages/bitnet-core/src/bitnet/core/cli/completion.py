"""``bitnet completion``: shell completion of commands, options, devices and model files."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
)

from bitnet.core.cli.console import say

COMPLETE_VAR = "_BITNET_COMPLETE"

_BASH = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            name) compopt -o filenames; COMPREPLY+=("$value") ;;
            plain) printf -v value %%q "$value"; COMPREPLY+=("$value") ;;
        esac
    done < <(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """Bash completion that quotes what it inserts; click's own script lets bash split and expand it.

    Items of the type ``name`` are file names, which bash quotes with the quote character the word began with.
    """

    source_template = _BASH


class _Plain:
    """For shells that quote everything they insert: a ``name`` is like any other item."""

    def format_completion(self, item: CompletionItem[Any]) -> str:
        if item.type == "name":
            item = CompletionItem(item.value, help=item.help)
        formatted: str = super().format_completion(item)  # type: ignore[misc]
        return formatted


class Zsh(_Plain, ZshComplete):
    pass


class Fish(_Plain, FishComplete):
    """Fish completion that keeps commas in items; click's own script cuts an item at its second comma."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')


for _class in (Bash, Zsh, Fish):
    add_completion_class(_class)


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
    say(*completer(ctx.find_root().command, {}, "bitnet", COMPLETE_VAR).source().splitlines())
