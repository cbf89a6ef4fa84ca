"""``bitnet receipt``: what computed an answer, shown and checked."""

from __future__ import annotations

from pathlib import Path

import click

from bitnet.core.cli.console import note, print_json
from bitnet.core.cli.options import verbose_option


@click.group(no_args_is_help=False)
def receipt() -> None:
    """Check, or show, what 'bitnet run --receipt' wrote."""


@receipt.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-m", "--model", metavar="FILE", type=click.Path(path_type=Path), help="Check that it was made with this model."
)
@verbose_option
def verify(file: Path, model: Path | None) -> None:
    """Check everything in a receipt that can be checked.

    Ends with status 6 where it does not hold.
    """
    from bitnet.core import receipt as receipts

    document = receipts.load(file)
    for unchecked in receipts.verify(document, model=model):
        note(f"not checked: {unchecked}")
    numbers = document["performance_baseline"]
    click.echo(
        f"{file} holds: {numbers['tokens_generated']} tokens at {numbers['tokens_per_second']:.1f}/s "
        f"on {document['compute_path']} with {document['model_info']['name']}"
    )


@receipt.command()
@click.argument("file", type=click.Path(path_type=Path))
@verbose_option
def show(file: Path) -> None:
    """Print a receipt, without checking what it says."""
    from bitnet.core import receipt as receipts

    print_json(receipts.load(file))
