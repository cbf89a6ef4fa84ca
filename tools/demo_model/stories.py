"""Short stories: a hero, a place and a plot, and questions about what was told."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo_model.arithmetic import Exchange
from demo_model.facts import CAPITALS
from demo_model.lexicon import (
    ANIMALS,
    DRINKS,
    FOODS,
    LOOKS,
    PLACES,
    THINGS,
    TIMES,
    TRAITS,
    TREASURES,
    Place,
    Pronouns,
    creature,
    made_up,
    name_and_pronouns,
)
from demo_model.plots import PLOTS, SKILLS, Plot
from demo_model.template import capitalised, fill, plural, with_article

NAMED_PLACES = (
    {
        "mark": "the old tower",
        "nook": "under a wooden bench",
        "danger": "a high wall",
        "sound": "the wind in the chimneys",
    },
    {
        "mark": "the great statue",
        "nook": "behind a heap of stones",
        "danger": "a deep ditch",
        "sound": "a song far away",
    },
    {
        "mark": "the round hill",
        "nook": "under a big leaf",
        "danger": "a broken bridge",
        "sound": "the wind over the roofs",
    },
)
"""What there is in places of which only the name is known."""

OPENINGS = (
    "[Once upon a time|Long ago|Once|Many years ago], {a:trait} {kind} [named|called] {name} lived {at}.",
    "[Once upon a time|Long ago], {at}, there lived {a:trait} {kind} [named|called] {name}.",
    "There [once was|was once] {a:trait} {kind} [named|called] {name}, who lived {at}.",
    "{At} lived {a:trait} {kind} [named|called] {name}.",
    "This is the story of {name}, {a:trait} {kind} who lived {at}.",
    "{A:trait} {kind} [named|called] {name} had {his} home {at}.",
    "Nobody {there} was quite like {name}, {a:trait} {kind}.",
    "If you had been {there} in those days, you would have met {a:trait} {kind} [named|called] {name}.",
    "Not so long ago, {a:trait} {kind} [named|called] {name} lived {at}.",
    "[Listen! There was|I will tell you about] {a:trait} {kind} [named|called] {name}, who lived {at}.",
    "[Far away|In another time], {at}, {a:trait} {kind} [named|called] {name} [had a small house|had made a home].",
)
LIKES = "{He} [loved|liked] {fond} [more than anything|very much|and everybody knew it]."
MORE = (
    "{Name} was {look}, but {his} [heart was big|dreams were big].",
    "Everyone {there} knew {him}.",
    LIKES,
    "{He} liked to sit [beside|near] {mark} and [think|dream|watch the world go by].",
    "[In the evening|At night] {he} listened to {sound}, and [nothing sounded better to {him}|then {he} slept well].",
    "{He} had [a crooked little house|a house with a round door], [a kettle|two cups] and [a view of {mark}|a garden].",
    "On most days, [nothing much happened|one day was like another] {there}.",
    "Those who knew {him} said that {he} [smelt of {food}|could not sit still|never forgot a face].",
    "{His} [pockets|shelves] were full of [string and stones|little things {he} had found].",
)
ENDINGS = (
    "The end.",
    "And they lived happily ever after.",
    "And if you are ever {there}, you may [meet them|hear their laughter].",
    "And that is how it was.",
    "[That night|When the stars came out], all was well {there}.",
    "Ask {name}, if you do not believe it.",
    "{Name} [still tells|often told] this story, and [it gets a little longer every time|not a word of it is made up].",
    "[Nobody|No one] {there} has forgotten it.",
    "",
    "",
)
MORALS = (
    "[The moral of the story|The moral|And the moral]: {moral}",
    "{Name} had learned [something|a lesson]: {moral}",
    "[From this we see|So remember]: {moral}",
    "{Name} never forgot it: {moral}",
)
STYLES = 16
"""Ways to tell a plot; what a hero is, or the words of the request, often decide which is taken."""


@dataclass(frozen=True)
class Story:
    """A story as told, and what it is about."""

    text: str
    slots: dict[str, str]
    plot: Plot


def tell(
    rng: Random,
    *,
    kind: str = "",
    name: str = "",
    trait: str = "",
    other: str = "",
    fond: str = "",
    skill: str = "",
    treasure: str = "",
    place: Place | None = None,
    plot: Plot | None = None,
    moral: bool | None = None,
    request: str = "",
) -> Story:
    """A story; what is not asked for is chosen at random.

    What a hero is, or else the words of the request, often decide what happens and how it is told, so that the
    likeliest stories differ from one request to the next.

    Args:
        request: What the user wrote, where it says nothing about the story.
        kind: What the hero is ("fox"); ``other``: what the friend is.
        moral: Whether it ends with the moral, told as such.
    """
    usual = Random(f"{kind} {trait}{request}") if kind or request else rng
    if plot is None:
        fitting = [p for p in PLOTS if not p.kind or p.kind == kind]
        plot = (usual if rng.random() < 0.6 else rng).choice([p for p in fitting if trait in p.traits] or fitting)
    place = place or (usual if rng.random() < 0.5 else rng).choice(PLACES)
    kind = kind or plot.kind or _other_kind(usual if rng.random() < 0.6 else rng, "")
    hero_name, hero = name_and_pronouns(rng, kind)
    if rng.random() < 0.5:
        hero_name, hero = name_and_pronouns(Random(kind), kind, strange=0)
    hero_name = name or hero_name
    fkind = other or _other_kind(rng, kind)
    friend_name, friend = name_and_pronouns(rng, fkind)
    while friend_name == hero_name:
        friend_name, friend = name_and_pronouns(rng, fkind)
    treasure, food = treasure or rng.choice(TREASURES), rng.choice(FOODS)
    slots = {
        "kind": kind,
        "name": hero_name,
        "trait": trait or rng.choice(plot.traits if rng.random() < 0.8 else [*TRAITS, *LOOKS]),
        "look": rng.choice(LOOKS[:5]),
        "fkind": fkind,
        "friend": friend_name,
        "at": place.at,
        "there": place.there,
        "place": place.name,
        "mark": place.mark,
        "nook": place.nook,
        "danger": place.danger,
        "sound": place.sound,
        "treasure": treasure,
        "item": treasure.partition(" ")[2],
        "food": food,
        "fond": fond or food,
        "time": rng.choice(TIMES),
        "skill": skill or rng.choice(SKILLS),
        "moral": plot.moral,
        **_pronouns("", hero),
        **_pronouns("f", friend),
    }
    style = usual.randrange(STYLES)
    style_rng = Random(f"{style} {plot.themes[0]}") if rng.random() < 0.65 else rng
    parts = [style_rng.choice(OPENINGS)]
    if fond:
        parts.append(LIKES)
    elif style_rng.random() < 0.5:
        parts.append(style_rng.choice(MORE))
    parts += plot.beats
    if moral or (moral is None and style_rng.random() < 0.35):
        parts.append(style_rng.choice(MORALS))
    else:
        parts.append(style_rng.choice(ENDINGS))
    text = " ".join(filter(None, (fill(part, style_rng, slots) for part in parts)))
    return Story(text, slots, plot)


def elsewhere(rng: Random) -> Place:
    """A place known by its name only: a city, a planet, a country that does not exist."""
    roll = rng.random()
    if roll < 0.45:
        name = rng.choice(CAPITALS)[1]
    elif roll < 0.6:
        name = rng.choice(("Mars", "Venus", "Jupiter", "Saturn"))
    else:
        name = made_up(rng).capitalize()
    on = "on" if 0.45 <= roll < 0.6 else "in"
    return Place(at=f"{on} {name}", there=f"{on} {name}", name=name, **rng.choice(NAMED_PLACES))


def _other_kind(rng: Random, kind: str) -> str:
    """A creature that differs from the hero, and is none of those that plots bring in themselves."""
    other = creature(rng)
    while other in (kind, "wolf", "giant", "fairy"):
        other = creature(rng)
    return other


def _pronouns(prefix: str, words: Pronouns) -> dict[str, str]:
    return {prefix + key: word for key, word in zip(("he", "him", "his", "himself"), words, strict=True)}


REQUESTS = (
    "[Tell|tell] me a [short |little |nice |new |bedtime |fairy |]story[.|!|, please.|]",
    "[Can|Could|Will] you tell me a story?",
    "[Write|Make up|Invent] a [short |little |]story[.|]",
    "I [want|would like|'d like] [to hear |]a story[.|, please.]",
    "[A story, please.|Story time!|story]",
    "Do you know a [good |nice |]story?",
)
ABOUT = (
    "[Tell|tell] me a [short |little |nice |funny |bedtime |]story about {s}[.|!|, please.|]",
    "[Write|Make up|Invent] a [short |little |]story about {s}[.|]",
    "[Can|Could] you tell me a [short |]story about {s}?",
    "I [want|would like] a story about {s}[.|, please.]",
    "[A story|Story] about {s}[, please.|]",
)


def asked(rng: Random) -> tuple[str, Story]:
    """A request and the story that fits it."""
    roll = rng.random()
    if roll < 0.17:
        request = fill(rng.choice(REQUESTS), rng)
        return request, tell(rng, request=request.lower().rstrip(".!?"))
    if roll < 0.21:
        request = "[Tell me a story with a moral|Tell me a fable|Write a fable|A story with a moral][.|]"
        return fill(request, rng), tell(rng, moral=True)
    if roll < 0.31:
        plot = rng.choice(PLOTS)
        return _about(rng, rng.choice(plot.themes)), tell(rng, plot=plot)
    kind = _other_kind(rng, "")
    trait = rng.choice(TRAITS) if rng.random() < 0.35 else ""
    subject = with_article(f"{trait} {kind}".strip())
    if roll < 0.42:
        place = rng.choice(PLACES) if rng.random() < 0.5 else elsewhere(rng)
        if roll < 0.37:
            return _about(rng, fill("{s} [who lives |]{at}", rng, {"s": subject, "at": place.at})), tell(
                rng, kind=kind, trait=trait, place=place
            )
        request = "[Tell me a story that happens|A story set|Write a story set|Tell me a story set] {at}[.|]"
        return fill(request, rng, {"at": place.at}), tell(rng, place=place)
    if roll < 0.55:
        return _who(rng, kind, trait, subject)
    if roll < 0.74:
        return _about(rng, subject), tell(rng, kind=kind, trait=trait)
    name, _ = name_and_pronouns(rng, kind, strange=0.2)
    if roll < 0.84:
        subject = fill("{s} [named|called] {n}", rng, {"s": subject, "n": name})
        return _about(rng, subject), tell(rng, kind=kind, trait=trait, name=name)
    if roll < 0.87:
        return _about(rng, f"{name} the {kind}"), tell(rng, kind=kind, name=name)
    if roll < 0.9:
        return _about(rng, fill("my {k}[,|] {n}", rng, {"k": kind, "n": name})), tell(rng, kind=kind, name=name)
    if roll < 0.91:
        return _about(rng, name), tell(rng, name=name, request=name)
    if roll < 0.93:
        return _about(rng, f"two {plural(f'{trait} {kind}'.strip())}"), tell(rng, kind=kind, trait=trait, other=kind)
    other = _other_kind(rng, kind)
    return _about(rng, f"{subject} and {with_article(other)}"), tell(rng, kind=kind, trait=trait, other=other)


def _who(rng: Random, kind: str, trait: str, subject: str) -> tuple[str, Story]:
    """A story asked for by what its hero does or likes."""
    skill, treasure = rng.choice(SKILLS), rng.choice(TREASURES)
    if rng.random() < 0.3:
        fond = rng.choice(rng.choice((FOODS, DRINKS, THINGS, [plural(word) for word in ANIMALS[:20]], [made_up(rng)])))
        clause = fill("who [likes|loves|is fond of] {f}", rng, {"f": fond})
        return _about(rng, f"{subject} {clause}"), tell(rng, kind=kind, trait=trait, fond=fond)
    plot = rng.choice([p for p in PLOTS if not p.kind])
    story = tell(rng, kind=kind, trait=trait, plot=plot, skill=skill, treasure=treasure)
    return _about(rng, f"{subject} {fill(rng.choice(plot.who), rng, story.slots)}"), story


def _about(rng: Random, subject: str) -> str:
    return fill(rng.choice(ABOUT), rng, {"s": subject})


def question(rng: Random, story: Story) -> Exchange:
    """A question about a story, and its answer."""
    s = story.slots
    hero = f"{s['name']} the {s['kind']}"
    choices = [
        ("[Who is the story about|Who was the hero|What was the name of the {kind}]?", f"The hero is {hero}."),
        ("[Where did {name} live|Where does the story happen]?", f"{s['name']} lived {s['at']}."),
        ("What [is|was] {name}?", f"{s['name']} is {with_article(s['kind'])}."),
        ("[What is the moral|What do we learn from it|What is the lesson]?", f"{s['moral']}"),
        (
            "[Did you like it|Is it a true story]?",
            "I made it up myself, so it is true only in the story. I like the ending.",
        ),
    ]
    if s["friend"] in story.text:
        choices.append(("Who [is|was] {friend}?", f"{s['friend']} is {with_article(s['fkind'])}."))
        choices.append(("Who was with {name}?", f"{s['name']} had {s['friend']} the {s['fkind']}."))
    if s["treasure"] in story.text:
        choices.append(("[What thing was important|Which object is in the story]?", f"{capitalised(s['treasure'])}."))
    template, answer = rng.choice(choices)
    return fill(template, rng, s), answer
