"""What the scripts beside this file ask for: a person of the text, by the schema that pydantic writes by default."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from pydantic import BaseModel, Field

URL: Any = sys.argv[1]
QUESTION = "Who is Ada, 36, x and y?"
WEATHER = "How is it in Zürich?"
HUNT = "Go on a treasure hunt from clue 0."
INSTRUCTIONS = "\n".join(f"Rule {i} of the hunt has the number {random.random()}." for i in range(1450))
"""A text of more than 50,000 of the demo model's tokens."""
TURNS = [f"This is turn {i} of our talk." for i in range(20)]


class Person(BaseModel):
    """Somebody in the text."""

    name: str
    age: int = Field(ge=0, le=130, description="in years")
    tags: list[str] = []


def weather(city: str) -> str:
    """The weather of a city."""
    return f"27 degrees in {city}"


def follow(clue: int) -> str:
    """Follow one to the next."""
    return f"clue {clue + 1}"


def say(**found: Any) -> None:
    """Print what a client was answered."""
    print(json.dumps(found, default=lambda model: model.model_dump()))
