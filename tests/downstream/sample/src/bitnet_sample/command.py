"""A command of ``bitnet``: what an entry point in the group ``bitnet.commands`` names."""

from __future__ import annotations

import click


@click.command()
@click.argument("question")
def shout(question: str) -> None:
    """Answer a question in capital letters."""
    from bitnet_sample import answer  # the module is loaded for `bitnet --help`, so what is heavy is imported here

    click.echo(answer(question).upper())
