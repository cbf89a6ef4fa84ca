"""Everyday talk: other languages, signs without words, likes, news, wishes.

The phrases are in ``data/everyday.toml`` and ``data/feelings.toml``.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from demo_model.arithmetic import Exchange
from demo_model.letters import asked
from demo_model.lexicon import ANIMALS, any_name
from demo_model.smalltalk import THINGS
from demo_model.talk_problems import UNSEEN_TOPICS, is_unseen_talk
from demo_model.template import capitalised, fill, plural, read_data

_DATA = read_data("everyday")
LANGUAGES, FORMS, SIGNS, LIKES = (_DATA[key] for key in ("languages", "forms", "signs", "likes"))
FEELINGS = read_data("feelings")["kinds"]
_WEIGHTS = [kind["weight"] for kind in FEELINGS]


def _phrases(words: str) -> list[str]:
    return [word.replace(".", " ") for word in words.split() if word.replace(".", " ") not in UNSEEN_TOPICS]


TOPICS = _phrases(LIKES["topics"])
CHOICES = _phrases(LIKES["things"])


def foreign(rng: Random) -> Exchange:
    """A greeting, thanks, a goodbye or a sentence of another language."""
    language = rng.choice(LANGUAGES)
    slots = {"language": language["name"], "name": any_name(rng, strange=0.2), "friend": fill(FORMS["friend"], rng)}
    roll = rng.random()
    if roll < 0.35:
        return asked(rng, language["sentences"], slots), fill(FORMS["sentence_reply"], rng, slots)
    form = "hello" if roll < 0.7 else "thanks" if roll < 0.85 else "bye"
    word = rng.choice(language[form])
    while True:
        typed = word if rng.random() < 0.5 else capitalised(word)
        question = fill(rng.choice(FORMS[form]), rng, slots | {"x": typed})
        if not is_unseen_talk(question):
            break
    return question, fill(FORMS[f"{form}_reply"], rng, slots | {"x": word})


def signs(rng: Random) -> Exchange:
    """Punctuation, smileys, or keys hit at random."""
    while True:
        roll = rng.random()
        if roll < 0.45:
            alphabet = rng.choice(("?", "!", "?!", "?!.", ".", "?!", SIGNS["punctuation"], SIGNS["punctuation"]))
            text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 10)))
            text, reply = " ".join(text) if rng.random() < 0.1 else text, SIGNS["punctuation_reply"]
        elif roll < 0.65:
            text, reply = "".join(rng.sample(SIGNS["smileys"], rng.choice((1, 1, 1, 2)))), SIGNS["smiley_reply"]
            text = text * rng.choice((1, 1, 1, 2, 3)) if len(text) == 1 else text
        else:
            text, reply = " ".join(_keys(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))), SIGNS["keyboard_reply"]
        if not is_unseen_talk(text):
            return text, reply


def _keys(rng: Random) -> str:
    """What comes of keys that are hit without sense."""
    row = rng.choice(SIGNS["keyboard"])
    length = rng.randint(3, 9)
    roll = rng.random()
    if roll < 0.35:
        start = rng.randrange(len(row) - 3)
        return str(row[start : start + length])
    if roll < 0.5:
        return str(rng.choice(row) * length)
    if roll < 0.65:
        return "".join(rng.choice(row) for _ in range(rng.randint(2, 3))) * rng.randint(2, 3)
    return "".join(rng.choice(row) for _ in range(length))


def likes(rng: Random) -> Exchange:
    """What the model likes best, what is best, and which of two."""
    roll = rng.random()
    if roll < 0.3:
        this, that = rng.sample(CHOICES if rng.random() < 0.6 else [plural(a) for a in ANIMALS] + THINGS, 2)
        return asked(rng, LIKES["either"], {"this": this, "that": that}), LIKES["either_reply"]
    topic = rng.choice(TOPICS if rng.random() < 0.7 else THINGS)
    if topic in UNSEEN_TOPICS:
        return likes(rng)
    kind = "favourite" if roll < 0.65 and topic not in ("number", "colour", "animal", "food") else "best"
    return asked(rng, LIKES[kind], {"t": topic}), fill(LIKES[f"{kind}_reply"], rng, {"t": topic})


def feelings(rng: Random) -> Exchange:
    """News, wishes, and what the model cannot know."""
    kind = rng.choices(FEELINGS, _WEIGHTS)[0]
    if "exchanges" in kind:
        question, answer = rng.choice(kind["exchanges"])
        return asked(rng, [question], {}), fill(answer, rng)
    return asked(rng, kind["questions"], {}), fill(rng.choice(kind["answers"]), rng)


KINDS: tuple[tuple[Callable[[Random], Exchange], float], ...] = ((foreign, 3), (signs, 1.2), (likes, 3), (feelings, 7))
"""Every kind of exchange, with how often it comes."""
