"""Questions for measurements over answers that training has not shaped: held-out problems, and requests for stories."""

from __future__ import annotations

from random import Random

from demo_model import stories
from demo_model.problems import CATEGORIES, draw_problems
from demo_model.talk_problems import talk_problems


def problems(count: int, seed: int) -> list[str]:
    """``count`` held-out problems of each category, and a quarter as many of each kind of small talk."""
    asked = [problem.question for category in CATEGORIES for problem in draw_problems(category, count, seed)]
    talk = (problem["messages"] for problem in talk_problems(max(1, count // 4), seed))
    return asked + [messages[0]["content"] for messages in talk if len(messages) == 1]


def story_requests(count: int, seed: int) -> list[str]:
    """Requests for stories; their heroes are drawn anew, their plots are those of training."""
    rng = Random(f"unseen stories {seed}")
    return [stories.asked(rng)[0] for _ in range(count)]
