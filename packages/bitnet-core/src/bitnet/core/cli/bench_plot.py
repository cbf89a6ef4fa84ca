"""The figure of ``bitnet bench --plot``: measured speeds, and the speeds that the machine's limits would allow."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bitnet.core.errors import InvalidInputError
from bitnet.core.support.files import replacing
from bitnet.core.support.units import scaled, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bitnet.core.evaluation.bench import Measurement

FORMATS: dict[str, Literal["png", "svg"]] = {".png": "png", ".svg": "svg"}
INSTALL = 'pip install "bitnet-core[plot]"'
TITLES = {
    "prefill": ("Prefill", "#4878a8", "at the int8 peak measured in the same run"),
    "decode": ("Decode", "#e0873a", "at the read bandwidth, or the int8 peak, measured in the same run"),
}


def check_plot(path: Path) -> None:
    """Check that a figure can be written to ``path``, before anything is measured.

    Raises:
        InvalidInputError: The file's extension is unknown, its folder does not exist, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise InvalidInputError(
            f"--plot {path}: the file must end in {' or '.join(FORMATS)}, not in {path.suffix or 'nothing'!r}."
        )
    if not path.parent.is_dir():
        raise InvalidInputError(f"--plot {path}: the folder {path.parent} does not exist.")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise InvalidInputError(f"--plot needs matplotlib ({error}).", hint=f"Install it: {INSTALL}") from error


def write_plot(path: Path, title: str, subtitle: str, results: Sequence[Measurement]) -> None:
    """Write the figure atomically: a row for each test, with its speed and the limit.

    Args:
        path: Checked by :func:`check_plot`.
        title: The model.
        subtitle: The device.
        results: At least one.

    Raises:
        BitNetError: The file cannot be written.
    """
    import matplotlib
    import matplotlib.style
    from matplotlib.figure import Figure

    panels = [rows for kind in TITLES if (rows := [r for r in results if r.test.kind == kind])]
    heights = [len(rows) + 1.2 for rows in panels]
    # Ignore the user's style, and show model names verbatim: a "$" does not start a formula.
    with matplotlib.style.context("default"), matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(9, 0.8 + 0.62 * sum(heights)), dpi=150, layout="constrained")
        figure.suptitle(title, fontsize=13, fontweight="bold")
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for axes, rows in zip(grid[:, 0], panels, strict=True):
            draw(axes, rows)
        figure.supxlabel(subtitle, fontsize=9, color="0.35")
        with replacing(path) as file:
            figure.savefig(file, format=FORMATS[path.suffix.lower()])


def draw(axes: Axes, rows: Sequence[Measurement]) -> None:
    """Draw a bar for each test, a mark at the speed that the limit would allow, and the numbers above."""
    title, color, limit = TITLES[rows[0].test.kind]
    positions = range(len(rows))
    means = [row.mean for row in rows]
    axes.barh(positions, means, 0.36, color=color, xerr=[r.deviation for r in rows], error_kw={"capsize": 3})
    roofs = [(y, row.roof) for y, row in zip(positions, rows, strict=True) if row.roof is not None and not row.in_cache]
    if roofs:
        at, values = zip(*roofs, strict=True)
        axes.vlines(values, [y - 0.22 for y in at], [y + 0.22 for y in at], color="0.15", linewidth=2.5, label=limit)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, borderaxespad=0.1)
    for y, row in zip(positions, rows, strict=True):
        axes.annotate(_text(row), (0, y - 0.25), (4, 0), textcoords="offset points", va="bottom", fontsize=9)
    axes.set_yticks(positions, [r.test.name + (f"\n-t {r.limits.threads}" if r.limits else "") for r in rows])
    axes.set_ylim(len(rows) - 0.6, -0.75)
    axes.set_xlim(0, 1.08 * max([r.mean + r.deviation for r in rows] + [value for _, value in roofs]))
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.10g}")
    axes.set_xlabel("tokens/s")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _text(row: Measurement) -> str:
    """``159.1 ± 2.0 tokens/s, 35.5% of the int8 peak, 448 GMAC/s``."""
    text = f"{row.mean:,.1f} ± {row.deviation:,.1f} tokens/s"
    if row.limits is None or row.fraction is None:
        return text
    if row.in_cache:
        return f"{text}, weights read from the caches, not memory"
    return f"{text}, {row.fraction:.1%} of {limit_of(row)}"


def limit_of(row: Measurement) -> str:
    """The limit that bounds this test, with its value: ``the int8 peak, 448 GMAC/s``."""
    if row.limits is None:
        return ""
    if row.bound == "int8":
        return f"the int8 peak, {scaled(row.limits.int8)}MAC/s"
    return f"the read bandwidth, {size(row.limits.read)}/s"
