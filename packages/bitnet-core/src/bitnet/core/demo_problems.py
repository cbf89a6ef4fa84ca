"""What the demo model is asked in its evaluation, and never in its training.

The demo model is trained by ``tools/demo_model`` on generated text. What may not be in that text is decided here, and
the generator imports it: no sum and no difference of a held-out pair of numbers (:func:`held_out`), no question that
contains a held-out phrasing (:func:`is_unseen`), and nothing about the people, countries and subjects listed here.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bitnet.core.errors import InvalidInputError

HELD_OUT_PART = 5
"""One pair in this many is held out."""
_SALT = "bitnet-demo-4"  # with which 17 and 25, whose sum the README asks for, are held out

# Phrasings that training uses too.

ADDITION = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "{a}+{b}",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
)
SUBTRACTION = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "{a}-{b}",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "How much is {a} minus {b}?",
    "Take {b} away from {a}.",
)
GAIN = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in a box. {name} puts {b} more into it. How many {things} are in the box?",
    "{name} finds {a} {things} in the morning and {b} {things} in the evening. How many {things} is that in all?",
)
LOSS = (
    "{name} has {a} {things} and gives away {b} of them. How many {things} are left?",
    "There are {a} {things} in a box. {name} takes out {b}. How many {things} are still in the box?",
    "{name} had {a} {things} but lost {b}. How many {things} does {name} have now?",
)
NAMES = ("Anna", "Ben", "Clara", "Leo", "Mia", "Nora", "Omar", "Tom")
THINGS = ("apples", "books", "buttons", "coins", "marbles", "shells", "stamps", "stones")

# Phrasings that are held out: no question of the training text contains one, with whatever numbers.

UNSEEN_ADDITION = (
    "What would {a} plus {b} be?",
    "Can you work out {a} + {b} for me?",
    "{a} and {b} together make what?",
    "If you put {a} and {b} together, what do you get?",
    "What is {b} more than {a}?",
    "How much would {a} and {b} come to?",
    "Find the sum {a} + {b}.",
    "Tell me what you get by adding {a} and {b}.",
    "{a} added to {b} gives what?",
    "I need the total of {a} and {b}, please.",
    "{a} + {b} is what?",
    "What number is {a} + {b}?",
    "What's the result of {a} plus {b}?",
    "Start with {a}, then add {b}. What is the result?",
    "Raise {a} by {b}.",
    "Quick: {a} + {b}?",
    "What's the answer to {a} + {b}",
    "add {b} onto {a}",
    "Please compute the sum of {a} and {b}.",
    "how much do {a} and {b} make?",
    "Let me know what {a} + {b} comes to.",
    "{a} plus {b} makes?",
    "what does adding {a} and {b} give?",
    "Do the sum: {a} + {b}",
)
UNSEEN_SUBTRACTION = (
    "What would {a} minus {b} be?",
    "Can you work out {a} - {b} for me?",
    "If you take {b} from {a}, what is left?",
    "What number is {b} less than {a}?",
    "Tell me what remains when {b} is subtracted from {a}.",
    "{b} taken away from {a} gives what?",
    "What's the result of {a} minus {b}?",
    "Start with {a}, then subtract {b}. What is the result?",
    "Reduce {a} by {b}.",
    "Quick: {a} - {b}?",
    "{a} - {b} is what?",
    "{a} minus {b} makes?",
    "I need {a} minus {b}, please.",
    "how much is {a} with {b} taken off?",
    "What do I get if I remove {b} from {a}?",
    "Deduct {b} from {a}.",
    "Let me know what {a} - {b} comes to.",
    "What does {a} minus {b} come out as?",
    "what does subtracting {b} from {a} give?",
    "From {a}, take {b}. How much is left?",
    "Find the difference {a} - {b}.",
    "{a} lowered by {b} is what?",
    "How much remains of {a} after taking {b}?",
    "What's the answer to {a} − {b}",
)

# What the model cannot do, and is to say so. Slots: big, a number of five to nine digits; small, of one to four;
# decimal; two, from 13 to 99; three, of three digits; odd, a prime; power, from 4 to 9.

BEYOND_ARITHMETIC = (
    "What is {big} + {small}?",
    "{small} + {big}",
    "{big} - {small} = ?",
    "What would {big} plus {small} be?",
    "Quick: {big} - {small}?",
    "If you take {small} from {big}, what is left?",
    "What's the result of {small} plus {big}?",
    "What is {decimal} + {decimal}?",
    "{decimal} - {small}",
    "Can you work out {decimal} + {small} for me?",
    "What would {decimal} minus {decimal} be?",
    "What is {two} x {two}?",
    "{two} * {two}",
    "What would {three} times {two} be?",
    "Quick: {three} x {two}?",
    "I need {two} times {three}, please.",
    "What is {small} to the power of {power}?",
    "{two}^{power}",
    "Can you work out {small}^{power} for me?",
    "What would {small} to the {power}th power be?",
    "What is the square root of {three}?",
    "I need the square root of {big}, please.",
    "What is {two}% of {three}?",
    "Can you work out {two} percent of {three} for me?",
    "What is {three} / {odd}?",
    "What would {three} divided by {odd} be?",
    "What is 1/{power} + 1/{odd}?",
    "What would {power}/{odd} plus 1/{power} be?",
    "What's the logarithm of {three}?",
    "What's the result of ({small} + {two}) x {three}?",
)
PEOPLE = (
    "Napoleon",
    "Cleopatra",
    "Nikola Tesla",
    "Frida Kahlo",
    "Nelson Mandela",
    "Julius Caesar",
    "Virginia Woolf",
    "Bob Dylan",
    "Galileo Galilei",
    "Joan of Arc",
    "Steve Jobs",
    "Vincent van Gogh",
    "Amelia Earhart",
    "Bruce Lee",
    "Che Guevara",
    "David Bowie",
    "Edgar Allan Poe",
    "Fidel Castro",
    "George Orwell",
    "Henry Ford",
    "James Joyce",
    "Louis Armstrong",
    "Marilyn Monroe",
    "Oscar Wilde",
    "Roger Federer",
    "Usain Bolt",
    "Victor Hugo",
    "Blaise Pascal",
)
COUNTRIES = (
    "Burundi",
    "Bolivia",
    "Paraguay",
    "Malta",
    "Namibia",
    "Cambodia",
    "Zambia",
    "Kuwait",
    "Laos",
    "Tonga",
    "Afghanistan",
    "Barbados",
    "Grenada",
    "Samoa",
    "Sierra Leone",
    "Vanuatu",
    "Tajikistan",
    "Palau",
    "Nauru",
    "the Maldives",
)
SUBJECTS = (
    "entropy",
    "the Cold War",
    "plate tectonics",
    "inflation",
    "blockchain",
    "the human brain",
    "vaccines",
    "Buddhism",
    "the stock exchange",
    "a quasar",
    "game theory",
    "the Industrial Revolution",
    "nuclear fusion",
    "impressionism",
    "linear algebra",
    "insulin",
    "osmosis",
    "a supernova",
    "hypnosis",
    "the Silk Road",
    "glaciers",
    "the Magna Carta",
    "tsunamis",
    "syntax",
    "baroque music",
    "the Treaty of Versailles",
    "mitosis",
    "sonar",
)
TASKS = (
    "a function that sorts a list",
    "a business letter",
    "an SQL query",
    "a cover letter",
    "a regular expression for dates",
    "a tweet about our product",
    "a Java class",
    "an essay on renewable energy",
    "a pitch deck",
    "a privacy policy",
    "a Kotlin app",
    "a MATLAB script",
    "a lesson plan",
    "a eulogy",
    "a grant proposal",
    "a Makefile",
)
BEYOND_FACTS = (
    "Who was {person}?",
    "When was {person} born?",
    "When did {person} die?",
    "What is {person} best known for?",
    "Give me a short biography of {person}.",
    "In which city did {person} grow up?",
    "What did {person} achieve?",
    "What is the capital of {country}?",
    "How many people live in {country}?",
    "Who is the current president of {country}?",
    "Which currency is used in {country}?",
    "What is the national anthem of {country}?",
    "Explain {subject}.",
    "What is {subject}?",
    "How would you explain {subject} to a child?",
    "Give me a summary of {subject}.",
    "What are the main causes of {subject}?",
    "Why does {subject} matter?",
    "Write {task}.",
    "Please write {task} for me.",
    "I need {task}.",
    "What happened in {year}?",
    "Who won the world cup in {year}?",
    "Which film won the Oscar in {year}?",
)


@lru_cache(maxsize=1 << 20)
def held_out(a: int, b: int) -> bool:
    """Whether the sum and the differences of two numbers are kept out of the training data.

    One in :data:`HELD_OUT_PART` unordered pairs of numbers of two or more digits is, chosen by a hash.
    """
    low, high = min(a, b), max(a, b)
    if low < 10:
        return False
    digest = hashlib.blake2b(f"{_SALT} {low} {high}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_PART == 0


def frame(question: str) -> str:
    """A question without what varies: its numbers (also the slots of a template), capitals, spaces, punctuation."""
    text = re.sub(r"\{\w+\}|\d[\d,.]*(?<![,.])", "#", question.lower().replace("−", "-"))
    return " ".join(re.findall(r"[a-z#]+|[-+*/^%=]", text))


_UNSEEN = re.compile("|".join(re.escape(frame(form)) for form in (*UNSEEN_ADDITION, *UNSEEN_SUBTRACTION)))


def is_unseen(question: str) -> bool:
    """Whether a question, or a template of one, contains a phrasing that is held out."""
    return _UNSEEN.search(frame(question)) is not None


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with one right number; or with none, where the right answer is that the model cannot tell."""

    question: str
    answer: int | None

    def solved_by(self, reply: str) -> bool:
        """Whether a reply is right."""
        return refuses(reply) if self.answer is None else number_in(reply) == self.answer


def number_in(reply: str) -> int | None:
    """The number a reply gives: the last one in it. None where there is none."""
    numbers = re.findall(r"-?\d+", reply)
    return int(numbers[-1]) if numbers else None


def refuses(reply: str) -> bool:
    """Whether a reply says that the model cannot do it or does not know it, and gives no result besides."""
    said = r"\bI (can only|cannot|do not (know|speak)|am not sure)\b|\btoo difficult for me\b"
    return re.search(said, reply) is not None and "=" not in reply


@dataclass(frozen=True, slots=True)
class Category:
    """A kind of problem.

    Attributes:
        digits: Digits of both numbers; 0 where the problems are to be refused.
        forms: Templates of questions, each with the sign of its second number (0: to be refused).
        claim: Fraction of right answers the model is claimed to reach, or None where nothing is claimed.
    """

    name: str
    digits: int
    forms: tuple[tuple[str, int], ...]
    claim: float | None

    def most(self) -> int:
        """The most problems that are drawn of it: at most half of those there are, so that drawing is fast."""
        if self.digits:
            return (9 * 10 ** (self.digits - 1)) ** 2 // HELD_OUT_PART * len(self.forms) // 2
        return sum(_variety(form) for form, _ in self.forms) // 2


def _forms(*signed: tuple[Sequence[str], int]) -> tuple[tuple[str, int], ...]:
    return tuple((template, sign) for templates, sign in signed for template in templates)


_UNSEEN_FORMS = _forms((UNSEEN_ADDITION, 1), (UNSEEN_SUBTRACTION, -1))
CATEGORIES = (
    Category("addition, 2 digits", 2, _forms((ADDITION, 1)), 0.99),
    Category("subtraction, 2 digits", 2, _forms((SUBTRACTION, -1)), 0.99),
    Category("addition, 3 digits", 3, _forms((ADDITION, 1)), 0.95),
    Category("subtraction, 3 digits", 3, _forms((SUBTRACTION, -1)), 0.95),
    Category("word problems, 2 digits", 2, _forms((GAIN, 1), (LOSS, -1)), None),
    Category("sums and differences, 4 digits", 4, _forms((ADDITION, 1), (SUBTRACTION, -1)), None),
    Category("unseen phrasings, 2 digits", 2, _UNSEEN_FORMS, 0.99),
    Category("unseen phrasings, 3 digits", 3, _UNSEEN_FORMS, 0.99),
    Category("refusals, arithmetic beyond it", 0, _forms((BEYOND_ARITHMETIC, 0)), 0.95),
    Category("refusals, unknown facts", 0, _forms((BEYOND_FACTS, 0)), 0.95),
)


def draw_problems(category: Category, count: int, seed: int) -> list[Problem]:
    """``count`` different held-out problems; the same for the same seed, on any machine.

    Pairs are drawn uniformly, in either order, so that about half of the differences are negative (those of things
    that are given away are not).

    Raises:
        InvalidInputError: There are fewer than ``count`` such problems.
    """
    most = category.most()
    if not 0 < count <= most:
        raise InvalidInputError(f"{category.name}: {count} problems were asked for; it takes 1 to {most}.")
    rng = random.Random(f"{category.name} {seed}")
    seen: dict[Problem, None] = {}
    while len(seen) < count:
        for problem in _drawn(category, rng):
            seen[problem] = None
    return list(seen)


def _drawn(category: Category, rng: random.Random) -> Iterator[Problem]:
    """A problem, or none where the pair drawn is not held out."""
    if not category.digits:
        template, _ = rng.choice(category.forms)
        yield Problem(re.sub(r"\{(\w+)\}", lambda slot: _SLOTS[slot[1]][0](rng), template), None)
        return
    low, high = 10 ** (category.digits - 1), 10**category.digits - 1
    a, b = rng.randint(low, high), rng.randint(low, high)
    template, sign = rng.choice(category.forms)
    if template in LOSS:
        a, b = max(a, b), min(a, b)
    if held_out(a, b):
        question = template.format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))
        yield Problem(question, a + sign * b)


def _number(low: int, high: int) -> tuple[Callable[[random.Random], str], int]:
    return (lambda rng: str(rng.randint(low, high))), high - low + 1


def _one(values: Sequence[str]) -> tuple[Callable[[random.Random], str], int]:
    return (lambda rng: rng.choice(values)), len(values)


_SLOTS: dict[str, tuple[Callable[[random.Random], str], int]] = {
    "big": ((lambda rng: str(rng.randint(1, 9) * 10 ** (n := rng.randint(4, 8)) + rng.randint(0, 10**n - 1))), 10**6),
    "small": _number(3, 9999),
    "two": _number(13, 99),
    "three": _number(101, 998),
    "power": _number(4, 9),
    "odd": _one(("7", "13", "17", "19", "23", "29")),
    "decimal": ((lambda rng: f"{rng.randint(0, 99)}.{rng.randint(1, 99)}"), 9900),
    "year": _number(1700, 2030),
    "person": _one(PEOPLE),
    "country": _one(COUNTRIES),
    "subject": _one(SUBJECTS),
    "task": _one(TASKS),
}
"""What fills the slots of problems to be refused, and in how many ways."""


def _variety(template: str) -> int:
    product = 1
    for slot in re.findall(r"\{(\w+)\}", template):
        product *= _SLOTS[slot][1]
    return product
