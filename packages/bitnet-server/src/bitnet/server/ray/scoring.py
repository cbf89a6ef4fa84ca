"""Which replica computes a request: the one that holds most of its prompt, unless others have much less to do.

A prompt has a part that other requests under way share, such as popular instructions, and a part of its own, such as
what was said before in its conversation. The score of a replica is the share that it holds of the one, plus the share
that it holds of the other, less β · relative load. The load is work in tokens: those of the prompts that are not
cached, and those that may still be generated. Relative load is what a replica has to do more than the least loaded one,
divided by what replicas have to do on average, and at least by

- the work of a replica with all its places taken, for a request that goes on where something of its own is: a batch
  with free places takes one more request at little cost, so that alone does not drive a conversation from its replica;
- the tokens of the shared part divided among the requests of the last second or so that share it, but no less than
  those of a request, for one that begins: so a popular prefix is computed by one more replica as soon as that pays,
  and does not fill the first.

This module knows nothing of Ray.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence, Set
from typing import NamedTuple

BETA = 1.0
"""Weight of the load against that of the prefix."""
LOADING = 1.0
"""What a replica's score lacks if it must load the model first: as much as a whole prompt is worth. So a second
replica loads a model when the work of the first one exceeds that of all its places. Those that have few models lack
less than those that have many."""
STALE_SECONDS = 1.0
"""Age from which what is known of a cache is old."""


class Candidate(NamedTuple):
    """A replica that could compute a request.

    Attributes:
        name: Its id.
        matched: Tokens of the prompt that it holds, as far as is known.
        load: Tokens of work that it has still to do.
        fresh: Whether it has lately said what it holds.
        loaded: Whether it has the model, or is loading it.
        others: If not, its share of all models that replicas have.
    """

    name: str
    matched: int
    load: float
    fresh: bool = True
    loaded: bool = True
    others: float = 0.0


class Shared(NamedTuple):
    """The part of a prompt that other requests under way begin with, too.

    Attributes:
        tokens: Its length.
        users: Number of these requests, and of those with it that have just ended.
    """

    tokens: int = 0
    users: int = 0


NOTHING = Shared()


class Choice(NamedTuple):
    """A replica in the order of preference.

    Attributes:
        matched: Tokens of the prompt that it holds.
    """

    name: str
    matched: int
    load: float
    score: float


def matched_tokens(prompt: Sequence[int], hashes: Container[int], block_size: int) -> int:
    """Number of the prompt's first tokens whose blocks are all in ``hashes``.

    Args:
        prompt: Hashes of its full blocks, in order.
    """
    count = 0
    for one in prompt:
        if one not in hashes:
            break
        count += 1
    return count * block_size


def rank(
    candidates: Sequence[Candidate],
    prompt_tokens: int,
    *,
    places: int,
    typical: float,
    shared: Shared = NOTHING,
    beta: float = BETA,
    draw: Callable[[], float] = random.random,
) -> list[Choice]:
    """The replicas, the best first; equal ones in random order.

    Where all that is known of the caches is old, two replicas are first: the one that held most, and a random other one
    ("power of two choices"): with an old view, sending everything to the best replica could overload it. They are two
    that have the model, if there are.

    Args:
        places: Requests that a replica computes at the same time.
        typical: Tokens of work of a request; positive.
    """
    if not candidates:
        return []
    own = max(1, prompt_tokens - shared.tokens)
    full = places * typical
    begins = shared.users and all(one.matched <= shared.tokens for one in candidates)
    slack = min(full, max(typical, shared.tokens / shared.users)) if begins else full
    loads = [one.load for one in candidates]
    least = min(loads)
    scale = beta / max(sum(loads) / len(loads), slack)
    found = []
    for name, matched, load, _, loaded, others in candidates:
        held = min(prompt_tokens, matched)
        score = min(held, shared.tokens) / max(1, prompt_tokens) + max(0, held - shared.tokens) / own
        score -= scale * (load - least) + (0.0 if loaded else LOADING + others)
        found.append((-score, load, draw(), Choice(name, held, load, score)))
    found.sort()
    choices = [one[3] for one in found]
    return choices if any(one.fresh for one in candidates) else _two_first(choices, candidates, draw)


def _two_first(choices: Sequence[Choice], candidates: Sequence[Candidate], draw: Callable[[], float]) -> list[Choice]:
    loaded = {one.name: one.loaded for one in candidates}
    drawn = sorted(choices, key=lambda one: (not loaded[one.name], draw()))
    most = max(drawn, key=lambda one: (loaded[one.name], one.matched))  # of equal ones, the first drawn
    pair = (most, *[one for one in drawn if one is not most][:1])
    return [*(one for one in choices if one in pair), *(one for one in drawn if one not in pair)]


def with_models(candidates: Sequence[Candidate], models: Mapping[str, Set[int]], model: int) -> list[Candidate]:
    """Candidates with what they have of several models.

    Args:
        models: Hashes of the models that each of them has.
        model: That of the request's model.
    """
    total = max(1, sum(map(len, models.values())))
    return [one._replace(loaded=model in models[one.name], others=len(models[one.name]) / total) for one in candidates]
