"""Python's and NumPy's global random generators, the other ones, which all threads share."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_PYTHON, _NUMPY = "Python's random", "numpy.random"


def other_states() -> dict[str, bytes]:
    """Name of a generator → its state; without NumPy's if NumPy has not been imported."""
    states = {_PYTHON: pickle.dumps(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states[_NUMPY] = pickle.dumps(numpy.random.get_state(legacy=False))
    return states


def put_back_others(before: Mapping[str, bytes]) -> None:
    """Give Python's and NumPy's generators the states that ``other_states`` returned."""
    if _PYTHON in before:
        random.setstate(pickle.loads(before[_PYTHON]))
    if _NUMPY in before:
        sys.modules["numpy"].random.set_state(pickle.loads(before[_NUMPY]))


@contextmanager
def others_kept() -> Iterator[None]:
    """Restore the states of Python's and NumPy's generators after the block."""
    before = other_states()
    try:
        yield
    finally:
        put_back_others(before)
