"""What happens in stories (``data/plots.toml``)."""

from __future__ import annotations

from dataclasses import dataclass

from demo_model.template import read_data


@dataclass(frozen=True)
class Plot:
    """A story's course.

    Attributes:
        themes: What a reader may ask for to get it ("friendship").
        who: The same, said of the hero ("who is lonely").
        traits: What the hero is like in it.
        beats: Templates of its sentences, in order, after the opening.
        moral: What it teaches.
        kind: What the hero must be, if that matters.
    """

    themes: list[str]
    who: list[str]
    traits: list[str]
    beats: list[str]
    moral: str
    kind: str = ""


_DATA = read_data("plots")
PLOTS = [Plot(**plot) for plot in _DATA["plots"]]
SKILLS: list[str] = _DATA["skills"]
"""What the hero of a story about learning wants to do."""
