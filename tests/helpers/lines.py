"""How much work something is, whatever else the machine does meanwhile: lines of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(call: Callable[[], object]) -> int:
    """How many lines it executes in this thread, each turn of a comprehension among them."""
    count = 0

    def each(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
