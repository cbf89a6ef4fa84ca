"""What the ingress sends to a replica, and gets from it."""

from __future__ import annotations

from dataclasses import dataclass

from bitnet.core import Load
from bitnet.core.hal import DeviceInfo
from bitnet.server.generation import work

EXPECTED_TOKENS = 256
"""Generated tokens that an answer counts as work, unless it may have only fewer."""


@dataclass(frozen=True, slots=True)
class Work(work.Work):
    """The generations of one request.

    Attributes:
        blocks: Hashes of the full KV blocks of the first prompt, in order, for the router.
        block_size: Tokens of a block.
    """

    blocks: tuple[int, ...]
    block_size: int

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
        deployment: Name of the replica's deployment, which is the model's.
        node: Id of the node that it is on.
        block_size: Tokens of a KV block.
    """

    deployment: str
    replica: str
    node: str
    context: int
    block_size: int
    cache_bytes: int
    devices: tuple[DeviceInfo, ...]


@dataclass(frozen=True, slots=True)
class State:
    """What a replica says of itself several times a second."""

    facts: Facts
    load: Load
