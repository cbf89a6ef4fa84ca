"""Extensions of mkdocs: navigation by wildcard, and pages generated from the code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File

from bitnet.core.cli.app import EXIT_CODES, cli
from bitnet.core.support.env import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("index.md", "README.md")


def on_files(files: Any, config: Any) -> Any:
    """Add READMEs as pages; replace ``folder/*`` in the navigation by the pages below it, in the order of their names.

    The READMEs are those of the kernels' folders, and of packages that have no page of their own.
    """
    readmes = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "kernels").glob("*/README.md")}
    for path in (ROOT / "packages").glob("bitnet-*/README.md"):
        readmes[f"backends/{path.parent.name.removeprefix('bitnet-')}.md"] = path
    for page, path in readmes.items():
        if page not in files.src_uris and page != "backends/core.md":
            files.append(File.generated(config, page, content=path.read_text("utf-8")))
    pages = sorted(file.src_uri for file in files.documentation_pages())
    for section in config["nav"]:
        for title, below in section.items() if isinstance(section, dict) else ():
            if isinstance(below, str) and below.endswith("/*"):
                folder = below.removesuffix("*")
                section[title] = sorted(
                    (page for page in pages if page.startswith(folder)),
                    key=lambda page: (page.removeprefix(folder) not in FIRST, page),
                )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in ``<!-- commands -->``, ``<!-- environment -->`` and ``<!-- exit codes -->``."""
    made = {
        "commands": lambda: "\n\n".join(commands(cli, "bitnet")),
        "environment": lambda: table(
            ("variable", "values", "meaning"), ((f"`{v.name}`", f"`{v.values}`", v.meaning) for v in VARIABLES)
        ),
        "exit codes": lambda: table(("code", "meaning"), ((str(code), said) for code, said in EXIT_CODES.items())),
    }
    return re.sub(rf"<!-- ({'|'.join(made)}) -->", lambda found: made[found[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Turn a docstring's role (``func:`` before a name) into the name, linked to the entry that the page has of it."""

    def link(found: re.Match[str]) -> str:
        name = found[1].lstrip("~.").rpartition(".")[2]
        ids = [there for there in re.findall(r'id="([\w.]+)"', html) if there.rpartition(".")[2] == name]
        return f'<a href="#{ids[0]}"><code>{name}</code></a>' if ids else f"<code>{name}</code>"

    return re.sub(r":\w+:<code>([\w.~]+)</code>", link, html)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def commands(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    """Markdown for a command and all below it: usage, help, options."""
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
    path = context.command_path
    if parent is not None:
        yield f"{'#' * (len(path.split()))} {path}"
    yield f"```text\n{context.get_usage().removeprefix('Usage: ')}\n```"
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        kept = paragraph.removeprefix("\b\n")  # click's mark for lines that stay as they are
        yield kept if kept == paragraph else f"```sh\n{kept}\n```"
    records = (option.get_help_record(context) for option in command.get_params(context))
    options = [record for record in records if record and record[1]]  # not the arguments
    yield table(("option", "meaning"), ((f"`{names}`", meaning) for names, meaning in options))
    for below in getattr(command, "commands", {}).values():
        yield from commands(below, below.name or "", context)
