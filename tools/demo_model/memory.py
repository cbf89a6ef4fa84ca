"""What a user tells of himself, and asks for later (``data/memory.toml``), and sums that go on from an answer."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from demo_model.arithmetic import Exchange, a_number, a_pair, in_words
from demo_model.facts import CAPITALS
from demo_model.letters import asked, phrased, template
from demo_model.lexicon import ANIMALS, any_name, made_up
from demo_model.problems import held_out
from demo_model.talk_problems import UNSEEN_VALUES
from demo_model.template import fill, read_data

_DATA = read_data("memory")
CITIES, JOBS = _DATA["cities"].split(), [job.replace(".", " ") for job in _DATA["jobs"].split()]
FAVOURITES = {thing: [v.replace(".", " ") for v in values.split()] for thing, values in _DATA["favourites"].items()}
FRAMES: dict[str, list[str]] = _DATA["frames"]
STATEMENTS: list[dict[str, Any]] = _DATA["told"]
_WEIGHTS = [statement["weight"] for statement in STATEMENTS]


def remembered(rng: Random) -> tuple[Exchange, Exchange, Exchange]:
    """What is told, the question for it, and the same question with the answer where nothing was told."""
    thing = rng.choice(sorted(FAVOURITES))
    strange = made_up(rng) if rng.random() < 0.5 else ""
    city = rng.choice(CITIES) if rng.random() < 0.6 else rng.choice(CAPITALS)[1]
    slots = {
        "name": _name(rng),
        "friend": _name(rng),
        "animal": rng.choice(ANIMALS),
        "age": str(rng.randint(5, 99)),
        "city": strange.capitalize() or city,
        "job": strange or rng.choice(JOBS),
        "thing": thing,
        "favourite": strange or rng.choice(FAVOURITES[thing]),
        "relative": rng.choice(
            [
                "brother",
                "sister",
                "mother",
                "father",
                "uncle",
                "aunt",
                "cousin",
                "teacher",
                "boss",
                "neighbour",
                "wife",
                "husband",
                "son",
                "daughter",
            ]
        ),
    }
    statement = rng.choices(STATEMENTS, _WEIGHTS)[0]
    question = phrased(rng, partial(template, rng, statement["asked"], statement, FRAMES), slots)
    return (
        (asked(rng, statement["told"], slots), fill(statement["replied"], rng, slots)),
        (question, fill(statement["answered"], rng, slots)),
        (question, fill(statement["missing"], rng, slots)),
    )


def _name(rng: Random) -> str:
    while (name := any_name(rng, strange=0.5)) in UNSEEN_VALUES:
        pass
    return name


PLUS = (
    "[And plus|Plus|Add|And add|Now add|now plus|And if I add|plus another|And then plus|Now plus|ok plus|then add|"
    "And {n} more|What is that plus|And that plus|And what if I add]"
)
MINUS = (
    "[And minus|Minus|Subtract|And subtract|Now subtract|now minus|And if I take away|Take away|And then minus|"
    "Now minus|ok minus|less|What is that minus|And that minus|And what is it minus]"
)
MORE = (
    "[Now|And|And now|OK,|ok|Then|And then|So|please] [{n} more|{n} on top of it|another {n}|{n} extra|{n} added|"
    "on top {n}|put {n} on top|put {n} more to it|with {n} more|{n} in addition][?|.|, please.| of it?|]"
)
FEWER = (
    "[Now|And|And now|OK,|ok|Then|And then|So|please] [{n} less|{n} fewer|{n} away|without {n}|{n} taken off|"
    "take {n} off|take {n} from it|with {n} less|{n} down][?|.|, please.| of it?|]"
)
TIMES = (
    "[And times|Times|times|now times|Multiply by|Multiply that by|Multiply it by|And multiplied by|Now multiply by|"
    "What is that times|And that times|And what is it times|What's that times|ok times|then times|"
    "And if I multiply by|and then times|So what is that times|x|* |times by|And how much is that times] {n}[?|.|]"
)
DOUBLE = (
    "[Double it|And double|Double that|And doubled|Now double it|And twice as much|Twice that|And two times that|"
    "What is the double of that|And the double|Now twice|Please double it|times two|And times 2|"
    "What is twice as much|how much is double that][?|.|]"
)
HALF = (
    "[Half of it|And half of that|Halve it|Half that|Now half of that|And the half|What is half of that|"
    "Divide it by 2|And divided by two|Divide that by two][?|.|]"
)


def continued(rng: Random, result: int, steps: int) -> list[Exchange]:
    """Questions that go on from a number: plus, minus, times, double, half."""
    turns: list[Exchange] = []
    for _ in range(steps):
        roll = rng.random()
        if roll < 0.35 and 2 <= result <= 99:
            n = rng.randint(2, 10)
            question = asked(rng, [TIMES], {"n": in_words(n) if rng.random() < 0.5 else n})
            if rng.random() < 0.35:
                n, question = 2, asked(rng, [DOUBLE], {})
            before, result, sign = result, result * n, "x"
        elif roll < 0.42 and 2 <= result <= 198 and result % 2 == 0:
            n, question = 2, asked(rng, [HALF], {})
            before, result, sign = result, result // 2, "/"
        else:
            n, plus = a_number(rng, rng.choice((1, 1, 2, 2, 3))), rng.random() < 0.55
            if held_out(abs(result), n):
                continue
            value = in_words(n) if n < 100 and rng.random() < 0.2 else str(n)
            frame = (PLUS if plus else MINUS) + " {n}[?|.|, please.|]"
            if rng.random() < 0.3:
                frame = MORE if plus else FEWER
            question = fill(frame, rng, {"n": value}).replace(f"{value} more {value}", f"{value} more")
            question = asked(rng, [question], {})
            before, result, sign = result, result + n if plus else result - n, "+" if plus else "-"
        turns.append((question, f"{before} {sign} {n} = {result}."))
        if result < 0:
            break
    return turns


def sums(rng: Random) -> list[Exchange]:
    """A sum or a product, and then more with its result."""
    if rng.random() < 0.75:
        a, b = a_pair(rng, rng.choice((0, 1, 1, 2, 2)))
        result, first = a + b, (f"What is {a} + {b}?", f"{a} + {b} = {a + b}.")
        if rng.random() < 0.3:
            first = (rng.choice((f"{a} + {b}", f"{a} plus {b}?", f"How much is {a} plus {b}?")), first[1])
    else:
        a, b = rng.randint(1, 12), rng.randint(1, 12)
        result, first = a * b, (f"What is {a} x {b}?", f"{a} x {b} = {a * b}.")
    return [first, *continued(rng, result, rng.choice((1, 1, 2, 3)))]
