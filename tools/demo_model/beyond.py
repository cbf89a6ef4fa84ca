"""Arithmetic that the model does not learn and should refuse (``data/beyond.toml``); its answers name the limit."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo_model import phrasings
from demo_model.arithmetic import Exchange, a_number, in_words, product_of, quotient_of
from demo_model.held_out import ADDITION, GAIN, LOSS, NAMES, SUBTRACTION
from demo_model.lexicon import THINGS
from demo_model.template import fill, read_data

_DATA = read_data("beyond")
LIMITS: dict[str, str] = _DATA["limits"]
"""What the model says, by what is asked."""


def long_number(rng: Random) -> str:
    """A number of five digits or more, in one of the ways people write it."""
    digits = rng.choices((5, 6, 7, 8, 9, 10, 12), (40, 25, 15, 8, 5, 4, 3))[0]
    roll = rng.random()
    if roll < 0.2:
        n = rng.randint(1, 9) * 10 ** (digits - 1)
    elif roll < 0.3:
        n = 10 ** (digits - 1) + rng.choice((-1, 0, 1)) * (digits > 5)
    elif roll < 0.4:
        n = 10**digits - rng.randint(1, 3)
    else:
        n = a_number(rng, digits)
    roll = rng.random()
    if roll < 0.2:
        return f"{n:,}"
    if roll < 0.25:
        return f"{in_words(rng.randint(1, 999))} {rng.choice(('million', 'billion', 'hundred thousand'))}"
    return str(n)


def any_whole(rng: Random) -> str:
    return str(a_number(rng, rng.choice((1, 2, 3, 4))))


def decimal(rng: Random) -> str:
    whole = a_number(rng, rng.choice((1, 1, 2, 2, 3)))
    part = rng.choice(("5", "5", "25", "75", "50", "99", str(rng.randint(1, 99)), str(rng.randint(1, 9))))
    text = f"{rng.choice((0, whole, whole, whole))}.{part}"
    return rng.choice(("", "", "", "", "", "$", "-")) + text


def fraction(rng: Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(_DATA["fractions"])
    return f"{rng.randint(1, 9)}/{rng.randint(2, 12)}"


def _of_two(rng: Random, strange: str, other: str) -> str:
    """A sum or a difference of two terms in either order."""
    a, b = (strange, other) if rng.random() < 0.5 else (other, strange)
    evaluated, composed = rng.choice(((ADDITION, phrasings.ADDITION), (SUBTRACTION, phrasings.SUBTRACTION)))
    template = rng.choice(evaluated) if rng.random() < 0.35 else composed(rng)
    return template.format(a=a, b=b)


def long_sum(rng: Random) -> Exchange:
    other = long_number(rng) if rng.random() < 0.45 else any_whole(rng)
    return _of_two(rng, long_number(rng), other), LIMITS["long"]


def decimal_sum(rng: Random) -> Exchange:
    return _of_two(rng, decimal(rng), decimal(rng) if rng.random() < 0.5 else any_whole(rng)), LIMITS["decimal"]


def fraction_sum(rng: Random) -> Exchange:
    other = fraction(rng) if rng.random() < 0.75 else any_whole(rng)
    return _of_two(rng, fraction(rng), other), LIMITS["fraction"]


def long_story(rng: Random) -> Exchange:
    """A word problem with numbers that are too long, or decimals."""
    what, make = rng.choice((("long", long_number), ("long", long_number), ("decimal", decimal)))
    slots = {"a": make(rng), "b": make(rng) if rng.random() < 0.5 else any_whole(rng), "name": rng.choice(NAMES)}
    return fill(rng.choice((*GAIN, *LOSS)), rng, {**slots, "things": rng.choice(THINGS)}), LIMITS[what]


def long_product(rng: Random) -> Exchange:
    roll = rng.random()
    if roll < 0.5:
        a, b = str(rng.randint(13, 99)), str(rng.randint(11, 99))
    elif roll < 0.85:
        a, b = str(a_number(rng, rng.choice((3, 3, 4, 5)))), str(a_number(rng, rng.choice((1, 2, 2, 3))))
    else:
        a, b = decimal(rng), str(rng.randint(2, 99))
    if rng.random() < 0.5:
        a, b = b, a
    return product_of(rng, a, b), LIMITS["product"]


def long_quotient(rng: Random) -> Exchange:
    while True:
        if rng.random() < 0.5:
            a, b = rng.randint(1, 150), rng.randint(2, 12)
        else:
            a, b = a_number(rng, rng.choice((2, 3, 3, 4, 5))), max(2, a_number(rng, rng.choice((1, 1, 2, 2, 3))))
        if b > 12 or a % b or a // b > 12:
            return quotient_of(rng, a, b), LIMITS["quotient"]


def by_zero(rng: Random) -> Exchange:
    return quotient_of(rng, any_whole(rng), 0), LIMITS["zero"]


def power(rng: Random) -> Exchange:
    if rng.random() < 0.3:
        n, forms = rng.randint(13, 999), ["{n} squared", "the square of {n}", "{n}²", "{n}^2", "{n} to the power of 2"]
        return phrasings.asking(rng, rng.choice(forms).format(n=n)), LIMITS["power"]
    slots = {"n": any_whole(rng), "k": rng.choice((3, 3, 4, 5, 6, 7, 8, 9, 10, 12, 20))}
    value = fill(rng.choice(_DATA["powers"]), rng, slots)
    return phrasings.asking(rng, value), LIMITS["power"]


def root(rng: Random) -> Exchange:
    n = rng.choice((rng.randint(2, 15) ** 2, rng.randint(2, 200), a_number(rng, 3), a_number(rng, 4)))
    return phrasings.asking(rng, fill(rng.choice(_DATA["roots"]), rng, {"n": n})), LIMITS["root"]


def percentage(rng: Random) -> Exchange:
    slots = {"p": rng.choice((1, 5, 10, 12, 15, 20, 25, 30, 50, 75, 100, rng.randint(1, 99))), "n": any_whole(rng)}
    value = fill(rng.choice(_DATA["percentages"]), rng, slots)
    return phrasings.asking(rng, value), LIMITS["percentage"]


def function(rng: Random) -> Exchange:
    """Logarithms, averages, equations, units and more: what is asked decides the answer."""
    form, limit = rng.choice(_DATA["functions"])
    several = ", ".join(str(a_number(rng, rng.choice((1, 2)))) for _ in range(rng.randint(2, 5)))
    slots = {"n": any_whole(rng), "m": any_whole(rng), "d": rng.randint(2, 9), "e": rng.randint(2, 30), "l": several}
    slots["b"] = long_number(rng)
    value = fill(form, rng, slots)
    return phrasings.asking(rng, value) if rng.random() < 0.5 and "?" not in value else value, limit


def expression(rng: Random) -> Exchange:
    """More terms than three, brackets, or products and quotients among them."""
    n = [str(a_number(rng, rng.choice((1, 2, 2, 3)))) for _ in range(5)]
    sign = [rng.choice("+-") for _ in range(4)]
    times = rng.choice("x*/*x")
    text = rng.choice(
        (
            f"{n[0]} {sign[0]} {n[1]} {sign[1]} {n[2]} {sign[2]} {n[3]}",
            f"{n[0]} {sign[0]} {n[1]} {sign[1]} {n[2]} {sign[2]} {n[3]} {sign[3]} {n[4]}",
            f"({n[0]} {sign[0]} {n[1]}) {times} {n[2]}",
            f"{n[0]} {times} ({n[1]} {sign[0]} {n[2]})",
            f"{n[0]} {times} {n[1]} {times} {n[2]}",
            f"{n[0]} {times} {n[1]} {sign[0]} {n[2]} {times} {n[3]}",
            f"({n[0]} {sign[0]} {n[1]}) {sign[1]} ({n[2]} {sign[2]} {n[3]})",
            f"{a_number(rng, 4)} {sign[0]} {a_number(rng, 4)} {sign[1]} {a_number(rng, rng.choice((2, 3, 4)))}",
        )
    )
    if rng.random() < 0.2:
        text = text.replace(" ", "")
    return phrasings.asking(rng, text), LIMITS["expression"]


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (long_sum, 9),
    (decimal_sum, 5),
    (fraction_sum, 2),
    (long_story, 0.7),
    (long_product, 5),
    (long_quotient, 3.5),
    (by_zero, 0.3),
    (power, 3),
    (root, 1.5),
    (percentage, 2),
    (function, 4),
    (expression, 3),
)
"""Every kind of exchange, with how often it comes."""
