"""Settings of models by name, as ``models.toml`` in a models folder gives them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bitnet.core.engine import GenerationOptions
from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.text.chat import ChatTemplate
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "models.toml"
MAX_BYTES = 1 << 20
"""Maximum bytes of the file, and of a template that it names."""
MAX_ALIASES = 100
"""Maximum aliases of a model."""
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "max_tokens"),
)
"""Options of a generation that a preset may set."""
KEYS = ("aliases", "context", "device", "isolate", "system", "template", "sampling")
"""What a table of the file may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What requests get that name a model by a certain name, unless they say otherwise.

    Attributes:
        system: System message of conversations that have none.
        template: Source of the chat template; None: the model's own.
        sampling: Options of generations, named in :data:`SAMPLING`.
    """

    system: str | None = None
    template: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def over(self, other: Preset) -> Preset:
        """This preset, completed by another one."""
        return Preset(
            system=other.system if self.system is None else self.system,
            template=other.template if self.template is None else self.template,
            sampling={**other.sampling, **self.sampling},
        )


NO_PRESET = Preset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How a model is named, loaded and asked.

    Attributes:
        context: Maximum tokens of prompt and answer; None: as for all models.
        device: Device that computes; None: as for all models.
        isolate: Whether the model runs in a process of its own, whatever the others do.
    """

    aliases: tuple[str, ...] = ()
    context: int | None = None
    device: str | None = None
    isolate: bool = False
    preset: Preset = NO_PRESET


def read_settings(folder: Path) -> dict[str, ModelSettings]:
    """The settings in a models folder, by model name; empty without a file.

    Raises:
        InvalidInputError: The file cannot be read, or has something that is not a setting; names the place.
    """
    file = folder / FILE
    try:
        tables = tomllib.loads(read_text(file))
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{file} is not TOML: {error}.") from None
    found = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidInputError(
                f"{file}: {name} is outside of a table.", hint='Write it below the model\'s name: ["model-name"].'
            )
        try:
            found[name] = _settings(Fields(table, f"[{_quoted(name)}]"), folder)
        except RequestError as error:
            raise InvalidInputError(f"{file}: {error}") from None
    aliases = [alias for settings in found.values() for alias in settings.aliases]
    for alias in aliases:
        if alias in found or aliases.count(alias) > 1:
            raise InvalidInputError(f"{file}: two models have the name {brief(alias)}.")
    return found


def _settings(table: Fields, folder: Path) -> ModelSettings:
    _check_keys(table, KEYS)
    device = table.text("device")
    if device is not None and not device.strip():
        raise _wrong(table, "device", "is empty.")
    template = table.text("template")
    if template is not None and not template.strip():
        raise _wrong(table, "template", "is empty.")
    source = None if template is None else _template(table, folder / template)
    return ModelSettings(
        aliases=table.strings("aliases", MAX_ALIASES),
        context=table.integer("context", 1),
        device=device,
        isolate=table.flag("isolate"),
        preset=read_preset(Fields({**table.values, "template": source}, table.name("")[:-1])),
    )


def read_preset(table: Fields) -> Preset:
    """A preset whose ``template`` is a source.

    Raises:
        RequestError: Something in it is wrong.
    """
    sampling = table.object("sampling") or Fields({})
    _check_keys(sampling, SAMPLING)
    return Preset(system=table.text("system"), template=table.text("template"), sampling=checked_sampling(sampling))


def checked_sampling(given: Fields) -> dict[str, Any]:
    """Options of a generation that are in their range.

    Raises:
        RequestError: One is not; names it.
    """
    values = {name: value for name, value in given.values.items() if value is not None}
    if "stop" in values:
        values["stop"] = given.strings("stop")
    try:
        GenerationOptions(**values)
    except InvalidInputError as error:
        name, _, rest = error.message.partition(" ")
        raise _wrong(given, name, rest) if name in values else RequestError(400, error.message) from None
    return values


def _check_keys(table: Fields, known: tuple[str, ...]) -> None:
    for key in table.values:
        if key not in known:
            close = get_close_matches(key, known, 1)
            meant = f"; {close[0]} is the nearest" if close else f"; there are {', '.join(known)}"
            raise _wrong(table, key if key.isprintable() else brief(key), f"is not a setting{meant}.")


def _template(table: Fields, file: Path) -> str:
    try:
        source = read_text(file)
    except FileNotFoundError:
        raise _wrong(table, "template", f"names {file}, which does not exist.") from None
    except InvalidInputError as error:
        raise _wrong(table, "template", f"names a file that cannot be used: {error.message}") from None
    try:
        ChatTemplate(source)
    except InvalidInputError as error:
        raise _wrong(table, "template", f"names {file}: {error.message}") from None
    return source


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        FileNotFoundError: There is none.
        InvalidInputError: It cannot be read, is too large, or is not UTF-8.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise InvalidInputError(f"{file} has more than {MAX_BYTES:,} bytes.")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{file} is not UTF-8 (at byte {error.start}).") from None
    except ValueError:
        raise InvalidInputError(f"{str(file)!r} is no path: it has a null character.") from None


def _wrong(table: Fields, key: str, message: str) -> RequestError:
    return RequestError(400, f"{table.name(key)} {message}")


def _quoted(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else f'"{name}"'
