"""The V-shaped schedules: grids, bubble and memory."""

from __future__ import annotations

from itertools import product

import pytest

from fxpipe.extensions.more_schedules.controllable_memory import repeat
from fxpipe.ir.recipe import Recipe, find_recipe
from fxpipe.schedules import dualpipe_v, one_f_one_b, v_half, v_min, zb_v
from tests.oracles.small_simulator import (
    HALVES,
    busy,
    device_kept,
    grid,
    idle,
    makespan,
    simulate,
    times,
)

GRIDS = {
    ("zb-v", 2, 1): """
F0  .  . f0 i0 w0  .  . I0 W0
 . F0 f0  .  . i0 w0 I0 W0  .
""",
    ("zb-v", 2, 3): """
F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2  .
 . F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2
""",
    ("zb-v", 3, 5): """
F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4  .  .
 . F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 w4 W3 W4  .
 .  . F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 W3 w4 W4
""",
    ("dualpipe-v", 2, 2): """
F0 F1  . f0 i0 w0 f1 b1  - B0  -  .  . B1  -
 . F0 f0 F1 f1 b0  - B0  - b1  - B1  -  .  .
""",
    ("dualpipe-v", 2, 5): """
F0 F1 F2 f0 i0 w0 f1 F3 b1  - f2 B0  - F4 b2  - f3 B1  - b3  - f4  . B2  - b4  - I3 W3 I4 W4
 . F0 f0 F1 f1 F2 b0  - f2 B0  - F3 b1  - f3 B1  - F4 b2  - f4 B2  - b3  - B3  - i4 I4 w4 W4
""",
    ("v-half", 2, 4): """
F0 F1  . f0 i0 f1 w0 F2 I0 i1 W0 f2 w1 F3 I1 i2 W1 f3 i3 I2 w2 I3 w3 W2 W3
 . F0 f0 F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3
""",
    ("v-half", 3, 4): """
F0 F1 F2  .  . f0 i0 w0 f1 i1 w1 I0 F3 W0  . f2 i2 I1 w2 W1  . f3 i3 I2 w3 W2  . I3 W3
 . F0 F1  . f0  . f1 i0 w0 F2 I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3  . I2 i3 W2 w3 I3 W3  .
 .  . F0 f0 F1 f1  .  . i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 w2 W2 i3 I3 w3 W3  .
""",
    ("v-half", 4, 4): """
F0 F1 F2 F3  .  .  . f0 i0 f1 i1 w0 f2 w1  . I0 i2 W0 w2 f3 i3 I1 w3 W1  . I2 W2 I3 W3
 . F0 F1 F2 F3  . f0  . f1 i0 w0 f2 i1 w1 I0 W0  .  . f3 i2 I1 i3 w2 W1 I2 w3 I3 W2 W3
 .  . F0 F1 F2 f0  . f1  . f2 i0 w0 F3 I0 i1 W0 w1 f3  . I1 i2 W1 i3 I2 w2 I3 w3 W2 W3
 .  .  . F0 f0 F1 f1 F2 f2  .  . i0 I0 w0 F3 W0 f3 i1 I1 w1 W1 i2 I2 i3 I3 w2 W2 w3 W3
""",
    ("v-min", 2, 3): """
F0 F1  . f0 i0 f1 w0 I0 i1 F2 W0 I1 w1 f2 i2 W1 w2 I2 W2
 . F0 f0 F1 f1 i0 I0 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 w2 W2
""",
    ("v-min", 3, 4): """
F0 F1  .  .  . f0 i0 f1 w0 F2  . I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3 i3 I2 w3 W2  . I3 W3
 . F0 F1  . f0  . f1 i0 w0  . I0 F2 W0 i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 i3 W2 w3 I3 W3  .
 .  . F0 f0 F1 f1  .  . i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 i3 I3 w3 W3  .
""",
    ("v-min", 4, 3): """
F0 F1 F2  .  .  .  . f0 i0 w0 f1 i1 w1  .  . I0 W0  .  . f2 i2 I1 w2 W1  .  .  . I2 W2
 . F0 F1  .  .  . f0  . f1 i0 w0 F2  .  . I0 i1 W0 w1 f2  . I1 i2 W1 w2  .  . I2 W2  .
 .  . F0 F1  . f0  . f1  .  . i0 w0 F2 I0 W0  . i1 f2 w1 I1 W1  . i2 w2  . I2 W2  .  .
 .  .  . F0 f0 F1 f1  .  .  .  . i0 I0 w0 F2 W0 f2 i1 I1 w1 W1  .  . i2 I2 w2 W2  .  .
""",
}
"""(name, devices, micro-batches) → a row a device; all tasks equally long, a whole backward as long
as two, and a device's second stage in small letters."""

AUTHORS = {
    ("v-half", 2): ((3, 1), 4),
    ("v-half", 3): ((5,), 4),
    ("v-half", 4): ((10, 8, 5), 6),
    ("v-half", 5): ((14, 11), 6),
    ("v-half", 6): ((12, 14, 11), 8),
    ("v-half", 7): ((24, 17), 8),
    ("v-half", 8): ((17,), 10),
    ("v-min", 2): ((3,), 4),
    ("v-min", 3): ((8, 5), 4),
    ("v-min", 4): ((11,), 4),
    ("v-min", 5): ((15,), 6),
    ("v-min", 6): ((17,), 6),
    ("v-min", 7): ((23,), 6),
    ("v-min", 8): ((27,), 8),
}
"""(name, devices) → time beyond a device's work for m = p, p + 1, … (the last holds up to 3p) and
micro-batches of one stage that a device keeps at most, all tasks equally long: of the tables that
zbv_greedy.py of sail-sg/zero-bubble-pipeline-parallelism (39f2c186) prints."""

TIMES = list(product((1, 2, 3), repeat=3))
"""Of a forward, an input gradient and a weight gradient."""


@pytest.mark.parametrize(("name", "devices", "microbatches"), GRIDS)
def test_a_schedule_runs_as_drawn(name: str, devices: int, microbatches: int) -> None:
    schedule = find_recipe(name)(devices, microbatches)
    assert grid(schedule, HALVES) == GRIDS[name, devices, microbatches].strip("\n")


def test_zb_v_has_no_bubble_with_equal_times() -> None:
    for p in range(1, 8):
        for m in (2 * p - 1, 2 * p, 3 * p, 25):
            timeline = simulate(zb_v(p, m), HALVES)
            assert idle(timeline) == 0
            assert [own[0].start for own in timeline] == list(range(p))


def test_zb_v_keeps_as_much_as_the_first_stage_of_one_f_one_b_on_every_device() -> None:
    for p in range(1, 8):
        for m in range(1, 16):
            kept = {device_kept(zb_v(p, m), device) for device in range(p)}
            assert max(kept) <= 2 * min(p, m)
            if m >= 2 * p - 1:
                assert kept == {2 * p}


def test_the_bubble_of_dualpipe_v_with_passes_together_is_its_formula() -> None:
    for f, w in [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)]:
        takes = times(f, f, w)
        for p in range(1, 7):
            for m in (2 * p, 2 * p + 1, 3 * p):
                took = makespan(simulate(dualpipe_v(p, m), takes, together=True))
                together = takes["F"] + takes["B"]
                bubble = (p - 1) * (together + takes["B"] - 3 * takes["W"])
                assert took - 2 * m * (2 * f + w) == bubble


@pytest.mark.parametrize(("f", "i", "w"), [(f, i, w) for f, i, w in TIMES if w <= i <= f <= i + w])
def test_the_bubble_of_dualpipe_v_with_passes_apart(f: int, i: int, w: int) -> None:
    for p in range(1, 7):
        for m in (2 * p, 2 * p + 1, 3 * p):
            assert idle(simulate(dualpipe_v(p, m), times(f, i, w))) == (p - 1) * (f + i - w)


def test_dualpipe_v_keeps_one_micro_batch_of_one_stage_more_than_zb_v() -> None:
    for p in range(1, 7):
        for m in range(2 * p, 16):
            kept = [device_kept(dualpipe_v(p, m), device) for device in range(p)]
            assert kept == [2 * p + 1] * p


def test_the_bubble_of_v_half_is_half_of_one_f_one_bs() -> None:
    for p in range(3, 9):
        for m in (p, p + 1, 3 * p):
            timeline = simulate(v_half(p, m), HALVES)
            assert makespan(timeline) - 6 * m == (3 * p - 4 if p % 2 else 3 * p - 7)
            assert idle(simulate(one_f_one_b(p, m), times(2, 2, 2))) == 6 * (p - 1)


def test_the_bubble_of_v_min_is_two_thirds_of_one_f_one_bs() -> None:
    for p in range(3, 9):
        for m in (p, p + 1, 3 * p):
            timeline = simulate(v_min(p, m), HALVES)
            assert makespan(timeline) - 6 * m == (4 * p - 7 if p % 3 == 0 else 4 * p - 5)


@pytest.mark.parametrize(("name", "devices"), AUTHORS)
def test_no_slower_than_what_the_authors_published(name: str, devices: int) -> None:
    bubbles, most = AUTHORS[name, devices]
    for m in range(devices, 3 * devices + 1):
        bubble = bubbles[min(m - devices, len(bubbles) - 1)]
        schedule = find_recipe(name)(devices, m)
        assert makespan(simulate(schedule, HALVES)) <= 6 * m + bubble
        assert max(device_kept(schedule, device) for device in range(devices)) <= most


@pytest.mark.parametrize(("recipe", "parts"), [(v_half, 2), (v_min, 3)], ids=["v-half", "v-min"])
def test_the_stash_is_a_part_of_one_f_one_bs(recipe: Recipe, parts: int) -> None:
    """(p + 2) // 2 and (p + 4) // 3 of a device's whole micro-batches."""
    for p in range(1, 13):
        published = 2 * ((p + 2 * parts - 2) // parts)
        for m in (1, 2, p, 2 * p):
            kept = max(device_kept(recipe(p, m), device) for device in range(p))
            assert kept <= published
            assert m < p or p < 2 or kept == published


@pytest.mark.parametrize(("f", "i", "w"), [(f, i, w) for f, i, w in TIMES if f <= i <= f + w / 2])
def test_the_bubble_of_v_half_does_not_grow_with_the_micro_batches(f: int, i: int, w: int) -> None:
    for p in range(2, 7):
        few, many = (simulate(v_half(p, m), times(f, i, w)) for m in (3 * p, 5 * p))
        assert idle(few) == idle(many)


def test_every_device_of_a_v_does_the_same_work() -> None:
    for recipe in (zb_v, dualpipe_v, v_half, v_min):
        timeline = simulate(recipe(5, 12), HALVES)
        assert [busy(timeline, device) for device in range(5)] == [72] * 5


def test_blocks_that_do_not_fit_the_stash_are_refused() -> None:
    def block(device: int, devices: int) -> tuple[int, int, int, int]:
        return device, 12 - device, 12 + device, 24 - device

    with pytest.raises(ValueError, match="1 kept micro-batches are too few"):
        repeat(block, 2, 2, 1)
