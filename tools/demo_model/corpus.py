"""The training text: a seeded stream of conversations, mixed from every kind of exchange."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random

from demo_model import (
    arithmetic,
    beyond,
    dialogues,
    everyday,
    facts,
    letters,
    logic,
    memory,
    smalltalk,
    stories,
    unknown,
    words,
)
from demo_model.arithmetic import Exchange
from demo_model.lexicon import ANIMALS, COLOURS, FOODS, TRAITS, any_name, creature
from demo_model.template import fill, read_data, with_article

Message = tuple[str, str]
"""A role (``system``, ``user``, ``assistant``; or ``text``: no conversation, but text as it is) and what is said."""
Kinds = Sequence[tuple[Callable[[Random], Exchange], float]]


class _Chooser:
    """Draws from kinds of exchanges by their weights."""

    def __init__(self, *groups: tuple[Kinds, float]) -> None:
        self._makers = [maker for kinds, _ in groups for maker, _ in kinds]
        self._weights: list[float] = []
        total = 0.0
        for kinds, share in groups:
            unit = share / sum(weight for _, weight in kinds)
            for _, weight in kinds:
                total += unit * weight
                self._weights.append(total)

    def __call__(self, rng: Random) -> Exchange:
        return rng.choices(self._makers, cum_weights=self._weights)[0](rng)


SUMS = _Chooser((arithmetic.KINDS, 4), (beyond.KINDS, 1.1))
ANYTHING = _Chooser(
    (arithmetic.KINDS, 2.5),
    (beyond.KINDS, 1),
    (logic.KINDS, 2.8),
    (words.KINDS, 2.2),
    (letters.KINDS, 8),
    (facts.KINDS, 2.4),
    (smalltalk.KINDS, 2.4),
    (everyday.KINDS, 5),
    (unknown.KINDS, 4),
    (dialogues.KINDS, 2),
)

# What a user tells, the reply, the question later, its answer, and the answer where it was never told.
REMEMBERED = read_data("smalltalk")["remembered"]
GREETINGS = ("Hi!", "Hi,", "Hello!", "Hello,", "Hey,", "Hey!", "Please:", "Question:", "So,", "OK,", "Good morning!")
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a friendly assistant.",
    "You are BitNet Demo, a small language model.",
    "Answer the user's questions.",
    "Be kind and concise.",
    "You are a chatbot.",
    "You are a helpful, honest and harmless assistant.",
)


def conversation(rng: Random) -> list[Message]:
    """One document: mostly a conversation of one or a few turns."""
    roll = rng.random()
    if roll < 0.31:
        turns = [SUMS(rng) for _ in range(_length(rng, 8))]
    elif roll < 0.63:
        turns = [ANYTHING(rng) for _ in range(_length(rng, 6))]
    elif roll < 0.71:
        turns = _puzzles(rng)
    elif roll < 0.84:
        turns = _story_time(rng)
    elif roll < 0.96:
        turns = rng.choice(
            (_remembered, _remembered, _remembered, _remembered, memory.sums, memory.sums, memory.sums, _again)
        )(rng)
    elif roll < 0.975:
        return [("text", stories.tell(rng).text)]
    else:
        question, answer = ANYTHING(rng)
        return [("user-text", question), ("text", f" {answer}")]
    messages: list[Message] = []
    if rng.random() < 0.08:
        if rng.random() < 0.3:
            turns = _persona(rng, messages)
        else:
            messages.append(("system", rng.choice(SYSTEM)))
    for question, answer in turns:
        messages += (("user", as_typed(rng, question)), ("assistant", answer))
    return messages


def as_typed(rng: Random, question: str) -> str:
    """A question as people type it: at times in small or capital letters, without a full stop, or greeting first."""
    if rng.random() < 0.03:
        question = mistyped(rng, question)
    roll = rng.random()
    if roll < 0.1:
        return question.lower()
    if roll < 0.2:
        return question.rstrip(".?!") or question
    if roll < 0.24:
        return question.lower().rstrip(".?!") or question
    if roll < 0.29:
        return f"{rng.choice(GREETINGS)} {question}"
    if roll < 0.31:
        return question.upper()
    if roll < 0.33:
        words = question.split(" ")
        i = rng.randrange(len(words))
        return " ".join((*words[:i], words[i].upper(), *words[i + 1 :]))
    return question


def mistyped(rng: Random, question: str) -> str:
    """A question with a typing error in one of its longer words: a letter left out, doubled, or before its turn."""
    places = [i for i in range(1, len(question) - 2) if question[i - 1 : i + 2].isalpha()]
    if not places:
        return question
    i = rng.choice(places)
    wrong = rng.choice(("", question[i] * 2, question[i + 1] + question[i]))
    return question[:i] + wrong + question[i + (2 if len(wrong) == 2 and wrong[0] != question[i] else 1) :]


def _length(rng: Random, most: int) -> int:
    """A number of turns: 1 half of the time, seldom many."""
    n = 1
    while n < most and rng.random() < 0.5:
        n += 1
    return n


def _story_time(rng: Random) -> list[Exchange]:
    """A story, questions about it, and perhaps another one."""
    turns: list[Exchange] = []
    if rng.random() < 0.15:
        turns.append(ANYTHING(rng))
    for _ in range(2 if rng.random() < 0.15 else 1):
        request, story = stories.asked(rng)
        if turns and rng.random() < 0.3:
            request = fill(
                "[Another one|Another story|Tell me another story|One more|One more story][.|, please.|!|]", rng
            )
            story = stories.tell(rng)
        turns.append((request, story.text))
        turns += [stories.question(rng, story) for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3)))]
    if rng.random() < 0.2:
        turns.append(ANYTHING(rng))
    return turns


def _remembered(rng: Random) -> list[Exchange]:
    """The user tells something, and asks for it later; or asks for what was never told."""
    statement, asked, never = memory.remembered(rng) if rng.random() < 0.7 else _remembered_once(rng)
    between = [ANYTHING(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    if rng.random() < 0.12:
        return [*between, never]
    return [statement, *between, asked]


def _remembered_once(rng: Random) -> tuple[Exchange, Exchange, Exchange]:
    """What is told, the question for it, and the same question where nothing was told."""
    animal, slots = rng.choice(ANIMALS), {"colour": rng.choice(COLOURS), "food": rng.choice(FOODS)}
    slots |= {"name": any_name(rng, strange=0.4), "friend": any_name(rng, strange=0.3), "animal": animal}
    slots |= {"age": str(rng.randint(5, 99)), "city": rng.choice(facts.CAPITALS)[1]}
    statement, replied, asked, answered, missing = rng.choice(REMEMBERED)
    question = fill(asked, rng, slots)
    return (
        (fill(statement, rng, slots), fill(replied, rng, slots)),
        (question, fill(answered, rng, slots)),
        (question, fill(missing, rng, slots)),
    )


def _puzzles(rng: Random) -> list[Exchange]:
    """Letter puzzles about one word, and perhaps sums with the number that came out."""
    turns = letters.several(rng)
    number = re.search(r"(\d+)[^\d]*$", turns[-1][1])
    if number and rng.random() < 0.4:
        turns += memory.continued(rng, int(number[1]), rng.choice((1, 1, 2)))
    return turns


def _again(rng: Random) -> list[Exchange]:
    """Jokes, riddles and the like, one after another."""
    makers = (dialogues.joke, dialogues.joke, dialogues.riddle, dialogues.haiku, dialogues.poem, dialogues.dialogue)
    make = rng.choice(makers)
    turns = [make(rng)]
    for _ in range(rng.randint(1, 3)):
        more = "[[Another one|One more|Again|More|another one|Another][.|!|, please.|]|Do you know another one?]"
        answer = dialogues.riddle_answer(rng) if make is dialogues.riddle else make(rng)[1]
        turns.append((fill(more, rng), answer))
    return turns


def _persona(rng: Random, messages: list[Message]) -> list[Exchange]:
    """A system message that says who to be, and questions that show it."""
    name, kind, trait = any_name(rng, strange=0.3), creature(rng), rng.choice(TRAITS) if rng.random() < 0.7 else ""
    one = with_article(f"{trait} {kind}".strip())
    template = "You are [{n}, {o}|{o} [named|called] {n}|{o}. Your name is {n}].[| Stay in character.| Answer briefly.]"
    messages.append(("system", fill(template, rng, {"n": name, "o": one})))
    turns = [
        (fill("[Who are you|What are you|Tell me about yourself][?|]", rng), f"I am {name}, {one}."),
        (fill("[What is your name|What's your name][?|]", rng), f"My name is {name}."),
        (fill("[Hello|Hi][!|.|]", rng), f"Hello! I am {name}, {one}. How can I help you?"),
        ANYTHING(rng),
    ]
    return rng.sample(turns, rng.choice((1, 2, 3)))


def documents(seed: int, shard: int) -> Iterator[list[Message]]:
    """An endless stream of documents, the same for the same seed and shard."""
    rng = Random(f"{seed} {shard}")
    while True:
        yield conversation(rng)
