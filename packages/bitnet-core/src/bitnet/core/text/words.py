"""How vocabularies cut text into words before byte-pair encoding: patterns, normalisation, characters for bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from bitnet.core.text.vocabulary import DEFAULT, GPT2, HUNYUAN, LLAMA3, OLMO, QWEN2, QWEN35

_NUMBER, _REST = r"\p{N}", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3_WORDS = _WORD + _NUMBER + "{1,3}" + _REST
"""Word pattern of Llama 3's tokenizer.json: digits in groups of three."""
QWEN2_WORDS = _WORD + _NUMBER + _REST
"""Word pattern of Qwen 2's and 3's tokenizer.json: single digits."""
QWEN35_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Word pattern of Qwen 3.5's tokenizer.json: single digits, and marks belong to words as letters do."""
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's word pattern, which most tokenizers leave implicit."""
DEFAULT_WORDS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""Patterns of llama.cpp's pre-tokenizer ``default``; each splits the pieces that the ones before it have left."""
HUNYUAN_WORDS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Patterns of HunYuan's tokenizer.json, which are DeepSeek V3's: digits in groups of three, Chinese and Japanese
apart."""
PATTERNS: Mapping[str, tuple[str, ...]] = {
    GPT2: (GPT2_WORDS,),
    OLMO: (GPT2_WORDS,),
    LLAMA3: (LLAMA3_WORDS,),
    QWEN2: (QWEN2_WORDS,),
    QWEN35: (QWEN35_WORDS,),
    HUNYUAN: HUNYUAN_WORDS,
    DEFAULT: DEFAULT_WORDS,
}
"""The patterns of each pre-tokenizer; what lies between two matches is a word, too."""
COMPOSED = frozenset({QWEN2, QWEN35, OLMO})
"""Pre-tokenizers whose text is put into the normal form NFC first."""
WHOLE_WORDS = frozenset({LLAMA3})
"""Pre-tokenizers with which a word that is a token stays whole, whatever the merges say."""
SPACE = "\u2581"
"""The character that stands for a space in SentencePiece."""


@lru_cache(maxsize=1)
def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
