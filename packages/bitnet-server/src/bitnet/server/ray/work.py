"""What the ingress sends to a replica, and gets from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitnet.core import Chunk, Completion, Load
from bitnet.core.hal import DeviceInfo

if TYPE_CHECKING:
    from bitnet.core.engine.options import OptionArguments
    from bitnet.core.text.thinking import Thinking
    from bitnet.server.forms.structured import Form
    from bitnet.server.forms.token_rules import TokenRules

EXPECTED_TOKENS = 256
"""Generated tokens that an answer counts as work, unless it may have only fewer."""


@dataclass(frozen=True, slots=True)
class Work:
    """The generations of one request.

    Attributes:
        prompts: Token ids, ``int32`` each.
        thinking: How thoughts are marked in the answers to each prompt; None: they are not.
        n: Number of continuations of each prompt.
        form: As in a job; its source is text or a JSON value.
        receipt: Whether a receipt of each is wanted.
        blocks: Hashes of the full KV blocks of the first prompt, in order, for the router.
        block_size: Tokens of a block.
    """

    prompts: tuple[array[int], ...]
    thinking: tuple[Thinking | None, ...]
    options: OptionArguments
    n: int
    form: Form | None
    rules: TokenRules | None
    receipt: bool
    blocks: tuple[int, ...]
    block_size: int

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def expected_tokens(self) -> int:
        """Tokens that its answers are assumed to have."""
        given = self.options.get("max_tokens")
        each = EXPECTED_TOKENS if given is None else min(int(given), EXPECTED_TOKENS)
        return each * self.n * len(self.prompts)


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of continuation ``index``; its last one comes with the completion, and the receipt if one is wanted."""

    index: int
    chunk: Chunk
    completion: Completion | None = None
    receipt: dict[str, Any] | None = None


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
