"""What the ingress sends to a replica, and gets from it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bitnet.core import Load
from bitnet.core.hal import DeviceInfo
from bitnet.server.generation import work
from bitnet.server.ray.gauges import Readings

EXPECTED_TOKENS = 256
"""Generated tokens that an answer counts as work, unless it may have only fewer."""


@dataclass(frozen=True, slots=True)
class Work(work.Work):
    """The generations of one request.

    Attributes:
        blocks: Hashes of the full KV blocks of the first prompt, in order, for the router.
        block_size: Tokens of a block.
        model: Hash of the model, if replicas hold several; 0: they hold this one only.
    """

    blocks: tuple[int, ...]
    block_size: int
    model: int = 0

    @classmethod
    def about(cls, model: int) -> Work:
        """Work without generations, by which the router finds a replica that has one of several models.

        Args:
            model: Its hash.
        """
        return cls((), (), {}, 1, None, None, False, blocks=(), block_size=1, model=model)

    @classmethod
    def embedding(cls, texts: Sequence[Sequence[int]], model: int) -> Work:
        """Texts whose vectors are wanted: prompts without an answer, of which no replica holds anything.

        Args:
            texts: Token ids of each.
            model: As for :meth:`about`.
        """
        prompts = tuple(array("i", text) for text in texts)
        return replace(cls.about(model), prompts=prompts, options={"max_tokens": 0})

    @property
    def expected_tokens(self) -> int:
        """Tokens that its answers are assumed to have."""
        given = self.options.get("max_tokens")
        each = EXPECTED_TOKENS if given is None else min(int(given), EXPECTED_TOKENS)
        return each * self.n * len(self.prompts)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ingress has to know of a replica's model.

    Attributes:
        deployment: Name of the replica's deployment.
        model: Name of the model; empty if the deployment has only this one.
        node: Id of the node that it is on.
        block_size: Tokens of a KV block.
    """

    deployment: str
    model: str
    replica: str
    node: str
    context: int
    block_size: int
    cache_bytes: int
    devices: tuple[DeviceInfo, ...]


@dataclass(frozen=True, slots=True)
class State:
    """What a replica says of a model that it has loaded, several times a second."""

    facts: Facts
    load: Load


@dataclass(frozen=True, slots=True)
class Held:
    """What a replica has loaded, and how it does.

    Attributes:
        models: Hashes of its models, also of those that it is loading; empty if its deployment has one model only.
    """

    states: tuple[State, ...]
    readings: Readings
    models: frozenset[int] = frozenset()
