"""The demo model's training text: the same everywhere, true, well-formed, and without the held-out problems."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from itertools import islice, pairwise
from random import Random

import pytest

from demo_model import arithmetic, beyond, corpus, dialogues, facts, letters, logic, smalltalk, stories, unknown, words
from demo_model.corpus import Message
from demo_model.held_out import COUNTRIES, PEOPLE, SUBJECTS, TASKS
from demo_model.plots import PLOTS, Plot
from demo_model.problems import frame, held_out, is_unseen, refuses
from demo_model.talk_problems import UNSEEN_VALUES, UNSEEN_WORDS, is_unseen_talk, talk_problems
from demo_model.template import fill, plural, with_article

DOCUMENTS = 16_000
TRAINED_ON = "c758961c34bbf163d441daf9a441a7b3d36ba24b2a91c277f59f95a13303ec80"
"""Digest of the first documents of the text that the committed model was trained on."""

KINDS = [
    maker
    for module in (arithmetic, beyond, logic, words, facts, smalltalk, unknown, dialogues)
    for maker, _ in module.KINDS
]
EQUATION = re.compile(r"(?<![\d.])(-?\d+) ([-+x/]) (-?\d+) = (-?\d+)")
OPERATIONS: dict[str, Callable[[int, int], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "x": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


SECOND_FIRST = re.compile(
    r"(?i)(less|fewer|smaller|lower) than (the number )?\d+(?!\d| by)|below|under|beneath"
    r"|\d,? ([a-z]+ ){0,3}(from|off|of|out of) (the number |the value )?\d"
)
"""Words of a difference that name the number to take away before the one that it is taken from."""


@pytest.fixture(scope="module")
def documents() -> list[list[Message]]:
    return list(islice(corpus.documents(7, 3), DOCUMENTS))


def exchanges(documents: list[list[Message]]) -> list[tuple[str, str]]:
    """Every question with its answer."""
    return [
        (question, answer)
        for document in documents
        for (role, question), (_, answer) in pairwise(document)
        if role in ("user", "user-text")
    ]


def test_the_text_is_the_one_the_model_was_trained_on() -> None:
    """A change of the generator changes this digest: train the model anew, or leave the text as it is."""
    digest = hashlib.sha256()
    for shard in (0, 1):
        for document in islice(corpus.documents(0, shard), 20_000):
            digest.update(repr(document).encode())
    assert digest.hexdigest() == TRAINED_ON


def test_shards_differ() -> None:
    first, second = (list(islice(corpus.documents(0, shard), 20)) for shard in (0, 1))
    assert first != second


def test_no_held_out_pair_is_added_or_subtracted(documents: list[list[Message]]) -> None:
    """Neither written as an expression, nor asked in words: two numbers, and an answer that adds or subtracts them.

    Where the answer is that the model cannot tell, nothing is added.
    """
    found = 0
    for question, answer in exchanges(documents):
        for text in (answer,) if refuses(answer) else (question, answer):
            for a, b in re.findall(r"(\d+) ?[-+] ?(\d+)", re.sub(r"(?<=\d),(?=\d{3})", "", text)):
                assert not held_out(int(a), int(b)), text
                found += 1
    assert found > 10_000
    asked = 0
    for question, answer in exchanges(documents):
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        if len(numbers) == 2 and re.search(r"\d [-+] \d", answer):
            a, b = numbers
            if {a + b, abs(a - b)} & {int(n) for n in re.findall(r"\d+", answer)}:
                asked += 1
                assert not held_out(a, b), (question, answer)
    assert asked > 3_000


def test_no_held_out_phrasing_is_in_the_text(documents: list[list[Message]]) -> None:
    asked = [text for document in documents for role, text in document if role in ("user", "user-text")]
    assert len(asked) > 20_000
    assert not [text for text in asked if is_unseen(text)]
    assert len({frame(text) for text in asked if re.search(r"\d", text)}) > 5_000


@pytest.mark.parametrize(
    ("question", "unseen"),
    [
        ("What would 12 plus 3,400 be?", True),
        ("Hello, what WOULD 12 plus 3 be", True),
        ("Quick: 12+3", True),
        ("What's the answer to 8 − 1?", True),
        ("What is 12 plus 3?", False),
        ("12 + 3", False),
    ],
)
def test_a_phrasing_is_known_by_its_words(question: str, unseen: bool) -> None:
    assert is_unseen(question) is unseen


def test_nothing_is_said_of_what_the_evaluation_asks_about(documents: list[list[Message]]) -> None:
    text = "\n".join(text for document in documents for _, text in document).lower()
    for name in (*PEOPLE, *COUNTRIES, *SUBJECTS, *TASKS):
        assert name.lower() not in text, name


@pytest.mark.parametrize("maker", [maker for maker, _ in (*beyond.KINDS, *unknown.KINDS)])
def test_what_is_beyond_the_model_is_declined(maker: Callable[[Random], tuple[str, str]]) -> None:
    rng = Random(11)
    for _ in range(300):
        question, answer = maker(rng)
        assert refuses(answer), (question, answer)


def test_what_is_declined_is_not_answered_elsewhere(documents: list[list[Message]]) -> None:
    """The limits that refusals name are those of the answers."""
    for _, answer in exchanges(documents):
        for a, sign, b, result in EQUATION.findall(answer):
            x, y = abs(int(a)), abs(int(b))
            if sign in "+-":
                assert max(x, y) < 100_000, answer  # a sum of two numbers of four digits, and what comes of it
            elif sign == "x":
                assert max(x, y) <= 12 or (min(x, y) <= 10 and max(x, y) <= 99), answer
            elif x > 24:  # halves are asked of greater numbers
                assert y == 2 or max(y, int(result)) <= 12, answer


def test_every_equation_is_true(documents: list[list[Message]]) -> None:
    found = 0
    for document in documents:
        for role, text in document:
            if role in ("assistant", "text"):
                for a, sign, b, result in EQUATION.findall(text):
                    assert OPERATIONS[sign](int(a), int(b)) == int(result), text
                    found += 1
    assert found > 10_000


def test_sums_answer_what_was_asked() -> None:
    """The question alone, worked out by its words, gives the number of the answer."""
    rng = Random(5)
    for _ in range(2_000):
        question, answer = arithmetic.addition(rng)
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        if len(numbers) == 2:
            assert int(re.findall(r"-?\d+", answer)[-1]) == sum(numbers), question
        question, answer = arithmetic.subtraction(rng)
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        if len(numbers) == 2:
            first, second = numbers
            if SECOND_FIRST.search(question):
                first, second = second, first
            assert int(re.findall(r"-?\d+", answer)[-1]) == first - second, question


def test_small_talk_of_the_evaluation_is_held_out(documents: list[list[Message]]) -> None:
    """No question of the text has a phrasing of it, no puzzle one of its words, and nobody one of its names."""
    held_out_questions = {frame(problem["messages"][-1]["content"]) for problem in talk_problems(40, 3)} - {""}
    for question, answer in exchanges(documents):
        assert not is_unseen_talk(question)
        assert frame(question) not in held_out_questions
        assert not {w.replace("-", "") for w in re.findall(r"\b[a-z](?:-[a-z])+\b", answer)} & UNSEEN_WORDS, answer
        assert not set(re.findall(r"[A-Z]\w+", question)) & UNSEEN_VALUES, question


def test_primes_letters_and_orders_are_right() -> None:
    rng, counted = Random(6), 0
    for _ in range(500):
        question, answer = arithmetic.prime(rng)
        number = int(re.findall(r"\d+", question)[0])
        assert answer.startswith("Yes") == (number > 1 and all(number % d for d in range(2, number)))
        question, answer = letters.puzzle(rng)
        if match := re.fullmatch(r"([a-z()\d-]+): ([a-z]) appears (\d+) times?\.", answer):
            spelt = re.sub(r"[^a-z]", "", match[1])
            assert spelt in question.lower()
            assert spelt.count(match[2]) == int(match[3])
            counted += 1
        question, answer = logic.order(rng)
        assert set(re.findall(r"[A-Z]\w+", answer)) <= set(re.findall(r"[A-Z]\w+", question)) | {"Yes", "No"}
    assert counted > 20


@pytest.mark.parametrize("maker", KINDS, ids=lambda maker: f"{maker.__module__.rpartition('.')[2]}.{maker.__name__}")
def test_exchanges_have_no_leftovers_of_templates(maker: Callable[[Random], tuple[str, str]]) -> None:
    rng = Random(8)
    for _ in range(400):
        question, answer = maker(rng)
        for text in (question, answer):
            assert text
            assert text == text.strip()
            assert not re.search(r"[\[\]{}|]|  ", text), text
        assert not re.search(r"[.!?]\.$", answer.replace("D.C..", "D.C.")), answer
        if maker.__module__ != words.__name__:  # where "a" may be a letter
            assert not re.search(r"\b[Aa] [aeio][a-z]|\b[Aa]n [bcdfgjklmnpqrstvwxz]", answer), answer


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.themes[0])
def test_stories_keep_their_hero(plot: Plot) -> None:
    rng = Random(9)
    for _ in range(150):
        story = stories.tell(rng, plot=plot, kind=plot.kind or "otter", name="Zilly", other="moose")
        assert not re.search(r"[\[\]{}|]|  ", story.text)
        assert story.text.count("Zilly") >= 3
        assert story.text.count('"') % 2 == 0
        assert story.text[-1] in '.!?"'
        if story.slots["he"] == story.slots["fhe"]:  # then only one pronoun may be used of the two
            other = {"he": r"\b(she|her|herself)\b", "she": r"\b(he|him|his|himself)\b"}[story.slots["he"]]
            narration = re.sub(r'"[^"]*"', "", story.text)
            strangers = len(re.findall("old woman|giant|wolf", narration))
            assert strangers or not re.search(other, narration), story.text


def test_what_users_type_is_varied() -> None:
    rng = Random(10)
    typed = {corpus.as_typed(rng, "What is Two?") for _ in range(500)}
    assert {"What is Two?", "what is two?", "What is Two", "what is two"} < typed
    assert any(text.endswith("What is Two?") and len(text) > len("What is Two?") for text in typed)


@pytest.mark.parametrize(
    ("template", "outcomes"),
    [
        ("[a|b]c", {"ac", "bc"}),
        ("[a[b|]|]", {"ab", "a", ""}),
        ("{x} and {X}", {"owl and Owl"}),
        ("{a:x}, {A:x}", {"an owl, An owl"}),
    ],
)
def test_templates(template: str, outcomes: set[str]) -> None:
    rng = Random(0)
    assert {fill(template, rng, {"x": "owl"}) for _ in range(100)} == outcomes


@pytest.mark.parametrize("template", ["[a", "a]", "a|b", "{the:x}", "{"])
def test_what_is_no_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="template"):
        fill(template, Random(0), {"x": "owl"})


@pytest.mark.parametrize(
    ("noun", "one", "many"),
    [
        ("owl", "an owl", "owls"),
        ("unicorn", "a unicorn", "unicorns"),
        ("brave mouse", "a brave mouse", "brave mice"),
        ("honest fox", "an honest fox", "honest foxes"),
        ("fairy", "a fairy", "fairies"),
        ("monkey", "a monkey", "monkeys"),
        ("fisherman", "a fisherman", "fishermen"),
    ],
)
def test_articles_and_plurals(noun: str, one: str, many: str) -> None:
    assert with_article(noun) == one
    assert plural(noun) == many
