"""How long everyone's steps take: a bar to the median, a line from the first to the last decile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

import matplotlib
from matplotlib.figure import Figure

OURS, OTHERS, NONE = "#3b6fb6", "#b8bcc4", "#a33333"


def draw(cases: Mapping[str, Mapping[str, Sequence[float] | str]], ours: str, path: Path) -> None:
    """Write a picture, in the format that the path's ending says.

    Args:
        cases: title → contender → seconds of its steps, or a word on why there are none.
        ours: how the names of those begin that are shown in another colour.
        path: of the file.
    """
    matplotlib.rcParams["svg.hashsalt"] = path.stem  # the same names in the file every time
    matplotlib.rcParams["svg.fonttype"] = "none"
    rows = sum(len(contenders) + 2 for contenders in cases.values())
    figure = Figure(figsize=(9, 0.3 * rows), layout="constrained")
    heights = [len(contenders) + 2 for contenders in cases.values()]
    grid = figure.subplots(len(cases), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, contenders) in zip(grid, cases.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(len(contenders)), list(contenders), fontsize=9)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        for row, (name, seconds) in enumerate(contenders.items()):
            if isinstance(seconds, str):
                axes.text(0, row, f" {seconds}", va="center", fontsize=8, color=NONE)
                continue
            middle = 1e3 * median(seconds)
            deciles = quantiles(seconds, n=10, method="inclusive")
            low, high = 1e3 * deciles[0], 1e3 * deciles[-1]
            axes.barh(row, middle, color=OURS if name.startswith(ours) else OTHERS)
            axes.plot([low, high], [row, row], color="black", linewidth=1, marker="|")
            at = max(middle, high)
            axes.text(at, row, f"  {middle:.4g} ms", va="center", fontsize=8)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
    grid[-1].set_xlabel("milliseconds a step: median, first to last decile", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
