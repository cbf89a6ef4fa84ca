"""Small tokenizers: trained ones in Hugging Face's form, and random text to try them on."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from bitnet.core.text.vocabulary import GPT2, HUNYUAN, LLAMA3, OLMO, QWEN2, QWEN35
from bitnet.core.text.words import LLAMA3_WORDS, SPACE

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of the tokenizer.json of Qwen 2.5 and 3."""
QWEN35_WORDS = QWEN2_WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
"""The pattern of the tokenizer.json of Qwen 3.5: marks belong to words."""
HUNYUAN_WORDS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
"""The patterns of the tokenizer.json of DeepSeek V3, which are HunYuan's."""
CORPUS = [
    "It's a fine day, isn't it? The 1,234 cats of 2024 sat on 56789 mats; they'll stay.",
    "Größe und Übermut: naïve Fragen, déjà vu — “Anführung” … 3.14159",
    "def f(x):\n    return x ** 2 if x != 0 else None  # nothing\n\n\t\tend\r\n",
    "日本語のテキストと中文文本 и русский текст 😀👍🏽🎉 a\u0301e\u0301",
] * 4


@pytest.fixture(scope="session")
def byte_level() -> Callable[[str], tokenizers.Tokenizer]:
    """A byte-level BPE as Hugging Face would load it, with the words of Llama 3, Qwen, HunYuan or GPT-2 (OLMo's)."""

    def train(pre: str) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == LLAMA3))
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in (GPT2, OLMO))
        one = {LLAMA3: LLAMA3_WORDS, QWEN2: QWEN2_WORDS, QWEN35: QWEN35_WORDS}
        words = HUNYUAN_WORDS if pre == HUNYUAN else [one[pre]] if pre in one else []
        splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in words]
        tokenizer.pre_tokenizer = level if not words else pre_tokenizers.Sequence([*splits, level])
        if pre in (QWEN2, QWEN35, OLMO):
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=[],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        tokenizer.add_special_tokens(SPECIAL)
        return tokenizer

    return train


@pytest.fixture(scope="session")
def sentencepiece() -> tokenizers.Tokenizer:
    """A BPE with byte fallback, as Hugging Face converts Llama 2's SentencePiece model."""
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    trained.train_from_iterator([text.split("日")[0] for text in CORPUS], trainer)
    import json

    data = json.loads(trained.to_str())["model"]
    pieces = sorted(data["vocab"], key=data["vocab"].__getitem__)
    order = ["<unk>", "<s>", "</s>", *byte_tokens, *(p for p in pieces if p not in ("<unk>", "<s>", "</s>"))]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in data["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(order)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture
def random_text() -> Callable[[], str]:
    """Text of words, digits, spaces and any characters at all."""
    pieces = " ".join(CORPUS).split(" ")
    ranges = [(0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x250), (0x400, 0x500), (0x3040, 0x3100), (0x4E00, 0x9FFF)]
    ranges += [(0x1F300, 0x1FAFF), (0x9, 0xD), (0x2000, 0x2070), (0x10000, 0x10FFFF), (0x300, 0x370), (0xE000, 0xF000)]
    ranges += [(0x900, 0x980), (0xE00, 0xE80)]  # words of letters and marks

    def make() -> str:
        parts = []
        for _ in range(random.randrange(30)):
            if random.random() < 0.5:
                parts.append(random.choice(["", " ", "  ", "\n"]) + random.choice(pieces))
            else:
                low, high = random.choice(ranges)
                parts.append("".join(chr(random.randrange(low, high)) for _ in range(random.randrange(1, 6))))
        return "".join(parts)

    return make
