"""Dialogues between two creatures, poems, jokes and riddles (``data/dialogues.toml``)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo_model.arithmetic import Exchange
from demo_model.lexicon import FOODS, PLACES, TREASURES, creature, name_and_pronouns
from demo_model.template import capitalised, fill, plural, read_data, with_article

_DATA = read_data("dialogues")
SCRIPTS, POEMS, HAIKU, JOKES, RIDDLES = (_DATA[key] for key in ("scripts", "poems", "haiku", "jokes", "riddles"))


def dialogue(rng: Random) -> Exchange:
    """A dialogue between two creatures about something."""
    first = creature(rng)
    second = creature(rng)
    while second == first:
        second = creature(rng)
    topic = (rng if rng.random() < 0.5 else Random(f"{first} {second}")).choice(sorted(SCRIPTS))
    one, two = capitalised(first), capitalised(second)
    named = rng.random() < 0.2
    if named:
        one, two = name_and_pronouns(rng)[0], name_and_pronouns(rng)[0]
        if one == two:
            two = "Robin"
    place, treasure = rng.choice(PLACES), rng.choice(TREASURES)
    slots = {
        "one": one,
        "two": two,
        "food": rng.choice(FOODS),
        "treasure": treasure,
        "item": treasure.partition(" ")[2],
        "mark": place.mark,
        "nook": place.nook,
        "sound": place.sound,
    }
    lines = [f"{(one, two)[i % 2]}: {fill(line, rng, slots)}" for i, line in enumerate(SCRIPTS[topic])]
    speakers = f"{one} and {two}" if named else f"{with_article(first)} and {with_article(second)}"
    if named and rng.random() < 0.5:
        speakers = f"two {rng.choice(('friends', 'friends', 'children', 'neighbours', 'people', plural(first)))}"
    about = f" about {topic}" if rng.random() < 0.5 else ""
    request = fill(
        "[[Write|Make up|Write me|Give me|Invent] a [short |little |funny |]dialogue between {s}|"
        "[Write a|A|Make up a] [conversation|dialogue] between {s}|Let {s} talk]{t}[.|]",
        rng,
        {"s": speakers, "t": about},
    )
    return request, "\n".join(lines)


def poem(rng: Random) -> Exchange:
    topic = rng.choice(sorted(POEMS))
    text = fill(POEMS[topic], rng)
    if rng.random() < 0.4:
        subject = creature(rng)
        topic, text = with_article(subject), fill(_DATA["any_poem"], rng, {"x": subject})
    if topic in POEMS and rng.random() < 0.3:
        return fill("[Write a poem|Write me a poem|Tell me a poem|A poem, please|Do you know a poem][.|]", rng), text
    return fill(
        "[Write|Make|Write me|Tell me|Can you write] a [short |little |]poem about {t}[.|]", rng, {"t": topic}
    ), text


def haiku(rng: Random) -> Exchange:
    request = "[Write a haiku.|Write me a haiku.|A haiku, please.|Tell me a haiku.|haiku|Can you write a haiku?]"
    return fill(request, rng), ",\n".join(rng.choice(lines) for lines in HAIKU) + "."


def joke(rng: Random) -> Exchange:
    request = "[Tell me a joke[.|]|Do you know a joke?|A joke, please.|Make me laugh.|Another joke, please.|joke]"
    request = fill(request, rng)
    setup, punch = _usually(rng, request).choice(JOKES)
    return request, f"{setup} {punch}"


def riddle(rng: Random) -> Exchange:
    """A riddle asked by the user, or one that the model is asked for."""
    if rng.random() < 0.6:
        question, answer = rng.choice(RIDDLES)
        return question, answer
    request = fill("[Tell me a riddle.|Give me a riddle.|Do you know a riddle?|A riddle, please.]", rng)
    return request, riddle_answer(_usually(rng, request))


def riddle_answer(rng: Random) -> str:
    """A riddle with its answer."""
    question, answer = rng.choice(RIDDLES)
    return f"{question} The answer is: {answer[0].lower()}{answer[1:]}"


def _usually(rng: Random, request: str) -> Random:
    """Makes a choice that mostly depends on the request alone, so that the likeliest answers to two requests differ."""
    return Random(request.lower().rstrip(".?!")) if rng.random() < 0.6 else rng


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (dialogue, 5),
    (poem, 1.2),
    (haiku, 0.4),
    (joke, 1.2),
    (riddle, 1),
)
"""Every kind of exchange, with how often it comes."""
