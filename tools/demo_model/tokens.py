"""The tokenizer: byte-level BPE learnt from the corpus, and documents as rows of token ids.

Digits are never merged, so every number is read and written digit by digit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from demo_model.corpus import Message, documents
from demo_model.letters import UNSPELT, WORDS

BOS, EOT, SYSTEM, USER, ASSISTANT, PAD = range(6)
SPECIAL = ("<|begin_of_text|>", "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPACE = "Ġ"
"""A space as byte-level BPE writes it."""
TAUGHT = 1 << 15
"""Bit of a token in a row that marks it as one the model is taught to say."""

Rows = npt.NDArray[np.uint16]


def train(vocab_size: int, seed: int, count: int) -> tokenizers.Tokenizer:
    """A tokenizer of ``vocab_size`` tokens, learnt from ``count`` documents."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for document in islice(documents(seed, -1), count) for _, text in document)
    tokenizer.train_from_iterator(texts, trainer)
    # Without merges of digits, the plain GPT-2 way of cutting text into words gives the same tokens.
    tokenizer.pre_tokenizer = byte_level
    tokenizer = without_unspelt(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def without_unspelt(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer without the tokens that only words have which no letter puzzle of the text is about.

    These are the evaluation's words. Some stand elsewhere in the text, in stories say, and so would be one token each.
    Nothing in the text would tell the letters of such a token. Most words that users ask about are made of smaller
    tokens, as these are then. The tokens keep their numbers; their merges go.
    """
    spelt = {token for word in WORDS for form in _forms(word) for token in tokenizer.encode(form).tokens}
    kept = json.loads(tokenizer.to_str())
    while True:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(kept))
        used = {token for word in UNSPELT for form in _forms(word) for token in tokenizer.encode(form).tokens}
        dropped = {token for token in used - spelt if len(token.lstrip(SPACE)) > 1}
        if not dropped:
            return tokenizer
        kept["model"]["merges"] = [pair for pair in kept["model"]["merges"] if "".join(pair) not in dropped]


def _forms(word: str) -> tuple[str, ...]:
    """Ways in which a word stands in a question."""
    both = (word, word.capitalize(), word.upper())
    return (*both, *(f" {form}" for form in both), f"'{word}", f'"{word}')


def of_vocabulary(names: Sequence[str], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """The tokenizer of an exported model, from its tokens and its merges."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(path))


def merges(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The merges, each as ``left right``, first merged first."""
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in found]


def encode(tokenizer: tokenizers.Tokenizer, batch: list[list[Message]]) -> Iterator[list[int]]:
    """Each document as tokens; those taught have the bit :data:`TAUGHT`."""
    texts = [text for document in batch for _, text in document]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for document in batch:
        tokens = [BOS]
        for role, _ in document:
            ids = next(encoded).ids
            if role in ROLES:
                tokens.append(ROLES[role])
                ids = [*ids, EOT]
            if role in ("assistant", "text"):
                ids = [i | TAUGHT for i in ids]
            tokens += ids
        if document[-1][0] == "text":
            tokens.append(EOT | TAUGHT)
        yield tokens


def packed(tokenizer: tokenizers.Tokenizer, stream: Iterable[list[Message]], length: int, count: int) -> Rows:
    """``uint16[count, length]`` rows of whole documents, each placed in the first of a few open rows that has room."""
    source = iter(stream)
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(16)]
    while len(rows) < count:
        for tokens in encode(tokenizer, list(islice(source, 256))):
            if len(tokens) > length:
                continue
            row = next((r for r in open_rows if len(r) + len(tokens) <= length), None)
            if row is None:
                row = max(open_rows, key=len)
                open_rows.remove(row)
                rows.append(row)
                row = []
                open_rows.append(row)
            row += tokens
    array = np.full((count, length), PAD, np.uint16)
    for i, row in enumerate(rows[:count]):
        array[i, : len(row)] = row
    return array
