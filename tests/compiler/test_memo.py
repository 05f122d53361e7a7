"""Results are made once, and go together with what they were made of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.compiler.memo import Memo


class Made(list[str]):
    """What was made, in order."""

    def one(self, name: str) -> str:
        self.append(name)
        return name


def test_a_result_is_made_once_for_each_key() -> None:
    memo, made = Memo(), Made()
    for key in (1, 2, 1, 2):
        assert memo("square", lambda key=key: key, lambda key=key: made.one(f"{key}²")) == f"{key}²"  # type: ignore[misc]
    assert made == ["1²", "2²"]
    assert memo.find("square", 1) == "1²" and memo.find("square", 3) is None
    assert memo.find("cube", 1) is None


def test_a_result_has_the_key_that_holds_once_it_is_made() -> None:
    memo, reads = Memo(), Made()
    assert memo("graph", lambda: tuple(reads), lambda: reads.one("scale")) == "scale"
    assert memo.find("graph", ()) is None
    assert memo.find("graph", ("scale",)) == "scale"


def test_of_several_results_of_a_key_the_first_that_fits_is_taken() -> None:
    memo, made = Memo(), Made()
    for size in (4, 8, 6, 3):
        memo("graph", lambda: "", lambda size=size: size, lambda most, size=size: most >= size)  # type: ignore[misc]
    assert memo.values("graph") == [4, 8]
    assert memo.find("graph", "", lambda most: most > 4) == 8
    assert not made


def test_what_fails_is_no_result() -> None:
    memo = Memo()
    with pytest.raises(ZeroDivisionError):
        memo("outer", lambda: 1, lambda: memo("inner", lambda: 1, lambda: 1 // 0))
    assert memo.keys("outer") == memo.keys("inner") == []
    memo("part", lambda: 1, lambda: "of nothing")  # not of the one that failed
    memo.anew("call", lambda: 1, lambda: "call")
    memo.anew("call", lambda: 2, lambda: "call")
    memo.keep("call", 1)
    assert memo.keys("part") == []


def test_a_new_result_takes_the_place_of_the_old_ones() -> None:
    memo = Memo()
    memo.anew("call", lambda: 1, lambda: "old")
    memo.anew("call", lambda: 2, lambda: "other")
    assert memo.anew("call", lambda: 1, lambda: "new") == "new"
    assert memo.values("call") == ["other", "new"]  # the last one was used last
    memo.replace("new", "newer")
    assert memo.find("call", 1) == "newer"
    memo.forget("call")
    assert memo.values("call") == []


def test_another_memo_can_take_results_over() -> None:
    memo, other = Memo(), Memo()
    memo("trace", lambda: 1, lambda: "traced")
    memo("plan", lambda: 1, lambda: "planned")
    other.share(memo, "trace")
    assert other.values("trace") == ["traced"] and other.values("plan") == []


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=30),
    st.lists(st.sets(st.integers(0, 3)), min_size=4, max_size=4),
    st.lists(st.sets(st.integers(0, 3)), min_size=8, max_size=8),
    st.integers(1, 5),
)
def test_those_used_last_are_kept_with_all_that_they_were_made_of(
    calls: list[tuple[int, int]], graphs: list[set[int]], plans: list[set[int]], most: int
) -> None:
    """Calls are made of plans, plans of graphs, graphs of nothing; any may be found in between."""
    memo, used = Memo(), list[int]()

    def graph(number: int) -> Any:
        return memo("graph", lambda: number, lambda: f"graph {number}")

    def plan(number: int) -> Any:
        return memo("plan", lambda: number, lambda: [*map(graph, graphs[number])])

    for call, alone in calls:
        memo("call", lambda call=call: call, lambda call=call: [*map(plan, plans[call])])  # type: ignore[misc]
        memo.find("call", call)
        plan(alone)  # of no call
        used = [*(each for each in used if each != call), call]
        before = {kind: {*memo.keys(kind)} for kind in ("plan", "graph")}
        many = len(used) > most
        memo.keep("call", most)
        used = used[-most:]
        assert memo.keys("call") == used
        needed = {number for each in used for number in plans[each]}
        below = {number for each in needed for number in graphs[each]}
        assert {*memo.keys("plan")} == (needed if many else before["plan"])
        assert {*memo.keys("graph")} == (below if many else before["graph"])
