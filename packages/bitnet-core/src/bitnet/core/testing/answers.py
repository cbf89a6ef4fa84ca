"""Compares a device's answers to questions for the demo model with the CPU's, token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bitnet.core.api import Model
from bitnet.core.engine.results import Completion
from bitnet.core.hal import Device
from bitnet.core.loading import load_model

TIE = 0.5
"""Greatest lead, in nats, of the CPU's token over another device's where the two part.

Activations next to a rounding border may be quantised one step apart, which moves the lead of the likeliest token over
the second one by 0.04 in the median and by at most 0.50 (2,887 steps on OpenCL, 909 on Vulkan). Leads below 1 are rare
(3 of those 2,887), and a wrong kernel changes answers whose lead is larger as well.
"""
TIES = 0.05
"""Greatest share of answers that may part in a tie: 8 of 600 did on Vulkan."""
FURTHER = 20
"""How many further questions of each kind are asked if more answers part.

With 8 of 600 parting, a sample of 10 to 30 answers exceeds :data:`TIES` by chance once in 130 to 17 times. Together
with the 200 further ones, it does so at most once in 25,000 times.
"""


FORMS = (
    *("What is {} + {}?", "{}+{}", "Add {} and {}.", "What is the sum of {} and {}?"),
    *("What is {} - {}?", "{} minus {}", "What is {} x {}?", "Is {} greater than {}?"),
    *("Tell me a story about {} foxes and {} hens.", "Who lived in the year {}{}?"),
)
"""Kinds of questions, each with two numbers."""


def assert_same_answers(device: Device | str, questions: int, *, seed: int, max_tokens: int = 40) -> int:
    """Check, and return, the number of tokens on which a device and the CPU agree, over ``questions`` questions of each
    of ten kinds.

    Both generate greedily, each in one batch. An answer may differ from the CPU's only after a point where the CPU's
    two likeliest tokens are nearly tied, and at most :data:`TIES` of all may. A few questions may have more such points
    by chance: then :data:`FURTHER` more of each kind are asked, and all of them together have the same bounds.
    """
    rng = random.Random(seed)
    agreed = parted = count = 0
    for each in (questions, FURTHER):
        asked = [form.format(rng.randint(2, 999), rng.randint(2, 999)) for form in FORMS for _ in range(each)]
        same, ties = _compared(device, asked, seed, max_tokens)
        agreed, parted, count = agreed + same, parted + ties, count + len(asked)
        if parted <= max(1, TIES * count):
            return agreed
    raise AssertionError(f"{parted} of {count} answers differ (seed {seed})")


def _compared(device: Device | str, asked: Sequence[str], seed: int, max_tokens: int) -> tuple[int, int]:
    """The number of tokens on which a device and the CPU agree, and of answers that part, each in a tie."""
    with load_model(device=device, context=128) as model:
        prompts = [model.chat_tokens([{"role": "user", "content": question}]) for question in asked]
        have = [_tokens(c) for c in model.generate_batch(prompts, max_tokens=max_tokens, temperature=0)]
    with load_model(device="cpu", context=128) as cpu:
        expected = [_tokens(c) for c in cpu.generate_batch(prompts, max_tokens=max_tokens, temperature=0)]
        same = [_common(a, b) for a, b in zip(have, expected, strict=True)]
        parted = [i for i, _ in enumerate(asked) if have[i] != expected[i]]
        for i in parted:
            lead = _lead(cpu, [*prompts[i], *expected[i][: same[i]]], have[i][same[i]])
            assert lead <= TIE, f"{asked[i]!r}, token {same[i]}: the CPU's leads by {lead:.2f} nats (seed {seed})"
    return sum(same), len(parted)


def _tokens(completion: Completion) -> list[int]:
    """The generated tokens, including the end token."""
    stop = completion.stop_reason
    return [*completion.tokens, *([stop] if isinstance(stop, int) else [])]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _lead(cpu: Model, context: Sequence[int], other: int) -> float:
    """The CPU's log-probability of its own next token minus that of ``other``, in nats; infinite if that is not in the
    top five."""
    (step,) = cpu.generate(context, max_tokens=1, temperature=0, logprobs=5, ignore_eos=True).logprobs or ()
    return step.top[0][1] - dict(step.top).get(other, -math.inf)
