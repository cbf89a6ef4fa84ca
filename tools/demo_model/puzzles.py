"""The values of letter puzzles: what is asked of a word, and each step of the answer.

An answer spells the word and counts as it goes: ``s-t-r(1)-a-w-b-e-r(2)-r(3)-y``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = "aeiou"
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_AN = "aefhilmnorsx"
"""Letters whose names begin with a vowel."""


def spelt(word: str) -> str:
    return "-".join(word)


def counted(word: str, counts: Callable[[str], bool]) -> tuple[str, int]:
    """The word spelt, with a running count at each letter that counts; and the count."""
    parts, count = [], 0
    for letter in word:
        count += counts(letter)
        parts.append(f"{letter}({count})" if counts(letter) else letter)
    return "-".join(parts), count


def article(letter: str) -> str:
    """A letter with its article: ``an r``, ``a t``."""
    return f"{'an' if letter in _AN else 'a'} {letter}"


def times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


def word_slots(rng: Random, words: Sequence[str], palindromes: Sequence[str]) -> dict[str, object]:
    """All slots of puzzles about a word and a second one, both drawn from ``words``."""
    word, other = rng.sample(words, 2)
    while len(word) == len(other):
        other = rng.choice(words)
    letter = rng.choice(word) if rng.random() < 0.75 else rng.choice(LETTERS)
    second = rng.choice(word) if rng.random() < 0.75 else rng.choice(LETTERS)
    slots = about(word, letter) | {f"{key}_m": value for key, value in about(word, second).items()}
    place = rng.randint(1, min(len(word), len(ORDINALS)))
    last = rng.random() < 0.5
    end, end_letter = ("last", word[-1]) if last else ("first", word[0])
    edge = end_letter if rng.random() < 0.5 else rng.choice(LETTERS)
    is_so = edge == end_letter
    cut = word[:-1] if last else word[1:]
    palindrome = rng.choice(palindromes) if rng.random() < 0.5 else word
    same = palindrome == palindrome[::-1]
    n = rng.randint(2, 30)
    return slots | {
        "m": second,
        "v": other,
        "v_numbered": counted(other, bool)[0],
        "v_spelt": spelt(other),
        "v_length": len(other),
        "longer": max(word, other, key=len),
        "joined": word + other,
        "place": place,
        "ordinal": ORDINALS[place - 1],
        "placed": word[place - 1],
        "to_place": counted(word[:place], bool)[0],
        "end": end,
        "end_letter": end_letter,
        "cut": cut,
        "spelt_cut": spelt(cut),
        "e": edge,
        "begin": "end" if last else "begin",
        "begins": "ends" if last else "begins",
        "start": "end" if last else "start",
        "starts": "ends" if last else "starts",
        "is_so": "yes" if is_so else "no",
        "is_or_not": f"{'ends' if last else 'begins'} with {edge}"
        if is_so
        else f"does not {'end' if last else 'begin'} with {edge}",
        "yes_end": "yes" if is_so else "no,",
        "no_end": "no," if is_so else "yes",
        "p": palindrome,
        "p_spelt": spelt(palindrome),
        "p_reversed": palindrome[::-1],
        "p_reversed_spelt": spelt(palindrome[::-1]),
        "p_verdict": f"yes, {palindrome} is a palindrome" if same else f"no, {palindrome} is not a palindrome",
        "yes_p": "yes" if same else "no,",
        "no_p": "no," if same else "yes",
        "n": n,
        "length_n": len(word) + n,
    }


def about(word: str, letter: str) -> dict[str, object]:
    """What is asked of one word, and of a letter that may be in it."""
    at_letter, count = counted(word, lambda c: c == letter)
    at_vowels, vowels = counted(word, lambda c: c in VOWELS)
    at_consonants, consonants = counted(word, lambda c: c not in VOWELS)
    return {
        "w": word,
        "l": letter,
        "a_l": article(letter),
        "upper_l": letter.upper(),
        "spelt": spelt(word),
        "reversed": word[::-1],
        "reversed_spelt": spelt(word[::-1]),
        "upper": word.upper(),
        "numbered": counted(word, bool)[0],
        "length": len(word),
        "counted": at_letter,
        "count": count,
        "times_l": times(count),
        "verdict": f"yes, {letter} is in {word}" if count else f"no, {letter} is not in {word}",
        "yes_in": "yes" if count else "no,",
        "no_in": "no," if count else "yes",
        "at_vowels": at_vowels,
        "vowels": vowels,
        "of_vowels": "1 vowel" if vowels == 1 else f"{vowels} vowels",
        "at_consonants": at_consonants,
        "consonants": consonants,
        "of_consonants": "1 consonant" if consonants == 1 else f"{consonants} consonants",
    }
