"""ZB-H1 and ZB-H2: grids, bubble and memory."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from fxpipe.ir.recipe import find_recipe
from fxpipe.schedules import one_f_one_b, zb_h1, zb_h2
from tests.oracles.small_simulator import HALVES, grid, idle, makespan, peak_stash, simulate, times

GRIDS = {
    ("zb-h1", 2, 1): """
F0  .  . I0 W0
 . F0 I0 W0  .
""",
    ("zb-h1", 2, 4): """
F0 F1  . I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
 . F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
""",
    ("zb-h1", 3, 2): """
F0 F1  .  .  . I0 W0 I1 W1
 . F0 F1  . I0  . I1 W0 W1
 .  . F0 I0 F1 I1 W0 W1  .
""",
    ("zb-h1", 4, 8): """
F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
 . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
 .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
 .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
""",
    ("zb-h2", 2, 4): """
F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3  .
 . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
""",
    ("zb-h2", 3, 4): """
F0 F1 F2 F3  . I0 W0 I1 W1 I2 W2 I3 W3  .
 . F0 F1 F2 I0 F3 I1  . I2 W0 I3 W1 W2 W3
 .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
""",
    ("zb-h2", 4, 8): """
F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7  .  .  .
 . F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7  .  .
 .  . F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7  .
 .  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7
""",
}
"""(name, devices, micro-batches) → a row a device; all tasks equally long."""

TIMES = list(product((1, 2, 3), repeat=3))
"""Of a forward, an input gradient and a weight gradient."""


@pytest.mark.parametrize(("name", "devices", "microbatches"), GRIDS)
def test_a_schedule_runs_as_drawn(name: str, devices: int, microbatches: int) -> None:
    schedule = find_recipe(name)(devices, microbatches)
    assert grid(schedule, HALVES) == GRIDS[name, devices, microbatches].strip("\n")


@pytest.mark.parametrize(("f", "i", "w"), [(f, i, w) for f, i, w in TIMES if w <= f])
def test_the_bubble_of_zb_h1_is_its_formula(f: int, i: int, w: int) -> None:
    for p in range(1, 7):
        for m in range(p, 14):
            assert idle(simulate(zb_h1(p, m), times(f, i, w))) == (p - 1) * (f + i - w)


def test_zb_h1_idles_a_third_as_long_as_one_f_one_b() -> None:
    for p in range(1, 7):
        for m in range(p, 14):
            took = makespan(simulate(zb_h1(p, m), HALVES))
            assert 1 - Fraction(3 * m, took) == Fraction(p - 1, 3 * m + p - 1)
            assert idle(simulate(one_f_one_b(p, m), HALVES)) == 3 * (p - 1)


@pytest.mark.parametrize(
    ("f", "i", "w"), [(f, i, w) for f, i, w in TIMES if w <= min(f, (f + i) / 2)]
)
def test_the_bubble_of_zb_h2_is_its_formula(f: int, i: int, w: int) -> None:
    for p in range(1, 7):
        for m in range(2 * p - 1, 14):
            assert idle(simulate(zb_h2(p, m), times(f, i, w))) == (p - 1) * (f + i - 2 * w)


def test_zb_h2_has_no_bubble_with_equal_times() -> None:
    for p in range(1, 7):
        for m in range(2 * p - 1, 14):
            timeline = simulate(zb_h2(p, m), HALVES)
            assert idle(timeline) == 0
            assert [own[0].start for own in timeline] == list(range(p))


def test_the_stash_is_the_same_on_every_stage() -> None:
    for p in range(1, 7):
        for m in range(1, 14):
            for stage in range(p):
                assert peak_stash(zb_h1(p, m), stage) == min(p, m)
                assert peak_stash(zb_h2(p, m), stage) == min(2 * p - 1, m)
