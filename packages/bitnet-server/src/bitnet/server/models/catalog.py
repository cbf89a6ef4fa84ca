"""What a server can load that was started with a models folder: the folder's models, the hub's cache, and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.gguf.split import part_paths
from bitnet.core.hub import cached, names
from bitnet.core.hub.choice import is_supported
from bitnet.core.hub.names import HubName
from bitnet.core.hub.removal import plan
from bitnet.core.support.files import files_below
from bitnet.core.support.log import logger
from bitnet.server.models.created import CreatedNames
from bitnet.server.models.folder import gguf_of, models_in
from bitnet.server.models.presets import FILE, ModelSettings, read_settings
from bitnet.server.models.service import Loaded, Source
from bitnet.server.request.errors import RequestError

HOSTS = ("https://hf.co/", "https://huggingface.co/", "hf.co/", "huggingface.co/")
"""What may precede a name on the hub."""
Load: TypeAlias = Callable[[str, Path, ModelSettings], "Loaded | Awaitable[Loaded]"]
"""Loads the model of a name from its GGUF file."""


class Catalog:
    """The models of a folder and of the hub's cache, which may change at any time. For one thread at a time.

    Args:
        folder: The models folder. Its ``models.toml`` is read again when it changes.
        load: Loads one of the models.

    Raises:
        InvalidInputError: The folder cannot be read, or its settings are wrong.
    """

    def __init__(self, folder: Path, load: Load) -> None:
        self.folder, self._load = folder, load
        self._state = self._settings_state()
        self._settings = read_settings(folder)
        self.created = CreatedNames(folder)
        self._unknown: frozenset[str] = frozenset()
        self._cached: dict[Path, HubName] = {}
        try:
            models_in(folder)
        except OSError as error:
            raise InvalidInputError(f"--models {folder} cannot be read: {error.strerror}.") from None

    def sources(self) -> list[Source]:
        """The models that are there now, sorted by name; the folder's come first."""
        self._read_settings()
        found = self._paths()
        unknown = frozenset(self._settings) - frozenset(found)
        for name in sorted(unknown - self._unknown):
            logger.warning("%s has settings of %s, which is not here.", self.folder / FILE, name)
        self._unknown = unknown
        return [self._source(name, path, found) for name, path in found.items()]

    def _source(self, name: str, path: Path, found: Mapping[str, Path]) -> Source:
        settings = self._settings.get(name, ModelSettings())
        aliases = [alias for alias in settings.aliases if alias not in found]
        return Source((name, *aliases), path, partial(self._loaded, name, path, settings), preset=settings.preset)

    def _loaded(self, name: str, path: Path, settings: ModelSettings) -> Loaded | Awaitable[Loaded]:
        return self._load(name, gguf_of(path), settings)

    def _paths(self) -> dict[str, Path]:
        try:
            found = models_in(self.folder)
        except OSError as error:
            logger.error("%s cannot be read: %s", self.folder, error.strerror)
            found = {}
        self._cached = _cached()
        count = Counter(name.repo for name in self._cached.values())
        for path, name in self._cached.items():
            found.setdefault(str(name) if count[name.repo] > 1 else name.repo, path)
        return found

    def path_of(self, name: str) -> Path | None:
        """The file in the hub's cache that a name on the hub means, such as ``ORG/NAME:i2_s``, if there is one."""
        try:
            return cached.find(hub_name(name))
        except BitNetError:
            return None

    def delete(self, path: Path) -> None:
        """Delete a model's files, which are no longer in use.

        Raises:
            RequestError: It is a folder, or a file cannot be deleted.
            BitNetError: The hub's cache cannot be changed.
        """
        if (name := self._cached.get(path)) is not None:
            plan(name).execute()
            return
        if path.is_dir():
            raise RequestError(400, "This model is a folder, whose files are not deleted from here; delete it by hand.")
        try:
            for file in part_paths(path):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise RequestError(500, f"The model's file cannot be deleted: {error.strerror}.") from None

    @property
    def settings_changed(self) -> bool:
        """Whether ``models.toml`` has been written since it was read."""
        return self._settings_state() != self._state

    def _settings_state(self) -> tuple[int, int] | None:
        try:
            info = (self.folder / FILE).stat()
        except OSError:
            return None
        return info.st_mtime_ns, info.st_size

    def _read_settings(self) -> None:
        """Read the settings again if their file has changed; settings that are wrong change nothing."""
        state = self._settings_state()
        if state == self._state:
            return
        self._state = state
        try:
            self._settings = read_settings(self.folder)
        except InvalidInputError as error:
            logger.error("the settings stay as they were: %s", error)


def hub_name(text: str) -> HubName:
    """A name on the hub, also as Ollama's clients write it: ``hf.co/ORG/NAME:ENCODING``.

    Raises:
        InvalidInputError: It is none.
    """
    for host in HOSTS:
        text = text.removeprefix(host)
    return names.parse(text.removesuffix(":latest"))


def _cached() -> dict[Path, HubName]:
    """The models in the hub's cache, sorted by name."""
    found = {}
    for repo in cached.repos():
        folder = cached.snapshot(repo)
        for file in [] if folder is None else files_below(folder, ".gguf"):
            if is_supported(file.name) and part_paths(file) and folder is not None:
                found[file] = HubName(repo, file.relative_to(folder).as_posix())
    return found
