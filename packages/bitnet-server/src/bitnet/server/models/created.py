"""Names that clients have made for models of a folder, each with a preset: ``created.json`` in the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet.core.errors import InvalidInputError, brief
from bitnet.server.models.presets import Preset, read_preset, read_text
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

FILE = "created.json"
MAX_CREATED = 1000
"""Maximum names."""
MAX_NAME = 200
"""Maximum characters of a name."""


@dataclass(frozen=True, slots=True)
class Created:
    """A name.

    Attributes:
        base: The name of the model that it means.
        preset: What requests for it get, before the base's own preset.
    """

    base: str
    preset: Preset


class CreatedNames:
    """The names that clients have made, kept in a file. For one thread at a time.

    Raises:
        InvalidInputError: The file cannot be read, or is not what this wrote.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        try:
            names = Fields({"names": json.loads(read_text(self._file))}).object("names") or Fields({})
            tables = {name: names.object(name) or Fields({}, name) for name in names.values}
            self.names: Mapping[str, Created] = {name: _created(table) for name, table in tables.items()}
        except FileNotFoundError:
            self.names = {}
        except (ValueError, RecursionError, RequestError) as error:
            raise InvalidInputError(f"{self._file}: {error}", hint="Correct it, or remove it.") from None

    def put(self, name: str, created: Created) -> None:
        """Add a name, or change what it means.

        Raises:
            RequestError: It cannot be a name, or there are too many, or the file cannot be written.
        """
        check_name(name)
        if name not in self.names and len(self.names) >= MAX_CREATED:
            raise RequestError(400, f"There are {MAX_CREATED} created models already; delete some.")
        self._write({**self.names, name: created})

    def delete(self, name: str) -> None:
        """Forget a name; errors as for :meth:`put`."""
        self._write({other: created for other, created in self.names.items() if other != name})

    def _write(self, names: Mapping[str, Created]) -> None:
        text = json.dumps({name: _values(created) for name, created in names.items()}, indent=2, ensure_ascii=False)
        written = self._file.with_name(f".{FILE}.{os.getpid()}")
        try:
            written.write_text(text, encoding="utf-8")
            written.replace(self._file)
        except OSError as error:
            written.unlink(missing_ok=True)
            raise RequestError(500, f"The models folder cannot be written: {error.strerror}.") from None
        self.names = names


def check_name(name: str) -> None:
    """Check that a client may give a model a name.

    Raises:
        RequestError: It is too long, or has characters that a path or a header cannot hold.
    """
    plain = name.isascii() and name.isprintable() and not set(name) & set(' "\\')
    if not plain or not name[:1].isalnum() or len(name) > MAX_NAME:
        raise RequestError(
            400,
            f"{brief(name)} cannot be a model's name: it must begin with a letter or digit and have at most {MAX_NAME} "
            "characters of ASCII, without spaces and quotes.",
            field="model",
        )


def _created(table: Fields) -> Created:
    table.require("base")
    return Created(table.text("base") or "", read_preset(table))


def _values(created: Created) -> dict[str, Any]:
    preset = created.preset
    found = {
        "base": created.base,
        "system": preset.system,
        "template": preset.template,
        "sampling": dict(preset.sampling),
    }
    return {name: value for name, value in found.items() if value}
