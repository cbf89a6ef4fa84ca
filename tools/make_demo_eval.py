"""Write the demo model's evaluation problems as a file for ``bitnet eval``; the committed one has 150 of each category.

uv run tools/make_demo_eval.py                      # tools/demo_model/evaluation.jsonl
uv run tools/make_demo_eval.py -n 1500 -s 7 -o FILE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo_model.problems import CATEGORIES, REFUSALS, draw_problems
from demo_model.talk_problems import talk_problems

FILE = Path(__file__).resolve().parent / "demo_model/evaluation.jsonl"
PROBLEMS, SEED = 150, 20
TALK_SHARE = 8
"""Small talk has many kinds: one problem of each for so many of a category of arithmetic."""


def lines(problems: int, seed: int) -> Iterator[str]:
    """The file's lines: each category's claim, then its problems; fewer where it has fewer."""
    for category in CATEGORIES:
        if category.claim is not None:
            yield json.dumps({"category": category.name, "claim": category.claim})
        for problem in draw_problems(category, min(problems, category.most()), seed):
            right: dict[str, Any] = {"number": problem.answer}
            if problem.answer is None:
                right = {"contains": REFUSALS, "lacks": "="}
            yield json.dumps({"category": category.name, "question": problem.question, **right}, ensure_ascii=False)
    for talk in talk_problems(-(-problems // TALK_SHARE), seed):
        yield json.dumps(talk, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=PROBLEMS, help="problems of each category")
    parser.add_argument("-s", type=int, default=SEED, help="seed of the draw")
    parser.add_argument("-o", type=Path, default=FILE, help="the file")
    given = parser.parse_args()
    given.o.write_text("".join(f"{line}\n" for line in lines(given.n, given.s)), encoding="utf-8")


if __name__ == "__main__":
    main()
