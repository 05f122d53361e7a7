"""The random generators that a process has besides PyTorch's: Python's and NumPy's global ones.

All threads share them.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_PYTHON, _NUMPY = "Python's random", "numpy.random"


def states() -> dict[str, bytes]:
    """Name of a generator → its state. NumPy's is left out where nobody has imported NumPy."""
    found = {_PYTHON: pickle.dumps(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found[_NUMPY] = pickle.dumps(numpy.random.get_state(legacy=False))
    return found


def put_back(before: Mapping[str, bytes]) -> None:
    """Give the generators these states, which ``states`` told."""
    if _PYTHON in before:
        random.setstate(pickle.loads(before[_PYTHON]))
    if _NUMPY in before:
        sys.modules["numpy"].random.set_state(pickle.loads(before[_NUMPY]))


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before after."""
    before = states()
    try:
        yield
    finally:
        put_back(before)


def seed(number: int) -> None:
    """Let them begin anew.

    Args:
        number: of at most 64 bits; the same gives the same draws.
    """
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([number >> 32, number & 0xFFFFFFFF])
