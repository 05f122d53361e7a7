"""The library of schedules. Importing this package registers each of them by its name; some stand
in extensions, which are imported when they are first asked for.

The docstring of a schedule says what it does, names its paper, draws it, and gives its figures.

Symbols: p devices, m micro-batches a step, v stages a device; i is a micro-batch, d a device and s
a stage, all from 0. T_F and T_B are the times of a forward and a backward, T_I and T_W those of a
backward's two halves, the input gradient and the weight gradient. Stages are equal, and
communication and updates take no time.

Drawings: a row for each device, time to the right. ``F0`` is the forward of micro-batch 0, ``B0``
its backward, ``I0`` and ``W0`` the halves of that, and ``U`` the device's updates. ``-`` continues
the task before it, ``.`` is idle time. Small letters are tasks of the device's second stage.

Figures:

- Bubble: the share of the devices' time that is idle, from the step's first task to its last. A
  bubble given as a time is the idle time of one device.
- Kept: the most micro-batches that a stage keeps at once for their backwards. A micro-batch
  counts from its forward or, if it has one, its recompute until its weight gradient is done.
"""

from __future__ import annotations

if __name__ != "fxpipe.schedules":
    raise ImportError(f"import this package as fxpipe.schedules, not as {__name__}")

from fxpipe.ir.recipe import RECIPES, Recipe, find_recipe
from fxpipe.schedules.gpipe import gpipe, inference, looped_bfs, naive
from fxpipe.schedules.one_f_one_b import interleaved_one_f_one_b, one_f_one_b
from fxpipe.schedules.zero_bubble import zb_h1, zb_h2, zb_v

__all__ = [
    "gpipe",
    "inference",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "naive",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

_NAMES = {
    name.replace("-", "_").replace("1f1b", "one_f_one_b").replace("2bw", "two_bw"): name
    for name in RECIPES.known
}
_LATE = {word: name for word, name in _NAMES.items() if word not in __all__}
"""What this module calls the recipes of extensions → their names."""
__all__ += list(_LATE)


def __getattr__(name: str) -> Recipe:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find_recipe(_LATE[name])


def __dir__() -> list[str]:
    return sorted([*__all__, "library"])


def library() -> list[Recipe]:
    """All recipes of the library, but for those of extensions that are not there."""
    late = [RECIPES[name] for name in _LATE.values() if name in RECIPES]
    return [*(globals()[name] for name in __all__ if name not in _LATE), *late]
