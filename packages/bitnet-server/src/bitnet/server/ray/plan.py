"""What is to be deployed: a document of JSON values, from the command line or a Serve config file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from bitnet.core.errors import InvalidInputError
from bitnet.server.models.settings import Settings

APPLICATION = "bitnet"
"""Name of the application on the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A deployment of the server on a cluster.

    Attributes:
        models: The names of each model, and its file on every node, ``hf:ORG/NAME``, or None for the demo model.
        folder: A folder on every node, whose models replicas load on demand; None: there is none.
        options: Arguments of :func:`~bitnet.core.load_model` for every replica.
        settings: The application's settings.
        replicas: Replicas of each model, and of the folder; None: as many as the load needs.
        min_replicas: Minimum replicas where their number follows the load; 0: none while there is nothing to do.
        gpus, cpus: What Ray reserves for a replica.
        drain: Seconds within which the requests of a replica must end before it is stopped.
        local: Whether only this machine is listened on.
    """

    models: tuple[tuple[tuple[str, ...], str | None], ...]
    options: Mapping[str, Any]
    settings: Settings
    folder: str | None = None
    replicas: int | None = 1
    min_replicas: int = 1
    gpus: float = 0.0
    cpus: float = 1.0
    drain: float = 30.0
    local: bool = False

    @property
    def deployments(self) -> int:
        """Number of deployments with replicas: one a model, and one for the folder."""
        return len(self.models) + (self.folder is not None)

    def document(self) -> dict[str, Any]:
        """The plan as JSON values, without API keys."""
        plain = asdict(self)
        del plain["settings"]["api_keys"], plain["settings"]["names"]
        plain["models"] = [{"names": list(names), "file": file} for names, file in self.models]
        plain["settings"] = _changed(plain["settings"], tuple, list)
        return plain

    @classmethod
    def read(cls, document: Mapping[str, Any], api_keys: tuple[str, ...] = ()) -> Plan:
        """The plan that a document describes.

        Raises:
            InvalidInputError: It has a field that is not known, or lacks one.
        """
        unknown = document.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise InvalidInputError(
                f"the arguments of the Serve application have {sorted(unknown)[0]}, not known here."
            )
        try:
            settings = {**_changed(document["settings"], list, tuple), "api_keys": api_keys}
            models = tuple((tuple(one["names"]), one["file"]) for one in document["models"])
            return cls(**{**document, "models": models, "settings": Settings(**settings)})
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"the arguments of the Serve application are not complete: {error}.") from None


def _changed(value: Any, kind: type[list[Any] | tuple[Any, ...]], other: Callable[[list[Any]], Any]) -> Any:
    """A value whose sequences of one kind are of the other one: tuples are lists in a document."""
    if isinstance(value, Mapping):
        return {name: _changed(item, kind, other) for name, item in value.items()}
    return other([_changed(item, kind, other) for item in value]) if isinstance(value, kind) else value
