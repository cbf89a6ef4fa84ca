"""``n_probs`` and ``post_sampling_probs`` of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.options import MAX_REQUESTED_LOGPROBS
from bitnet.core.engine.sampling import TokenLogprob
from bitnet.core.hal.sampling import survivors
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.server.api.openai import finite
from bitnet.server.request.errors import unsupported
from bitnet.server.request.fields import Fields

MAX_PROBABILITIES = 100


class Probabilities:
    """What a request asks to know about each token.

    Args:
        options: The request's options.
        restricted: Whether a form or other rules limit the tokens that may be chosen.

    Attributes:
        count: Number of likeliest tokens; None: nothing is wanted.
        drawn: Whether the probabilities are those with which tokens are drawn.
        logprobs: Number of likeliest tokens whose log-probabilities they are computed from; None: nothing is wanted.

    Raises:
        RequestError: They cannot be computed with these options.
    """

    def __init__(self, fields: Fields, options: GenerationOptions, *, restricted: bool) -> None:
        self.count = fields.integer("n_probs", 0, MAX_PROBABILITIES) or None
        self.drawn = fields.flag("post_sampling_probs") and self.count is not None
        self._options = options
        self.logprobs = self.count
        if not self.drawn or self.count is None:
            return
        few = options.temperature == 0 or 0 < options.top_k <= MAX_REQUESTED_LOGPROBS
        if options.changes_logits or options.min_tokens or restricted or not few:
            least = f"a top_k of 1 … {MAX_REQUESTED_LOGPROBS}"
            raise unsupported("post_sampling_probs", f"it needs {least}, and neither penalties, biases nor forms.")
        self.logprobs = max(self.count, options.top_k)

    def described(self, entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """``completion_probabilities``."""
        kind, top = ("prob", "top_probs") if self.drawn else ("logprob", "top_logprobs")

        def one(token: int, value: float) -> dict[str, Any]:
            data = tokenizer.token_bytes(token)
            return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data), kind: value}

        found = []
        for entry in entries:
            listed = _drawn(entry, self._options) if self.drawn else {t: finite(p) for t, p in entry.top}
            chosen = listed.get(entry.token, finite(entry.logprob))
            likeliest = sorted(listed.items(), key=lambda pair: -pair[1])[: self.count]
            found.append({**one(entry.token, chosen), top: [one(*pair) for pair in likeliest]})
        return found


def _drawn(entry: TokenLogprob, options: GenerationOptions) -> dict[int, float]:
    """The probability with which each token that may be drawn is, from the log-probabilities of the likeliest."""
    if options.temperature == 0:
        return {entry.token: 1.0}
    z = np.array([logprob for _, logprob in entry.top[: options.top_k]]) / options.temperature
    keep = survivors(z, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
    weights = np.where(keep, np.exp(z - z.max()), 0.0)
    probabilities = weights / weights.sum()
    pairs = zip(entry.top, probabilities.tolist(), strict=False)
    return {token: probability for (token, _), probability in pairs if probability > 0}
