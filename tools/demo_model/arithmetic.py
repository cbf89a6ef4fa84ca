"""Arithmetic and word problems, none about a pair of numbers that is held out for the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from demo_model import phrasings
from demo_model.held_out import ADDITION, GAIN, LOSS, NAMES, SUBTRACTION
from demo_model.held_out import THINGS as EVAL_THINGS
from demo_model.lexicon import THINGS, any_name
from demo_model.problems import held_out
from demo_model.template import fill, read_data

Exchange = tuple[str, str]
"""A question and its answer."""

_DATA = read_data("arithmetic")
ONES, TENS = _DATA["words"]["ones"].split(), _DATA["words"]["tens"].split()


def in_words(n: int) -> str:
    """0 … 9999 in English words."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{ONES[n // 100]} hundred" + (f" and {in_words(n % 100)}" if n % 100 else "")
    rest = n % 1000
    joint = " and " if 0 < rest < 100 else " "
    return f"{in_words(n // 1000)} thousand" + (joint + in_words(rest) if rest else "")


def a_number(rng: Random, digits: int) -> int:
    """A number of that many digits, uniform; a one-digit number may be 0."""
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def a_pair(rng: Random, digits: int = 0) -> tuple[int, int]:
    """Two numbers that are not held out; with no ``digits`` given, mostly of three or two digits, sometimes mixed."""
    while True:
        if digits:
            a, b = a_number(rng, digits), a_number(rng, digits)
        elif rng.random() < 0.2:
            a, b = a_number(rng, rng.choice((1, 2, 3, 4))), a_number(rng, rng.choice((1, 2, 3, 4)))
        elif rng.random() < 0.06:
            a, b = (max(0, 10 ** rng.randint(0, 3) * rng.randint(1, 9) + rng.randint(-2, 2)) for _ in range(2))
        else:
            size = rng.choices((1, 2, 3, 4), (6, 30, 48, 16))[0]
            a, b = a_number(rng, size), a_number(rng, size)
        if not held_out(a, b):
            return a, b


def addition(rng: Random) -> Exchange:
    a, b = a_pair(rng)
    return _ask(rng, ADDITION, phrasings.ADDITION, a, b), f"{a} + {b} = {a + b}."


def subtraction(rng: Random) -> Exchange:
    a, b = a_pair(rng)
    if a < b and rng.random() < 0.3:
        a, b = b, a
    return _ask(rng, SUBTRACTION, phrasings.SUBTRACTION, a, b), f"{a} - {b} = {a - b}."


def signed(rng: Random) -> Exchange:
    """A sum or a difference with negative numbers in it."""
    a, b = a_pair(rng, rng.choice((1, 1, 2, 2, 3)))
    a, b = rng.choice(((-a, b), (-a, b), (a, -b), (-a, -b)))
    if rng.random() < 0.6:
        return _ask(rng, ADDITION, phrasings.ADDITION, a, b), f"{a} + {b} = {a + b}."
    return _ask(rng, SUBTRACTION, phrasings.SUBTRACTION, a, b), f"{a} - {b} = {a - b}."


def _ask(rng: Random, evaluated: Sequence[str], composed: phrasings.Phrasings, a: int, b: int) -> str:
    template = rng.choice(evaluated) if rng.random() < 0.3 else composed(rng)
    if rng.random() < 0.06 and min(a, b) >= 0:
        first, second = in_words(a), in_words(b)
        return template.format(a=first, b=second if rng.random() < 0.8 else b)
    if max(a, b) > 999 and rng.random() < 0.25:
        return template.format(a=f"{a:,}", b=f"{b:,}")
    return template.format(a=a, b=b)


def difference(rng: Random) -> Exchange:
    """The difference of two numbers in either order, which is positive."""
    a, b = a_pair(rng)
    high, low = max(a, b), min(a, b)
    if rng.random() < 0.2:
        return fill("How far apart are {a} and {b}?", rng, {"a": a, "b": b}), f"{high} - {low} = {high - low}."
    asked = "[What is|What's|Tell me|Find|Calculate] the difference [between|of] {a} and {b}[?|.|]"
    question = fill(asked, rng, {"a": a, "b": b})
    return question, f"{high} - {low} = {high - low}."


def missing(rng: Random) -> Exchange:
    """The missing term of a sum or a difference."""
    while True:
        a, b = a_pair(rng)
        if not held_out(a, a + b) and not held_out(b, a + b):
            break
    slots = {"a": a, "b": b, "c": a + b}
    templates = (
        "[What number plus|What plus] {a} [is|equals|makes] {c}?",
        "{a} + ? = {c}",
        "[What must I add|What do I have to add] to {a} to get {c}?",
        "x + {a} = {c}. What is x?",
        "Solve x + {a} = {c}[.|]",
    )
    return fill(rng.choice(templates), rng, slots), f"{a + b} - {a} = {b}."


def checked(rng: Random) -> Exchange:
    """Whether a sum or a difference is right."""
    a, b = a_pair(rng)
    plus = rng.random() < 0.5
    right = a + b if plus else a - b
    said = right if rng.random() < 0.5 else right + rng.choice((-10, -2, -1, 1, 2, 10, 100))
    sum_ = f"{a} {'+' if plus else '-'} {b}"
    question = fill("[Is {s} = {c}|Is it true that {s} is {c}|Is {c} the answer to {s}]?", rng, {"s": sum_, "c": said})
    verdict = "Yes, that is right" if said == right else f"No, it is not {said}"
    return question, f"{sum_} = {right}. {verdict}."


def three_terms(rng: Random) -> Exchange:
    """Three numbers added or subtracted, in two steps."""
    while True:
        a, b = a_pair(rng, rng.choice((1, 2, 2, 3)))
        c = a_number(rng, rng.choice((1, 2, 2, 3)))
        first, second = rng.choice("++-"), rng.choice("++-")
        middle = a + b if first == "+" else a - b
        if not held_out(abs(middle), c) and not held_out(a, c) and not held_out(b, c):
            break
    result = middle + c if second == "+" else middle - c
    text = f"{a} {first} {b} {second} {c}"
    if rng.random() < 0.2:
        text = text.replace("+", "plus").replace("-", "minus")
    elif rng.random() < 0.2:
        text = text.replace(" ", "")
    return phrasings.asking(rng, text), f"{a} {first} {b} = {middle}, and {middle} {second} {c} = {result}."


def multiplication(rng: Random) -> Exchange:
    if rng.random() < 0.6:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
    else:
        a, b = rng.randint(10, 99), rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 10))
        if rng.random() < 0.4:
            a, b = b, a
    return product_of(rng, a, b), f"{a} x {b} = {a * b}."


def product_of(rng: Random, a: object, b: object) -> str:
    """A question for the product of two numbers."""
    if rng.random() < 0.4:
        return fill(rng.choice(_DATA["multiplication"]), rng, {"a": a, "b": b})
    value = "{a} [x|*|×|times|times|multiplied by|X] {b}|{a}[x|*|×]{b}|the product of {a} and {b}"
    return phrasings.asking(rng, fill(f"[{value}]", rng, {"a": a, "b": b}))


def quotient_of(rng: Random, a: object, b: object) -> str:
    """A question for the quotient of two numbers."""
    if rng.random() < 0.4:
        return fill(rng.choice(_DATA["division"]), rng, {"a": a, "b": b})
    value = "{a} [/|÷|:|divided by|divided by|over] {b}|{a}[/|÷]{b}|the quotient of {a} and {b}"
    return phrasings.asking(rng, fill(f"[{value}]", rng, {"a": a, "b": b}))


def square(rng: Random) -> Exchange:
    n = rng.randint(1, 12)
    return fill("What is [{n} squared|the square of {n}]?", rng, {"n": n}), f"{n} x {n} = {n * n}."


def mixed(rng: Random) -> Exchange:
    """A sum or a difference with a product in it, which is computed first."""
    while True:
        a, b, c = rng.randint(0, 99), rng.randint(2, 9), rng.randint(2, 9)
        product, sign, product_first = b * c, rng.choice("++-"), rng.random() < 0.4
        left, right = (product, a) if product_first else (a, product)
        if not held_out(a, product) and (sign == "+" or left >= right):
            break
    result = left + right if sign == "+" else left - right
    times = rng.choice(("x", "*", "times"))
    inner = f"{b} {times} {c}"
    text = f"{inner} {sign} {a}" if product_first else f"{a} {sign} {inner}"
    if times == "times":
        text = text.replace("+", "plus").replace("-", "minus")
    return phrasings.asking(rng, text), f"{b} x {c} = {product}, and {left} {sign} {right} = {result}."


def legs(rng: Random) -> Exchange:
    """How many legs several animals have."""
    n, (animal, each) = rng.randint(2, 12), rng.choice(list(_DATA["legs"].items()))
    count = in_words(n) if rng.random() < 0.5 else str(n)
    return f"How many legs do {count} {animal}s have?", f"{n} x {each} = {n * each}."


def division(rng: Random) -> Exchange:
    b, quotient = rng.randint(1, 12), rng.randint(0, 12)
    a = b * quotient
    return quotient_of(rng, a, b), f"{a} / {b} = {quotient}."


def double_or_half(rng: Random) -> Exchange:
    n = rng.randint(1, 99)
    if rng.random() < 0.5:
        return fill("What is [double {n}|twice {n}|two times {n}|{n} doubled]?", rng, {"n": n}), f"2 x {n} = {2 * n}."
    return fill("What is [half|one half] of {n}?", rng, {"n": 2 * n}), (f"{2 * n} / 2 = {n}.")


def word_problem(rng: Random) -> Exchange:
    """A sum or a difference told as a small story."""
    digits = rng.choices((1, 2, 3), (3, 6, 2))[0]
    a, b = a_pair(rng, digits)
    gain = rng.random() < 0.5
    if not gain:
        a, b = max(a, b), min(a, b)
    known = rng.random() < 0.4
    names = list(rng.sample(NAMES, 2)) if known else [any_name(rng), any_name(rng)]
    if names[0] == names[1]:
        names[1] = "the teacher"
    things = rng.choice(EVAL_THINGS if known else THINGS)
    if rng.random() < 0.4:
        template = rng.choice(GAIN if gain else LOSS)
    else:
        template = rng.choice(_DATA["gain"] if gain else _DATA["loss"])
    question = fill(template, rng, {"a": a, "b": b, "name": names[0], "other": names[1], "things": things})
    return question, f"{a} + {b} = {a + b}." if gain else f"{a} - {b} = {a - b}."


def two_steps(rng: Random) -> Exchange:
    """A word problem of two steps."""
    while True:
        a, b, c = a_number(rng, 2), a_number(rng, rng.choice((1, 1, 2))), a_number(rng, rng.choice((1, 1, 2)))
        first, second = rng.choice("+-"), rng.choice("+-")
        middle = a + b if first == "+" else a - b
        result = middle + c if second == "+" else middle - c
        if min(middle, result) >= 0 and not held_out(a, b) and not held_out(middle, c) and not held_out(a, c):
            break
    slots = {"name": any_name(rng), "things": rng.choice(THINGS), "a": a, "b": b, "c": c}
    verb = {"+": "[gets|buys|finds]", "-": "[gives away|loses|sells]"}
    template = f"{{name}} has {{a}} {{things}}, {verb[first]} {{b}} and then {verb[second]} {{c}}. "
    if rng.random() < 0.5:
        template = f"{{name}} has {{a}} {{things}}. {{name}} {verb[first]} {{b}} and {verb[second]} {{c}}. "
    template += "How many {things} does {name} have[ now| left| in the end|]?"
    return fill(template, rng, slots), f"{a} {first} {b} = {middle}, and {middle} {second} {c} = {result}."


def prime(rng: Random) -> Exchange:
    """Whether a number up to 120 is prime, with a factor where it is not."""
    n = rng.randint(2, 120)
    factor = next((d for d in range(2, n) if n % d == 0), None)
    question = fill("Is {n} [a prime number|prime|a prime]?", rng, {"n": n})
    if factor is None:
        return question, f"Yes, {n} is a prime number."
    return question, f"No, {n} is {factor} x {n // factor}."


def groups(rng: Random) -> Exchange:
    """Multiplication and division told as small stories."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    slots = {"a": a, "b": b, "c": a * b, "name": any_name(rng), "things": rng.choice(THINGS)}
    if rng.random() < 0.5:
        return fill(rng.choice(_DATA["product"]), rng, slots), f"{a} x {b} = {a * b}."
    return fill(rng.choice(_DATA["quotient"]), rng, slots), f"{a * b} / {a} = {b}."


def compared(rng: Random) -> Exchange:
    """Which number is greater, whether one is, and order."""
    digits = rng.choice((1, 2, 2, 3, 3, 4))
    a, b = a_number(rng, digits), a_number(rng, digits if rng.random() < 0.7 else rng.choice((1, 2, 3)))
    high, low = max(a, b), min(a, b)
    roll = rng.random()
    if a == b:
        return f"Which is greater, {a} or {b}?", "They are equal."
    if roll < 0.35:
        return fill(
            "[Which is|Which number is|What is] [greater|bigger|larger|more], {a} or {b}?", rng, {"a": a, "b": b}
        ), (f"{high} is greater than {low}.")
    if roll < 0.55:
        return fill("[Which is|Which number is|What is] [smaller|less], {a} or {b}?", rng, {"a": a, "b": b}), (
            f"{low} is smaller than {high}."
        )
    if roll < 0.8:
        greater = rng.random() < 0.5
        word = rng.choice(("greater", "bigger", "larger") if greater else ("smaller", "less"))
        yes = (a > b) == greater
        relation = "greater" if a > b else "smaller"
        return f"Is {a} {word} than {b}?", f"{'Yes' if yes else 'No'}, {a} is {relation} than {b}."
    numbers = rng.sample(range(10 ** rng.choice((1, 2, 3))), rng.randint(3, 5))
    listed, down = ", ".join(map(str, numbers)), rng.random() < 0.3
    ordered = ", ".join(map(str, sorted(numbers, reverse=down)))
    if roll < 0.9:
        question = f"Sort these numbers from {'largest to smallest' if down else 'smallest to largest'}: {listed}."
        if not down and rng.random() < 0.5:
            question = fill("[Sort|Sort these numbers:|Order these numbers:|Put in order:] {l}[.|]", rng, {"l": listed})
        return question, f"{ordered}."
    largest = rng.random() < 0.5
    return f"Which is the {'largest' if largest else 'smallest'} of {listed}?", (
        f"{max(numbers) if largest else min(numbers)} is the {'largest' if largest else 'smallest'}."
    )


def sequence(rng: Random) -> Exchange:
    """Counting, and what comes next. Steps have one digit, so that no held-out sum is spelt out."""
    roll = rng.random()
    if roll < 0.35:
        start, count = rng.randint(0, 95), rng.randint(3, 10)
        down = rng.random() < 0.3
        numbers = range(start, start + count)
        listed = ", ".join(map(str, reversed(numbers) if down else numbers))
        first, last = (numbers[-1], start) if down else (start, numbers[-1])
        return fill(
            "[Count|Please count|Can you count] from {a} to {b}[.|?|]", rng, {"a": first, "b": last}
        ), f"{listed}."
    if roll < 0.5:
        n = rng.randint(1, 998)
        if rng.random() < 0.5:
            return fill(
                "[What comes after|What number comes after|Which number follows] {n}?", rng, {"n": n}
            ), f"{n + 1}."
        return fill(
            "[What comes before|What number comes before|Which number is just before] {n}?", rng, {"n": n}
        ), f"{n - 1}."
    step, start = rng.choice((1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9)), rng.randint(0, 60)
    numbers = range(start, start + 5 * step, step)
    if roll < 0.6:
        return f"Count by {step}s from {start}.", f"{', '.join(map(str, numbers))}."
    down = rng.random() < 0.25
    shown = list(reversed(numbers))[:4] if down else list(numbers)[:4]
    following = shown[-1] - step if down else shown[-1] + step
    listed = ", ".join(map(str, shown))
    question = fill("[What comes next|What is the next number|Continue]: {l}, ...?", rng, {"l": listed})
    return question, f"{following}. The numbers go {'down' if down else 'up'} by {step}."


def parity(rng: Random) -> Exchange:
    n = rng.randint(0, 999)
    even = n % 2 == 0
    asked_even = rng.random() < 0.5
    if rng.random() < 0.3:
        return f"Is {n} even or odd?", f"{n} is {'even' if even else 'odd'}."
    return f"Is {n} {'even' if asked_even else 'odd'}?", (
        f"{'Yes' if even == asked_even else 'No'}, {n} is {'even' if even else 'odd'}."
    )


def spelled(rng: Random) -> Exchange:
    """Numbers in words and in digits."""
    n = a_number(rng, rng.choice((1, 2, 3, 3, 4)))
    if rng.random() < 0.5:
        return fill("[Write {n} in words.|How do you write {n} in words?|Spell out the number {n}.]", rng, {"n": n}), (
            f"{in_words(n)}."
        )
    return fill("[Write {w} in digits.|Write {w} as a number.|What number is {w}?]", rng, {"w": in_words(n)}), f"{n}."


def clock(rng: Random) -> Exchange:
    hour, later = rng.randint(1, 12), rng.randint(1, 9)
    result = (hour + later - 1) % 12 + 1
    return fill(
        "It is {h} o'clock. What time will it be in {n} hour{s}?",
        rng,
        {"h": hour, "n": later, "s": "" if later == 1 else "s"},
    ), f"It will be {result} o'clock."


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (addition, 34),
    (subtraction, 38),
    (difference, 2),
    (missing, 3),
    (checked, 3),
    (three_terms, 4),
    (multiplication, 6),
    (division, 3),
    (double_or_half, 1.5),
    (square, 0.7),
    (mixed, 2),
    (legs, 0.5),
    (word_problem, 9),
    (signed, 3),
    (two_steps, 2.5),
    (prime, 1),
    (groups, 2),
    (compared, 4),
    (sequence, 4),
    (parity, 1.5),
    (spelled, 2),
    (clock, 0.7),
)
"""Every kind of exchange, with how often it comes."""
