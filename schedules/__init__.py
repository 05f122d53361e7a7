"""The library of schedules. Importing this package registers them by name."""

from __future__ import annotations

if __name__ != "fxpipe.schedules":
    raise ImportError(f"import this package as fxpipe.schedules, not as {__name__}")

from fxpipe.schedules.chimera import chimera
from fxpipe.schedules.controllable_memory import v_half, v_min
from fxpipe.schedules.cyclic import cdp_v1, cdp_v2
from fxpipe.schedules.dualpipe_v import dualpipe_v
from fxpipe.schedules.gpipe import gpipe, inference, looped_bfs, naive
from fxpipe.schedules.one_f_one_b import interleaved_one_f_one_b, one_f_one_b
from fxpipe.schedules.one_f_one_b_async import (
    one_f_one_b_async,
    pipedream,
    pipedream_vertical,
    two_bw,
)
from fxpipe.schedules.zero_bubble import zb_h1, zb_h2, zb_v

__all__ = [
    "cdp_v1",
    "cdp_v2",
    "chimera",
    "dualpipe_v",
    "gpipe",
    "inference",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "naive",
    "one_f_one_b",
    "one_f_one_b_async",
    "pipedream",
    "pipedream_vertical",
    "two_bw",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
