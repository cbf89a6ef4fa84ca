"""``bitnet convert``: models of other formats to GGUF."""

from __future__ import annotations

from pathlib import Path

import click

from bitnet.core.cli.console import note, progress, say
from bitnet.core.cli.options import FileName, ModelName, i2s_layout_option, verbose_option
from bitnet.core.errors import InvalidInputError
from bitnet.core.support.units import size

TYPES = ("i2_s", "tq1_0", "tq2_0", "q2_0", "q2_0_g128", "pq2_0", "ptq1_0", "stq1_0", "q1_0")


@click.command()
@click.argument("source", type=ModelName())
@click.argument("target", type=FileName())
@click.option(
    "--type",
    "--outtype",
    "dtype",
    type=click.Choice(TYPES),
    metavar="TYPE",
    help=f"Encoding of the ternary weights: {', '.join(TYPES)}.  [default: i2_s where each matrix has one scale, else "
    "q2_0]",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
@i2s_layout_option
@verbose_option
def convert(source: Path | str, target: Path, dtype: str | None, force: bool, i2s_layout: str) -> None:
    """Convert a model to a GGUF file.

    SOURCE is a folder from Hugging Face (packed or master weights) or of MLX (2 bits), a model on the hub
    (hf:ORG/NAME), or a GGUF file. Ternary weights and their scales are converted exactly, or the conversion ends with
    an error. A folder's float embeddings and output heads become F16.

    \b
    bitnet convert bitnet-b1.58-2B-4T/ 2b4t.gguf
    bitnet convert --type q2_0 bonsai-g128.gguf bonsai-g64.gguf
    """
    convert_to(source, target, dtype=dtype, force=force, i2s_layout=i2s_layout)


def convert_to(
    source: Path | str,
    target: Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    i2s_layout: str = "official",
) -> None:
    """Convert with a progress bar, and say what was written; a ``str`` is a model on the hub."""
    from bitnet.core.model.convert import convert_model

    if target.is_dir():
        raise InvalidInputError(f"{target} is a folder; name the file to write.")
    if target.exists() and not force:
        raise InvalidInputError(f"{target} already exists.", hint="Name another file, or use --force.")
    name = None
    if isinstance(source, str):
        from bitnet.core.hub.names import parse
        from bitnet.core.hub.pull import weights_folder

        model = parse(source)
        source, name = weights_folder(model), model.repo.rpartition("/")[2]
    with progress("converting") as update:
        convert_model(source, target, dtype=dtype, i2s_layout=i2s_layout, name=name, progress=update)  # type: ignore[arg-type]
    if target.is_file():
        say(f"{target}: {size(target.stat().st_size)}")
    else:  # a pipe, and standard output may be the same one
        note(f"{target}: written")
