"""The chart of speed is the one that its data gives."""

from __future__ import annotations

import json
import statistics
from xml.etree import ElementTree

from draw_charts import CHART, DATA, draw


def test_the_chart_is_drawn_from_the_data() -> None:
    assert CHART.read_text(encoding="utf-8") == draw(json.loads(DATA.read_text(encoding="utf-8")))


def test_bars_are_as_long_as_the_medians() -> None:
    rows = json.loads(DATA.read_text(encoding="utf-8"))
    rows[0]["ratios"] = [1.0, 2.0, 8.0]
    bars = [
        float(element.attrib["width"])
        for element in ElementTree.fromstring(draw(rows))
        if element.tag.endswith("rect") and "x" in element.attrib
    ]
    medians = [statistics.median(row["ratios"]) for row in rows]
    assert len(bars) == len(rows)
    assert all(abs(bar / median - bars[0] / medians[0]) < 0.1 for bar, median in zip(bars, medians, strict=True))
