"""The models of a server by name: those it was started with, and those that its catalog has at the moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.support.files import resolved
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.folder import state_of, stored_bytes
from bitnet.server.models.pooled import PooledModel
from bitnet.server.models.presets import Preset
from bitnet.server.models.service import Source
from bitnet.server.models.settings import Settings
from bitnet.server.request.errors import RequestError

MAX_NAMED = 20
"""Maximum names in an error."""


class Named(NamedTuple):
    """What a name means.

    Attributes:
        names: Names that an answer may carry; the first is the one that it carries.
    """

    model: PooledModel
    names: tuple[str, ...]
    preset: Preset


class Listing:
    """The models of a server, loaded or not.

    Args:
        sources: Models that stay; the first is the default for requests that name none.
        catalog: Models that come and go; None: there are none.
        settings: The other names by which models may be requested.

    Attributes:
        models: All of them.

    Raises:
        InvalidInputError: An alias is for a model that there is not.
    """

    def __init__(self, sources: Sequence[Source], catalog: Catalog | None, settings: Settings) -> None:
        self.catalog, self._settings = catalog, settings
        self._fixed = [PooledModel(source) for source in sources]
        self._found: dict[Path, PooledModel] = {}
        self._gone: set[str] = set()
        self.models = [*self._fixed]
        for pattern, target in () if catalog is not None else settings.model_aliases:
            if self._own(target) is None:
                here = ", ".join(self.names)
                raise InvalidInputError(f"the alias {brief(pattern)} is for {brief(target)}, which is none of {here}.")

    def entries(self) -> Iterator[Named]:
        """Every name."""
        for one in self.models:
            for name in one.source.names:
                yield Named(one, (name,), one.source.preset)
        for name in () if self.catalog is None else self.catalog.created.names:
            if self._model(name) is None and (found := self._created(name)) is not None:
                yield found

    @property
    def names(self) -> list[str]:
        return [entry.names[0] for entry in self.entries()]

    def default(self) -> PooledModel:
        """The model of requests that name none: the first one, or the most recently used of a catalog.

        Raises:
            RequestError: There are no models.
        """
        return self._fixed[0] if self._fixed else self.current()

    def current(self) -> PooledModel:
        """The most recently requested model.

        Raises:
            RequestError: There are no models.
        """
        if not self.models:
            raise RequestError(
                404, "There are no models here yet; pull one, or put one into the folder.", code="model_not_found"
            )
        return max(self.models, key=lambda one: (one.loaded, one.used))

    def changeable(self, one: PooledModel) -> bool:
        """Whether a model is one of the catalog's."""
        return self._found.get(one.source.path) is one

    def lookup(self, name: str) -> Named | None:
        """What a name means: a model's own name, or one that an alias's pattern matches; None: nothing."""
        if (found := self._own(name)) is not None:
            return found
        aliases = self._settings.model_aliases
        meant = next((target for pattern, target in aliases if fnmatchcase(name, pattern)), None)
        return None if meant is None else self._own(meant)

    def _own(self, name: str) -> Named | None:
        return self._model(name) or self._created(name) or self._cached(name)

    def _model(self, name: str) -> Named | None:
        for one in self.models:
            if name in one.source.names or name.removesuffix(":latest") in one.source.names:
                return Named(one, one.source.names, one.source.preset)
        return None

    def _created(self, name: str) -> Named | None:
        names = {} if self.catalog is None else self.catalog.created.names
        given = name if name in names else name.removesuffix(":latest")
        if (created := names.get(given)) is None:
            return None
        base = self._model(created.base) or self._cached(created.base)
        return None if base is None else Named(base.model, (given,), created.preset.over(base.preset))

    def _cached(self, name: str) -> Named | None:
        """The model in the hub's cache that the hub calls so."""
        path = None if self.catalog is None else self.catalog.path_of(name)
        found = None if path is None else self._found.get(path)
        return None if found is None else Named(found, found.source.names, found.source.preset)

    def named(self, name: str | None, field: str = "model", *, exact: bool = False) -> Named:
        """What a request's name means.

        Args:
            exact: Whether only a model's own names count, as for a change of it.

        Raises:
            RequestError: There is no model with that name.
        """
        if name is not None and (found := self._own(name) if exact else self.lookup(name)) is not None:
            return found
        if not exact and (name is None or self._settings.any_model):
            one = self.default()
            return Named(one, one.source.names, one.source.preset)
        here = self.names
        more = f" and {len(here) - MAX_NAMED} more" if len(here) > MAX_NAMED else ""
        are = f"{', '.join(here[:MAX_NAMED])}{more} {'is' if len(here) == 1 else 'are'}" if here else "no model is"
        made = None if self.catalog is None or name is None else self.catalog.created.names.get(name)
        if made is not None:
            what = f"The model {brief(name)} was made from {brief(made.base)}, which is not here; {are}."
        elif name in self._gone:
            what = f"The model {brief(name)} is not here any more, as its file was removed; {are}."
        else:
            what = f"The model {brief(name)} is not here; {are}."
        raise RequestError(404, what, field=field, code="model_not_found")

    def stale(self, name: str | None) -> bool:
        """Whether the catalog must be asked before a name can be understood: its model may have come or gone."""
        if self.catalog is None:
            return False
        found = self.lookup(name) if name is not None else None
        if found is None or found.model.failure is not None or self.catalog.settings_changed:
            return True
        return not found.model.source.path.exists()

    def take(self, sources: Sequence[Source]) -> list[PooledModel]:
        """Have the catalog's models be these; returns those that are gone, which the caller must close.

        A model in use stays until the next time, unless its file is gone. One whose file has changed since it failed
        may be tried again.
        """
        before, self._found = self._found, {}
        fixed = {resolved(one.source.path) for one in self._fixed}
        taken = {name for one in self._fixed for name in one.source.names}
        for source in sources:
            names = tuple(name for name in source.names if name not in taken)
            if not names or resolved(source.path) in fixed:
                continue
            taken |= set(names)
            one = before.pop(source.path, None) or PooledModel(source)
            one.source = Source(names, source.path, source.load, preset=source.preset)
            if one.service is None:
                one.size = stored_bytes(source.path)
                if state_of(source.path) != one.failed_as:
                    one.failure = None
            self._found[source.path] = one
        gone = [*before.values()]
        self._gone = (self._gone | {name for one in gone for name in one.source.names}) - taken
        self.models = [*self._fixed, *self._found.values()]
        return gone
