"""Leave a model's own checks of values out of its trace: ``assert``, or ``if`` with a ``raise``.

before:  if labels.max() >= self.classes: raise ValueError(…)
traced:  nothing, where the same line runs in every step all the same
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from typing import Any

from torch.overrides import TorchFunctionMode

from fxpipe.torchtools import source

_ASKS = ("__bool__", "item", "__int__", "__float__", "__index__")


class ValueChecks(TorchFunctionMode):
    """Inside, record the numbers that such checks read, or answer them with recorded numbers.

    Attributes:
        open: whether it is recording or answering now.
        answers: file and line → the numbers, in their order.
    """

    def __init__(self, known: ValueChecks | None = None) -> None:
        """Nothing has run yet.

        Args:
            known: the recorded numbers to answer with; None to record.
        """
        super().__init__()
        self.open = True
        self.answers: dict[tuple[str, int], list[Any]] = {}
        self._answering = known is not None
        if known is not None:
            self.answers = {place: list(numbers) for place, numbers in known.answers.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asks = self.open and getattr(func, "__name__", "") in _ASKS
        place = _checked() if asks else None
        if place is None:
            return func(*args, **(kwargs or {}))
        if self._answering and self.answers.get(place):
            return self.answers[place].pop(0)
        made = func(*args, **(kwargs or {}))
        self.answers.setdefault(place, []).append(made)
        return made


def _checked() -> tuple[str, int] | None:
    """The user's line that runs now, if it is in a check."""
    frame = sys._getframe(2)
    while frame is not None and not source.is_users(frame.f_code.co_filename):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    return place if place[1] in _lines(place[0]) else None


@functools.lru_cache(maxsize=64)
def _lines(filename: str) -> frozenset[int]:
    """The lines of the checks in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return frozenset()
    tests = [
        node.test
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.Assert) and _raises(node)
    ]
    return frozenset(
        line for test in tests for line in range(test.lineno, (test.end_lineno or 0) + 1)
    )


def _raises(node: ast.If | ast.Assert) -> bool:
    if isinstance(node, ast.Assert):
        return True
    return not node.orelse and all(isinstance(each, ast.Raise) for each in node.body)
