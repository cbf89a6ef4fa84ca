"""Bombs in chat templates: any list of names and templates becomes families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from bombs.base import GGUF
from bombs.family import Family

TEMPLATES = {
    "a loop without end": "{% for i in range(10 ** 9) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a text of ten billion": "{{ 'x' * 10 ** 10 }}",
    "a number of ten billion digits": "{{ 10 ** (10 ** 10) }}",
    "a list doubled": "{% set l = [1] %}" + "{% set l = l + l %}" * 99,
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


def families(templates: Iterable[tuple[str, str]] = tuple(TEMPLATES.items())) -> Iterator[Family]:
    """A family for each template: a sound model that has it, brought to ``run``."""
    for name, source in templates:
        yield Family(f"template: {name}", partial(_write, source), "template", ("run",))


def _write(source: str, folder: Path) -> Path:
    model = GGUF()
    model.metadata["tokenizer.chat_template"] = source
    return model.write(folder)
