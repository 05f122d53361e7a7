"""The library of schedules, one a file. Importing this package registers them by name."""

from __future__ import annotations

if __name__ != "fxpipe.schedules":
    raise ImportError(f"import this package as fxpipe.schedules, not as {__name__}")

from fxpipe.schedules.gpipe import gpipe
from fxpipe.schedules.inference import inference
from fxpipe.schedules.one_f_one_b import one_f_one_b

__all__ = ["gpipe", "inference", "one_f_one_b"]
