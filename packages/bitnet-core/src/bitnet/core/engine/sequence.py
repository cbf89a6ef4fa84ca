"""Sequences: what an engine runs. Generations are one kind, scorings another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.placement import Placement
from bitnet.core.engine.prompt_lookup import NO_DRAFT, Draft
from bitnet.core.engine.results import FinishReason, Update
from bitnet.core.engine.sampling import TokenLogprob
from bitnet.core.hal import GREEDY, Adjustment, SamplingParams

F32 = npt.NDArray[np.float32]


class TokenSequence(ABC):
    """Tokens that are batched with those of other sequences and own a part of the KV cache.

    Attributes:
        tokens: The prompt and the generated tokens.
        placement: Its device and its part of the cache; belongs to the engine and its scheduler.
        finished: Whether it takes part in no more steps. Its last update may be yet to come.
        held: Whether it has logits, but not yet the tokens that it may choose.
        appended: Number of its last tokens that it added of its own when it accepted a result. No device chose them,
            and what the device has computed since does not follow them.
        layer_draft: Whether the draft of its last step was made by a draft layer.
    """

    def __init__(self, number: int, tokens: Sequence[int]) -> None:
        self.number = number
        self.tokens = list(tokens)
        self.placement = Placement()
        self.finished = False
        self.held = False
        self.appended = 0
        self.layer_draft = False

    @property
    @abstractmethod
    def target(self) -> int:
        """Number of positions that must be in the cache before the next token can be computed."""

    @property
    @abstractmethod
    def first_row(self) -> int:
        """The first position whose logits are wanted."""

    @property
    @abstractmethod
    def needs_logits(self) -> bool:
        """Whether the host must see the logits, which rules out multi-token steps."""

    @property
    def sampling(self) -> SamplingParams:
        """How the device draws this sequence's next token."""
        return GREEDY

    @property
    def steps_left(self) -> int:
        """Number of tokens it may still receive before the host must check it."""
        return 1

    @property
    def wants_slot(self) -> bool:
        """Whether its logits must be adjusted and are not needed on the host for anything else."""
        return False

    @property
    def slot_is_stale(self) -> bool:
        """Whether the marks or biases have changed since its slot was filled, because of tokens generated since."""
        return False

    def slot_contents(self, vocab_size: int) -> tuple[npt.NDArray[np.int32], F32]:
        """The marks and biases for its next token, ``[vocab_size]`` each; afterwards the slot counts as up to date."""
        return np.zeros(vocab_size, np.int32), np.zeros(vocab_size, np.float32)

    @property
    def adjustment(self) -> Adjustment | None:
        """How the device must adjust its next logits; None: not at all."""
        return None

    def draft(self, most: int) -> Draft:
        """A draft of at most ``most`` next tokens, to be verified in one step; empty if that is not possible."""
        return NO_DRAFT

    def draft_room(self, most: int) -> int:
        """Maximum tokens that a draft of any origin may have, at most ``most``."""
        return 0

    @property
    def looks_up(self) -> bool:
        """Whether it may have drafts."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether drafts are likely to come soon."""
        return False

    def started(self, cached: int) -> None:  # noqa: B027  (optional to override)
        """The first step is about to run; ``cached`` positions were there already."""

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of likeliest tokens, besides the chosen one, whose log-probabilities the device must report. None: no
        report."""
        return None

    @abstractmethod
    def accept(
        self, sampled: Sequence[int], logits: F32 | None, reported: Sequence[TokenLogprob] = (), drafted: int = 0
    ) -> None:
        """Record a step's result: the tokens sampled on the device or, if logits are needed, ``logits[rows, V]``.

        ``reported`` holds the log-probabilities of the tokens, if the device was to report them. ``drafted`` tokens
        were fed; all of ``sampled`` except the last agree with them.

        This does only what the next step depends on, as the device is waiting.
        """

    def resume(self) -> None:  # noqa: B027  (optional to override)
        """If it is held, try again to choose its token."""

    @property
    def awaited(self) -> bool:
        """Whether its next update is its first or its last one, which its reader waits for most."""
        return True

    @abstractmethod
    def update(self) -> Update | None:
        """What is new since the last update. This searches for stop strings, which may end the sequence."""

    @abstractmethod
    def end(self, reason: FinishReason) -> Update:
        """End the sequence here; the update holds what is new."""
