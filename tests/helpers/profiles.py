"""How hard hypothesis tries: ``quick`` by default, ``HYPOTHESIS_PROFILE=deep`` for a long run.

A pytest plugin, so that it is loaded before any test module.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick",
    max_examples=10,
    deadline=None,  # the first example of a test may wait for a trace
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("quick"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

DEEP = settings.get_current_profile_name() == "deep"
"""Whether the long run was asked for: tests of a grid then run all of it."""

LEVELS = 2 if DEEP else 1
"""The depth of U-Nets that stand for any model with skips."""

Case = TypeVar("Case")


def deep(*cases: Case) -> tuple[Case, ...]:
    """Cases of the long run alone: the others are of every kind that these are of."""
    return cases if DEEP else ()


def some(cases: Iterable[Case], each: int = 3) -> list[Case]:
    """Every third of many like cases, or of another number; in the long run all of them."""
    return list(cases)[:: 1 if DEEP else each]
