"""A walk goes through rows as their waits allow, and tells what is stuck."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxpipe.ir.walk import Wait, Walked, walk


def rows_and_waits(draw: st.DrawFn) -> tuple[list[int], list[list[Wait]]]:
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    places = [(row, at) for row, length in enumerate(lengths) for at in range(length)]
    if not places:
        return lengths, [[] for _ in lengths]
    one = st.sampled_from(places)
    pairs = draw(st.lists(st.tuples(one, one), max_size=8))
    waits: list[list[Wait]] = [[] for _ in lengths]
    for (row, at), (other, on) in pairs:
        if row != other or at <= on:  # of its own row, a position comes after those before it
            waits[row].append((at, other, on))
    for each in waits:
        each.sort()
    return lengths, waits


CASES = st.composite(rows_and_waits)()


def far(lengths: list[int], waits: list[list[Wait]]) -> list[int]:
    """How far each row comes, by brute force: one position of one row after another."""
    passed = [0] * len(lengths)
    moved = True
    while moved:
        moved = False
        for row, length in enumerate(lengths):
            if passed[row] < length and all(
                passed[other] > on for at, other, on in waits[row] if at == passed[row]
            ):
                passed[row] += 1
                moved = True
    return passed


def followed(walked: Walked, lengths: list[int], waits: list[list[Wait]]) -> list[int]:
    """How far the turns of a walk go; every position comes after its waits."""
    passed = [0] * len(lengths)
    for row, end in walked.turns:
        assert end > passed[row]
        for at, other, on in waits[row]:
            if passed[row] <= at < end:
                assert passed[other] > on or other == row, (row, at, other, on)
        passed[row] = end
    return passed


@given(CASES)
def test_a_walk_comes_as_far_as_one_position_at_a_time(
    case: tuple[list[int], list[list[Wait]]],
) -> None:
    lengths, waits = case
    expected = far(lengths, waits)
    for clock in (None, lambda row, at: float(at)):
        walked = walk(lengths, waits, clock)
        assert followed(walked, lengths, waits) == expected
        assert {row: wait[0] for row, wait in walked.stuck.items()} == {
            row: at for row, (at, end) in enumerate(zip(expected, lengths, strict=True)) if at < end
        }


@given(CASES)
def test_exactly_the_rows_of_circles_are_faults(case: tuple[list[int], list[list[Wait]]]) -> None:
    lengths, waits = case
    walked = walk(lengths, waits)
    rows = range(len(lengths))
    on = {row: walked.stuck[row][1] for row in walked.stuck}
    circle = set()
    for start in on:
        row, steps = start, 0
        while row in on and steps <= len(lengths):
            row, steps = on[row], steps + 1
            if row == start:
                circle.add(start)
                break
    found = [*walked.faults(lambda row, at: f"{row}:{at}", "mend it")]
    assert sorted(fault.device for fault in found if fault.device is not None) == sorted(circle)
    for fault in found:
        assert fault.device is not None and fault.device in rows
        assert fault.position == walked.stuck[fault.device][0]


def test_with_a_clock_the_row_that_is_free_first_goes_on() -> None:
    free = {(0, 0): 3.0, (0, 1): 6.0, (1, 0): 1.0, (1, 1): 2.0, (1, 2): 4.0}
    walked = walk([2, 3], [[], []], lambda row, at: free[row, at])
    assert walked.turns == [(0, 1), (1, 3), (0, 2)]
    assert walk([2, 3], [[], []]).turns == [(0, 2), (1, 3)]


def test_a_chain_of_waits_is_walked_in_its_order() -> None:
    rows = 20
    waits: list[list[Wait]] = [[(0, row + 1, 0)] if row < rows - 1 else [] for row in range(rows)]
    assert [row for row, _ in walk([1] * rows, waits).turns] == [*reversed(range(rows))]
