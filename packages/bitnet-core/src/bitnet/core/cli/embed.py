"""``bitnet embed``: vectors of texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import answer, progress, read_text
from bitnet.core.cli.options import FileName, embedder_options, load_embedder, utf8_text
from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.support.files import replacing

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CHUNK = 256
"""Texts computed between two updates of the progress."""


@click.command()
@click.argument("texts", metavar="[TEXT]...", nargs=-1, callback=utf8_text)
@click.option("-f", "--file", metavar="FILE", type=FileName(), help="The texts; '-' is standard input.")
@click.option("-o", "--output", metavar="FILE", type=FileName(), help="Where to write; .npy is numpy's format.")
@click.option(
    "--pooling",
    type=click.Choice(["mean", "cls", "last"]),
    help="Which tokens count.  [default: the file's, else mean]",
)
@click.option("--normalize/--no-normalize", default=True, show_default=True, help="Make each vector's length 1.")
@click.option("--truncate", is_flag=True, help="Cut texts that are longer than the context.")
@click.option("-c", "--context", "--ctx-size", metavar="N", type=int, help="Maximum tokens of a text.")
@embedder_options
def embed(
    texts: tuple[str, ...],
    file: Path | None,
    output: Path | None,
    pooling: Any,
    normalize: bool,
    truncate: bool,
    **params: Any,
) -> None:
    """Compute vectors of texts, for search and comparison.

    \b
    bitnet embed "a text" "another"
    bitnet embed -f texts.jsonl -o vectors.npy

    The texts are arguments, or a file's lines. A line of a .jsonl file is a text in quotes, or an object with "text".
    A line of the output is an object with "index" and "embedding"; a .npy file is an array, float32[texts, d].
    """
    import numpy as np

    if bool(texts) == (file is not None):
        raise click.UsageError("Give texts, or a file of them with -f.")
    given = list(texts) if file is None else _texts(file)
    if not given:
        raise InvalidInputError(f"{file} has no texts.")
    with load_embedder(params) as embedder, progress("texts") as update:
        tokens = [embedder.tokens(text, truncate=truncate, number=i) for i, text in enumerate(given)]
        parts = []
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            parts.append(embedder.embed(part, pooling=pooling, normalize=normalize))
            update(start + len(part), len(tokens))
    _write(np.concatenate(parts), output)


def _texts(file: Path) -> list[str]:
    """The texts of a file's lines; empty lines are skipped.

    Raises:
        InvalidInputError: It cannot be read, or a line is not a text.
    """
    lines = [
        line for line in enumerate(read_text(None if str(file) == "-" else file).splitlines(), 1) if line[1].strip()
    ]
    return [_text(file, *line) for line in lines] if file.suffix == ".jsonl" else [text for _, text in lines]


def _text(file: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{file}, line {number} is not JSON: {error}.") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidInputError(
            f'{file}, line {number} is {brief(value)}; it must be a text in quotes, or an object with "text".'
        )
    return text


def _lines(vectors: npt.NDArray[np.float32]) -> Iterator[str]:
    """A line of JSON for each vector, whose numbers have the digits that float32 needs."""
    for i, vector in enumerate(vectors):
        yield f'{{"index": {i}, "embedding": [{", ".join(map(str, vector))}]}}\n'


def _write(vectors: npt.NDArray[np.float32], output: Path | None) -> None:
    if output is None:
        for line in _lines(vectors):
            answer(line)
        return
    import numpy as np

    with replacing(output) as made:
        if output.suffix == ".npy":
            np.save(made, vectors)
        else:
            made.writelines(line.encode() for line in _lines(vectors))
