"""The passes, one a file: Plan → Plan, Schedule × Plan → Program, Program → Program."""

from __future__ import annotations

if __name__ != "fxpipe.passes":
    raise ImportError(f"import this package as fxpipe.passes, not as {__name__}")
