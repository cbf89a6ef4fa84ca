"""The vocabulary of a Hugging Face model folder: ``tokenizer.json``, or SentencePiece's ``tokenizer.model``."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import BitNetError, InvalidInputError, ModelFileError, brief
from bitnet.core.model.hf_sentencepiece import read_sentencepiece, warn_of_greedy
from bitnet.core.model.safetensors import MAX_JSON, optional_json, read_bytes, read_json
from bitnet.core.text.literals import Literals
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.core.text.vocabulary import (
    GPT2,
    HUNYUAN,
    LLAMA3,
    MAX_LISTED_ENDS,
    OLMO,
    QWEN2,
    QWEN35,
    TokenType,
    Vocabulary,
    excess,
)
from bitnet.core.text.words import GPT2_WORDS, HUNYUAN_WORDS, LLAMA3_WORDS, QWEN2_WORDS, QWEN35_WORDS, SPACE

if TYPE_CHECKING:
    import tokenizers

PROBES = (
    "Hello, world! It's 1234567 o'clock; WE'LL see, don't they've? ",
    " \n\n  three   spaces\tand tabs\r\n\r\nnew lines \n \n",
    "naïve café Größe 12½ ²³ ½ нещо на Български 你好世界 3.14159 ราคา 100 こんにちは 😀👍🏽 a\u0301",
    'if x[0] != "a_b": return {"k": -1e-5} // $%&/()=?  #@!!! ...—–“quotes” camelCase HTTPServer',
    "हिन्दी में 12 शब्द, ภาษาไทย สระ\u0e33, q\u0323\u0307!\u0301 \u0308x நன்றி",
)
"""Texts that different pre-tokenizers split differently."""
FEW_CHARACTERS = 4096
"""Maximum characters of such texts if the vocabulary is so large, or has so many merges, that encoding is slow."""
SAMPLE = 64
"""Tokens in each text that is composed of vocabulary entries."""


def read_vocabulary(folder: Path, config: dict[str, Any], default_ids: Mapping[str, int]) -> Vocabulary:
    """The vocabulary of a model folder, with as many tokens as the model has.

    Args:
        config: The folder's ``config.json``; ``vocab_size`` is the number of the checkpoint's embedding rows.
        default_ids: Ids of begin and end token, used if neither the tokenizer nor a configuration names one.

    Raises:
        ModelFileError: There is no tokenizer, or a GGUF file cannot describe it.
    """
    if (folder / "tokenizer.json").is_file():
        vocabulary = _from_json(folder / "tokenizer.json")
    elif (folder / "tokenizer.model").is_file():
        vocabulary = read_sentencepiece(folder / "tokenizer.model")
    else:
        raise ModelFileError("holds neither tokenizer.json nor tokenizer.model.", path=folder)
    wrong = excess(vocabulary.tokens, vocabulary.merges)
    if wrong is not None:
        raise ModelFileError(wrong, path=folder, field="tokenizer")
    size = config["vocab_size"]
    missing = size - len(vocabulary.tokens)
    if missing < 0:
        raise ModelFileError(
            f"has {len(vocabulary.tokens)} tokens; the model has embeddings for {size}.", path=folder, field="tokenizer"
        )
    vocabulary = replace(
        vocabulary,
        tokens=vocabulary.tokens + [f"[PAD{i}]" for i in range(len(vocabulary.tokens), size)],
        types=vocabulary.types + [TokenType.UNUSED] * missing,
        scores=vocabulary.scores + [0.0] * missing if vocabulary.scores else [],
    )
    return _special_ids(folder, config, default_ids, vocabulary)


def _from_json(path: Path) -> Vocabulary:
    data = read_json(path, MAX_JSON)
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
        raise ModelFileError("does not hold a byte-pair encoding, the only supported kind.", path=path, field="model")
    # Input that could make the library run or grow without bound is refused before the library sees it.
    _check_sizes(path, model, data.get("added_tokens"))
    llama = LLAMA3_WORDS in _check_words(path, data.get("pre_tokenizer"))
    _check_normalizer(path, data.get("normalizer"), nfc=not (llama or model.get("byte_fallback")))
    original = _original(path)
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    tokens, types = _tokens(path, original)
    ways: tuple[Vocabulary, ...]
    if model.get("byte_fallback"):
        types = [_byte_type(token, kind) for token, kind in zip(tokens, types, strict=True)]
        base = Vocabulary("llama", tokens, types, merges=[], scores=_scores(tokens, pairs))
        ways = (base, replace(base, space_prefix=False))
    else:
        base = Vocabulary("gpt2", tokens, types, merges=[" ".join(pair) for pair in pairs], scores=[])
        ways = tuple(replace(base, pre=pre) for pre in (LLAMA3, GPT2, QWEN2, QWEN35, HUNYUAN, OLMO))
    for way in ways:
        try:
            if _same(way, original):
                return way
        except InvalidInputError as error:
            raise ModelFileError(f"{error.message}", path=path, field="model") from error
    raise _cuts_otherwise(path, cutter=data.get("pre_tokenizer"))


def _original(path: Path) -> tokenizers.Tokenizer:
    """The folder's own tokenizer."""
    try:
        import tokenizers
    except ImportError as error:
        raise BitNetError("conversion needs the package tokenizers.", hint="pip install tokenizers") from error
    try:
        original = tokenizers.Tokenizer.from_buffer(read_bytes(path, MAX_JSON))
    except Exception as error:  # the library raises only plain Exceptions
        raise ModelFileError(f"is not a tokenizer: {' '.join(str(error)[:200].split())}.", path=path) from error
    original.no_truncation()  # as transformers does by default
    original.no_padding()
    return original


def _check_sizes(path: Path, model: dict[str, Any], added: Any) -> None:
    """Refuse a vocabulary that is larger than any model's."""
    known = model.get("vocab")
    tokens = [*known] if isinstance(known, dict) else []
    names = [entry.get("content") for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    wrong = excess([*tokens, *(name for name in names if isinstance(name, str))], model["merges"])
    if wrong is not None:
        raise ModelFileError(wrong, path=path, field="model")


def _check_words(path: Path, cutter: Any) -> list[str]:
    """Refuse unknown regular expressions: some take the library hours, others make it panic.

    Returns:
        The regular expressions found, all of them known.
    """
    known = {LLAMA3_WORDS, GPT2_WORDS, QWEN2_WORDS, QWEN35_WORDS, *HUNYUAN_WORDS}
    steps, found = [cutter], []
    while steps:
        step = steps.pop()
        if not isinstance(step, dict):
            continue
        inner = step.get("pretokenizers")
        steps += inner if isinstance(inner, list) else []
        pattern = step.get("pattern")
        if not isinstance(pattern, dict) or "Regex" not in pattern:
            continue
        words = pattern["Regex"]
        plain = words.replace("\r", r"\r").replace("\n", r"\n") if isinstance(words, str) else None
        if plain is None or plain not in known:
            raise _cuts_otherwise(path, f" It is {brief(words)}.")
        found.append(plain)
    return found


METASPACE = {
    "first": (
        "SentencePiece tokenizer saved with legacy=False: only the first part of a text gets a space before it",
        "begins with a space or follows a special token",
    ),
    "always": (
        "SentencePiece tokenizer as saved by transformers 5: a text that begins with a space gets no extra one",
        "begins with a space",
    ),
}
"""How SentencePiece tokenizers that a GGUF file cannot describe treat spaces, and which texts the nearest one that it
can describe splits differently. The keys are the names used by ``tokenizers``."""


def _cuts_otherwise(path: Path, how: str = "", cutter: Any = None) -> ModelFileError:
    message = "splits text in an unsupported way: not like Llama 3, GPT-2, Qwen 2, HunYuan or SentencePiece."
    hint = None
    spaces = isinstance(cutter, dict) and cutter.get("type") == "Metaspace" and cutter.get("split") is False
    if spaces and cutter.get("prepend_scheme") in METASPACE:
        what, differs = METASPACE[cutter["prepend_scheme"]]
        how = f" It is a {what}, for which GGUF files have no key."
        hint = (
            "Save it with transformers 4 and legacy=True, or remove tokenizer.json if tokenizer.model is beside it: "
            f"then only text that {differs} is split differently."
        )
    return ModelFileError(message + how, path=path, field="pre_tokenizer", hint=hint)


SPACES = ({"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE})


def _check_normalizer(path: Path, normalizer: Any, *, nfc: bool) -> None:
    """Refuse a normalizer that a GGUF file cannot describe: all but SentencePiece's spaces and, with ``nfc``, NFC."""
    if nfc and normalizer == {"type": "NFC"}:
        return
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else [normalizer]
    for step in steps if normalizer else []:
        if step not in SPACES or len(steps) > len(SPACES):
            kind = step.get("type") if isinstance(step, dict) else step
            raise ModelFileError(f"{brief(kind)} is not supported in this form.", path=path, field="normalizer")


def _same(vocabulary: Vocabulary, original: tokenizers.Tokenizer) -> bool:
    """Whether a vocabulary splits and encodes text as the original does."""
    from bitnet.core.text.bpe_rust import word_cutter

    tokenizer = Tokenizer(vocabulary)
    cutter = word_cutter(vocabulary.pre)
    for text in PROBES:
        if tokenizer.encode(text, add_special=False) != original.encode(text, add_special_tokens=False).ids:
            return False
        if vocabulary.model == "gpt2":
            theirs = original.pre_tokenizer
            if theirs is None or cutter.pre_tokenize_str(text) != theirs.pre_tokenize_str(text):
                return False
    return all(
        tokenizer.encode(text, add_special=False) == original.encode(text, add_special_tokens=False).ids
        for text in _samples(vocabulary, tokenizer)
    )


def _samples(vocabulary: Vocabulary, tokenizer: Tokenizer) -> Iterator[str]:
    """Texts that contain every token of the vocabulary, in order and shuffled. They reveal merges that we rank
    differently and tokens that no merge makes."""
    normal = [i for i, kind in enumerate(vocabulary.types) if kind == TokenType.NORMAL]
    literal = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    special = Literals(t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in literal)
    left = sum(map(len, vocabulary.tokens)) * 4 if tokenizer.prepare() else FEW_CHARACTERS
    for order in (normal, random.Random(0).sample(normal, len(normal))):
        for begin in range(0, len(order), SAMPLE):
            text = b"".join(map(tokenizer.token_bytes, order[begin : begin + SAMPLE])).decode(errors="ignore")
            left -= len(text)
            if left < 0:
                return
            if len(special.split(text)) == 1:  # only one of the two recognises special tokens in text
                yield text


def _tokens(path: Path, original: tokenizers.Tokenizer) -> tuple[list[str], list[int]]:
    """Tokens in the order of their ids, and the type of each."""
    greedy: list[str] = []
    by_id = {i: (token, TokenType.NORMAL) for token, i in original.get_vocab(with_added_tokens=False).items()}
    for (
        i,
        token,
    ) in original.get_added_tokens_decoder().items():  # the library may number these differently from the file
        if token.lstrip or token.rstrip or token.single_word:
            greedy.append(token.content)
        by_id[i] = (token.content, TokenType.CONTROL if token.special else TokenType.USER_DEFINED)
    warn_of_greedy(path, greedy)
    count = max(by_id, default=-1) + 1
    if count > 4 * len(by_id):
        raise ModelFileError(f"has {len(by_id)} tokens with ids up to {count - 1}.", path=path, field="model.vocab")
    unused = [(f"[PAD{i}]", TokenType.UNUSED) for i in range(count)]
    entries = [by_id.get(i, unused[i]) for i in range(count)]
    return [token for token, _ in entries], [int(kind) for _, kind in entries]


def _byte_type(token: str, kind: int) -> int:
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    unknown = token == "<unk>"
    return TokenType.BYTE if is_byte else TokenType.UNKNOWN if unknown else kind


def _scores(tokens: list[str], pairs: list[tuple[str, ...]]) -> list[float]:
    """SentencePiece scores that rank pieces as the merges do: earlier merges score higher."""
    rank: dict[str, int] = {}
    for i, pair in enumerate(pairs):
        rank.setdefault("".join(pair), i)
    return [-float(rank.get(token, len(pairs))) for token in tokens]


def _special_ids(
    folder: Path, config: dict[str, Any], default_ids: Mapping[str, int], vocabulary: Vocabulary
) -> Vocabulary:
    """Ids of begin and end tokens, from the tokenizer's and the model's configuration."""
    settings = optional_json(folder / "tokenizer_config.json")
    generation = optional_json(folder / "generation_config.json")
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}

    def named(key: str) -> int | None:
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(text, str):
            raise ModelFileError(f"is {brief(token)}, not a token.", path=folder / "tokenizer_config.json", field=key)
        if text and text not in ids:
            raise ModelFileError(
                f"is {brief(text)}, which is not a token.", path=folder / "tokenizer_config.json", field=key
            )
        return ids[text] if text else None

    def numbered(key: str) -> list[int]:
        values = [value for source in (generation, config) for value in _as_list(source.get(key))]
        if key not in generation and key not in config and not settings.get(key.removesuffix("_id")):
            values = [default_ids[key]]
        return [v for v in values if type(v) is int and 0 <= v < len(vocabulary.tokens)]

    ends = numbered("eos_token_id")
    bos = named("bos_token")
    if bos is None:
        bos = next(iter(numbered("bos_token_id")), None)
    eos = named("eos_token")
    if eos is None:
        eos = next(iter(ends), None)
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = _adds_bos(folder, bos, default=vocabulary.model == "llama" or vocabulary.pre == LLAMA3)
    vocabulary = replace(
        vocabulary,
        bos_id=bos,
        eos_id=eos,
        end_ids=frozenset(ends),
        add_bos=bool(add_bos) and bos is not None,
        add_eos=bool(settings.get("add_eos_token")) and eos is not None,
    )
    if len(vocabulary.listed_ends) > MAX_LISTED_ENDS:
        raise ModelFileError(
            f"has {len(ends)} tokens; GGUF files hold three, plus those with known names such as <|im_end|>.",
            path=folder,
            field="eos_token_id",
        )
    return vocabulary


def _adds_bos(folder: Path, bos: int | None, *, default: bool) -> bool:
    """Whether the folder's ``tokenizer.json`` prepends the begin token to a text."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return default
    return bool(_original(path).encode("a").ids[:1] == [bos])


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
