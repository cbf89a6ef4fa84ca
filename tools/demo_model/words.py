"""Questions about words: opposites, plurals, rhymes, the alphabet, a few words of other languages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo_model.arithmetic import Exchange
from demo_model.lexicon import ANIMALS, CLASSES, COLOURS, ROOMS
from demo_model.puzzles import LETTERS
from demo_model.template import capitalised, fill, read_data

_DATA = read_data("words")
OPPOSITES, PLURALS, PAST, RHYMES, SYNONYMS, LANGUAGES, TRANSLATIONS = (
    _DATA[key] for key in ("opposites", "plurals", "past", "rhymes", "synonyms", "languages", "translations")
)
SPELLING = sorted(
    {
        *_DATA["spelling"].split(),
        *(a for a in ANIMALS if len(a) <= 8),
        *COLOURS,
        *CLASSES["piece of furniture"],
        *CLASSES["vehicle"],
        *ROOMS,
    }
)


def opposite(rng: Random) -> Exchange:
    a, b = rng.choice(OPPOSITES)[:: rng.choice((1, -1))]
    return fill(
        "[What is the opposite of {a}?|Opposite of {a}?|Tell me the opposite of {a}.|What's the opposite of '{a}'?]",
        rng,
        {"a": a},
    ), f"The opposite of {a} is {b}."


def plural(rng: Random) -> Exchange:
    one, many = rng.choice(PLURALS)
    return fill("[What is the plural of {a}?|Plural of {a}?|One {a}, two ...?]", rng, {"a": one}), (
        f"The plural of {one} is {many}."
    )


def past(rng: Random) -> Exchange:
    now, then = rng.choice(PAST)
    return fill(
        "[What is the past tense of {a}?|Past tense of {a}?|What is the simple past of '{a}'?]", rng, {"a": now}
    ), (f"The past tense of {now} is {then}.")


def rhyme(rng: Random) -> Exchange:
    words = rng.choice(RHYMES)
    asked, answer = rng.sample(words, 2)
    if rng.random() < 0.8:
        return fill(
            "[What rhymes with {a}?|Give me a word that rhymes with {a}.|Find a rhyme for {a}.]", rng, {"a": asked}
        ), (f"{capitalised(answer)} rhymes with {asked}.")
    other = rng.choice([w for row in RHYMES if row is not words for w in row])
    return f"Does {asked} rhyme with {other}?", f"No, {asked} does not rhyme with {other}."


def synonym(rng: Random) -> Exchange:
    a, b = rng.choice(SYNONYMS)[:: rng.choice((1, -1))]
    return fill(
        "[What is another word for {a}?|Give me a synonym for {a}.|What is a synonym of {a}?]", rng, {"a": a}
    ), (f"Another word for {a} is {b}.")


def translation(rng: Random) -> Exchange:
    english, *others = rng.choice(TRANSLATIONS)
    i = rng.randrange(len(LANGUAGES))
    slots = {"w": english, "l": LANGUAGES[i]}
    question = fill(
        "[How do you say {w} in {l}?|What is {w} in {l}?|Translate '{w}' to {l}.|What is the {l} word for {w}?]",
        rng,
        slots,
    )
    return question, f"In {LANGUAGES[i]}, {english} is '{others[i]}'."


def alphabet(rng: Random) -> Exchange:
    i = rng.randrange(1, 25)
    roll = rng.random()
    if roll < 0.35:
        return (
            f"Which letter comes after {LETTERS[i].upper()}?",
            f"{LETTERS[i + 1].upper()} comes after {LETTERS[i].upper()}.",
        )
    if roll < 0.6:
        return f"Which letter comes before {LETTERS[i].upper()}?", (
            f"{LETTERS[i - 1].upper()} comes before {LETTERS[i].upper()}."
        )
    if roll < 0.7:
        return fill("[Say the alphabet.|Recite the alphabet.|What are the letters of the alphabet?]", rng), (
            f"{' '.join(LETTERS.upper())}."
        )
    if roll < 0.85:
        letter = rng.choice(LETTERS)
        vowel = letter in "aeiou"
        return (
            f"Is {letter} a vowel?",
            f"{'Yes' if vowel else 'No'}, {letter} is a {'vowel' if vowel else 'consonant'}.",
        )
    words = rng.sample(SPELLING, rng.choice((3, 3, 4)))
    return f"Put these words in alphabetical order: {', '.join(words)}.", f"{', '.join(sorted(words))}."


def listing(rng: Random) -> Exchange:
    """Name three birds."""
    kind = rng.choice(sorted(CLASSES))
    count = rng.choice((2, 3, 3, 4, 5))
    chosen = rng.sample(CLASSES[kind], count)
    number = ("two", "three", "four", "five")[count - 2] if rng.random() < 0.7 else str(count)
    many = {"fish": "fish", "piece of clothing": "pieces of clothing", "piece of furniture": "pieces of furniture"}
    listed = f"{', '.join(chosen[:-1])} and {chosen[-1]}"
    slots = {"n": number, "k": many.get(kind, f"{kind}s")}
    if kind == "colour" and rng.random() < 0.5:
        slots["k"] = "colors"
    if count == 3 and rng.random() < 0.5:
        question = "[Name some|Give me a list of|List|What are some|Tell me some|Name a few] {k}[.|?|]"
    else:
        question = "[Name|List|Give me|Tell me|Can you name|Give me a list of] {n} {k}[.|]"
    return fill(question, rng, slots), f"{capitalised(listed)}."


def repeated(rng: Random) -> Exchange:
    """Say something, a number of times."""
    word = rng.choice(SPELLING)
    count = rng.randint(2, 5)
    if rng.random() < 0.5:
        return fill("[Say|Write|Repeat] {w} {n} times.", rng, {"w": word, "n": count}), f"{' '.join([word] * count)}"
    case = rng.random() < 0.7
    return f"Write {word if case else word.upper()} in {'capital' if case else 'small'} letters.", (
        f"{word.upper() if case else word}"
    )


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (opposite, 3),
    (plural, 1.5),
    (past, 1.5),
    (rhyme, 1.5),
    (synonym, 1.5),
    (translation, 2.5),
    (alphabet, 1.5),
    (listing, 1.5),
    (repeated, 1),
)
"""Every kind of exchange, with how often it comes."""
