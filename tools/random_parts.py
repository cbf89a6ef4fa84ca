"""Parts of models of random weights: vocabularies and tensors of floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource
from bitnet.core.text.vocabulary import TokenType
from bitnet.core.text.words import byte_characters
from random_blocks import CHUNK

LETTERS = "\u0120etaoinshrdlcumwfgypbvk,"
"""Characters of the longer tokens: a space, as byte-level vocabularies write it, and common letters."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{{ '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}"
    "{%- endif %}{{ (message.content or '') + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


def vocabulary(
    size: int, special: Sequence[str] = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: all bytes, then strings of two, three and four letters, then special tokens.

    Every way to cut a string into two others is a merge, up to twice as many merges as tokens, as in Llama 3's.
    """
    special = [*special, *(f"<|reserved_{i}|>" for i in range((256 if size > 10_000 else 8) - len(special)))]
    tokens = list(byte_characters().values())
    if size < len(tokens) + len(special):
        raise SystemExit(f"the vocabulary needs at least {len(tokens) + len(special)} tokens")
    merges = []
    for length in (2, 3, 4):
        room = size - len(special) - len(tokens)
        made = [letters for _, letters in zip(range(room), product(LETTERS, repeat=length), strict=False)]
        tokens += ["".join(letters) for letters in made]
        for letters in made:
            merges += [f"{''.join(letters[:cut])} {''.join(letters[cut:])}" for cut in range(1, length)]
    if len(tokens) + len(special) < size:
        raise SystemExit(f"the vocabulary can have at most {len(tokens) + len(special)} tokens")
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(special)
    return tokens + special, [int(kind) for kind in types], merges


def chat_tokenizer(size: int, pre: str) -> dict[str, MetadataValue]:
    """The keys of a byte-level tokenizer with Qwen's chat template.

    Args:
        pre: How text is cut before merges: ``qwen2``, ``qwen35`` or ``hunyuan-dense``.
    """
    tokens, types, merges = vocabulary(size, SPECIAL)
    ids = {token: i for i, token in enumerate(tokens)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], mean: float, deviation: float, dtype: type[np.floating]
) -> TensorSource:
    def data() -> Iterator[npt.NDArray[np.floating]]:
        count = int(np.prod(shape))
        for begin in range(0, count, CHUNK):
            values = rng.standard_normal(min(CHUNK, count - begin), np.float32)
            yield (values * np.float32(deviation) + np.float32(mean)).astype(dtype)

    return TensorSource(shape, GGMLType.F32 if dtype is np.float32 else GGMLType.F16, data)
