"""How long a search may take."""

from __future__ import annotations

import pytest

from fxpipe.extensions.search import search
from fxpipe.extensions.search.problem import Problem
from tests.extensions.search.problems import UNEQUAL


def test_what_comes_before_the_search_is_a_part_of_its_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes on by 0.1 s whenever it is read, and by 20 s while bounds are made."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.1
        return now[0]

    def slow(problem: Problem) -> float:
        now[0] += 20
        return 1.0  # which nothing meets

    monkeypatch.setattr(search, "perf_counter", clock)
    monkeypatch.setattr(search, "best_bound", slow)
    search.search_schedule(UNEQUAL, 6, memory=3, seconds=30)
    assert 29 < now[0] < 31
