"""``bitnet cache``: files that bitnet keeps on disk."""

from __future__ import annotations

import click

from bitnet.core.cli.console import print_json, say
from bitnet.core.cli.options import json_option
from bitnet.core.support.units import size


@click.group(no_args_is_help=False)
def cache() -> None:
    """Show or clear what is kept on disk: compiled kernels, checked merges, and the lines typed in conversations."""


@cache.command()
@json_option
def info(as_json: bool) -> None:
    """Show where compiled kernels and checked merges are kept, how many there are, and their size."""
    from bitnet.core.support.cache import KernelCache

    stats = KernelCache().stats()
    if as_json:
        folder = None if stats.folder is None else str(stats.folder)
        print_json({"folder": folder, "entries": stats.entries, "size": stats.size, "limit": stats.limit})
    else:
        say(f"{stats.folder}: {stats.entries} entries, {size(stats.size)} of at most {size(stats.limit)}")


@cache.command()
def path() -> None:
    """Print the folder of the compiled kernels."""
    from bitnet.core.support.cache import KernelCache

    say(str(KernelCache().stats().folder))


@cache.command()
def clear() -> None:
    """Remove every compiled kernel, all checked merges, and the lines typed in conversations.

    Kernels are compiled, and merges checked, again when they are needed.
    """
    from bitnet.core.cli.history import clear_history
    from bitnet.core.support.cache import KernelCache

    removed, lines = KernelCache().clear(), clear_history()
    say(f"removed {removed.entries} entries, {size(removed.size)}; {lines} lines of conversations")
