"""Plots loss curves: for each way to train the mean over seeds, and the seeds' range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

POINTS = 40
"""The number of points of a line; each is the mean loss of equally many steps."""

Curves = Mapping[str, Sequence[Sequence[float]]]
"""Way to train → seed → the loss of every step."""

FIRST = {"color": "#b8bcc4", "linewidth": 4.0}
"""The way that the others stand beside: wide, so that one that equals it can be seen on it."""
OTHERS = ("#222222", "#c25b2a", "#3b6fb6")
DASHES = ((0, (4, 3)), "solid", "solid")
"""Dashes for one that may lie on another line: 1F1B on the loop."""


def draw(tasks: Mapping[str, Curves], path: Path) -> None:
    """Write a picture, in the format that the path's ending says.

    Args:
        tasks: title → the curves of everyone, all of the same number of steps.
        path: of the file.
    """
    matplotlib.rcParams["svg.hashsalt"] = path.stem  # the same names in the file every time
    matplotlib.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(5 * len(tasks), 3.6), layout="constrained")
    for axes, (title, curves) in zip(
        figure.subplots(1, len(tasks), squeeze=False)[0], tasks.items(), strict=True
    ):
        for number, (way, runs) in enumerate(curves.items()):
            losses = np.asarray(runs)
            window = max(losses.shape[1] // POINTS, 1)
            means = np.array(
                [np.convolve(run, np.ones(window) / window, "valid") for run in losses]
            )
            steps = np.arange(window, losses.shape[1] + 1)
            style = (
                {"color": OTHERS[number - 1], "linestyle": DASHES[number - 1], "linewidth": 1.2}
                if number
                else FIRST
            )
            axes.plot(steps, means.mean(0), label=way, **style)
            low, high = means.min(0), means.max(0)
            axes.fill_between(steps, low, high, color=style["color"], alpha=0.12, linewidth=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.set_ylabel(f"loss of {window} steps: mean and range over seeds", fontsize=8)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
