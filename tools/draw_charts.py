"""Draw docs/images/speed.svg, the chart of speed against peers, from the ratios in docs/measurements/peers.json.

    uv run tools/draw_charts.py

A bar is the median of a row's ratios (bitnet's tokens a second over the peer's) and the line across its end spans them.
docs/measurements/cpu.md and packages/bitnet-cuda/README.md say how each was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs/measurements/peers.json"
CHART = ROOT / "docs/images/speed.svg"

WIDTH, LEFT, RIGHT = 800, 330, 60  # pixels: the drawing, the labels' column, room for the last figure
TITLE = "How many times as fast as each peer, same model shape, same kind of machine"
ROW, HEAD = 30, 34  # pixels: a bar with its gap, a machine's heading
STYLE = """\
text { font: 14px system-ui, sans-serif; fill: #1f2430 }
.title { font-size: 17px; font-weight: 600 }
.machine { font-weight: 600 }
.label { text-anchor: end }
.quiet { fill: #5b6270; font-size: 13px }
.even { stroke: #8b93a3; stroke-dasharray: 4 4 }
.bar { fill: #8f9be6 }
.span { stroke: #1f2430; stroke-width: 1.5 }"""


class Row(TypedDict):
    """One comparison: on a machine, of one test, with one peer."""

    machine: str
    test: str
    peer: str
    ratios: list[float]


def draw(rows: list[Row]) -> str:
    """The chart as SVG text; rows of one machine stand together."""
    most = max(max(row["ratios"]) for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / most  # pixels for each multiple of the peer's speed
    parts, y = [], 60
    for machine, group in groupby(rows, key=lambda row: row["machine"]):
        parts.append(f'<text class="machine" x="20" y="{y + 20}">{escape(machine)}</text>')
        y += HEAD
        for row in group:
            median, middle = statistics.median(row["ratios"]), y + ROW / 2
            end = LEFT + median * scale
            label = f"{row['test']}, {row['peer']}"
            parts += [
                f'<text class="label" x="{LEFT - 10}" y="{middle + 5:g}">{escape(label)}</text>',
                f'<rect x="{LEFT}" y="{y + 5}" width="{median * scale:.1f}" height="{ROW - 10}" rx="3" class="bar"/>',
            ]
            low, high = LEFT + min(row["ratios"]) * scale, LEFT + max(row["ratios"]) * scale
            if low < high:
                parts.append(f'<path class="span" d="M{low:.1f} {middle:g}H{high:.1f}"/>')
            parts.append(f'<text x="{max(end, high) + 8:.1f}" y="{middle + 5:g}">{median:.2f} ×</text>')
            y += ROW
    even = LEFT + scale
    parts.insert(0, f'<path class="even" d="M{even:.1f} 56V{y}"/>')
    parts.append(f'<text class="quiet" x="{even:.1f}" y="{y + 18}" text-anchor="middle">as fast as the peer</text>')
    height = y + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>bitnet's speed over its peers', BitNet b1.58 2B4T's shape</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fbfbfd"/>',
            f'<text class="title" x="20" y="34">{TITLE}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    CHART.write_text(draw(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
