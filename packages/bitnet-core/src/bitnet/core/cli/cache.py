"""``bitnet cache``: the compiled kernels that are kept on disk."""

from __future__ import annotations

import click

from bitnet.core.cli.console import print_json, size
from bitnet.core.cli.options import json_option


@click.group(no_args_is_help=False)
def cache() -> None:
    """Look at, or clear, the compiled kernels kept on disk."""


@cache.command()
@json_option
def info(as_json: bool) -> None:
    """Show where compiled kernels are kept, how many and how large."""
    from bitnet.core.cache import KernelCache

    stats = KernelCache().stats()
    if as_json:
        folder = None if stats.folder is None else str(stats.folder)
        print_json({"folder": folder, "entries": stats.entries, "size": stats.size, "limit": stats.limit})
    else:
        click.echo(f"{stats.folder}: {stats.entries} entries, {size(stats.size)} of at most {size(stats.limit)}")


@cache.command()
def path() -> None:
    """Print the folder of the compiled kernels."""
    from bitnet.core.cache import KernelCache

    click.echo(KernelCache().stats().folder)


@cache.command()
def clear() -> None:
    """Remove every compiled kernel; they are compiled again when they are needed."""
    from bitnet.core.cache import KernelCache

    removed = KernelCache().clear()
    click.echo(f"removed {removed.entries} entries, {size(removed.size)}")
