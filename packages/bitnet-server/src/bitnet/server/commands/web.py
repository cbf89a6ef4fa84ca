"""``bitnet web``. ``bitnet --help`` imports this module, so functions import the rest."""

from __future__ import annotations

from pathlib import Path

import click

from bitnet.core.cli.console import say
from bitnet.core.support.units import size


@click.group(no_args_is_help=False)
def web() -> None:
    """Make a static site that runs models in its readers' browsers."""


@web.command()
@click.option("-o", "--output", metavar="FOLDER", type=click.Path(path_type=Path), required=True, help="The folder.")
@click.option(
    "-m",
    "--model",
    "models",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="GGUF file that the site offers; the first one is proposed.  [default: the demo model]",
)
@click.option(
    "--pyodide",
    metavar="FOLDER|URL",
    help="Where the files of Pyodide are.  [default: downloaded from jsDelivr, and checked]",
)
def build(output: Path, models: tuple[Path, ...], pyodide: str | None) -> None:
    """Make a folder that any web server or GitHub Pages can host.

    Readers need nothing but a browser; what they write stays on their machines. An earlier site in FOLDER is replaced.
    """
    from bitnet.core.model.default import default_model_path
    from bitnet.server.web.build import build as make

    sizes = make(output, models or (default_model_path(),), pyodide)
    say(*(f"{name:<9} {size(count):>10}" for name, count in sizes.items()))
    say(f"{output} is complete.")
