"""What schedules keep, against the papers' formulas and against runs that count it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from fxpipe.errors import VerificationError
from fxpipe.ir.recipe import RECIPES, round_robin
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.schedule import add_recompute
from fxpipe.schedules import (
    gpipe,
    inference,
    one_f_one_b,
    one_f_one_b_async,
    two_bw,
    zb_h1,
    zb_h2,
)

SIZES = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 5, 8, 13)]


def peaks(schedule: Schedule, begin: str, ends: str) -> tuple[Counter[int], Counter[int]]:
    """Stage, and device, → the most spans from one kind of task to another, in a long run."""
    stages: Counter[int] = Counter()
    devices: Counter[int] = Counter()
    steps = schedule.depth + 4
    ended = {(t.microbatch, t.stage) for row in schedule.rows for t in row if t.kind in ends}
    for device, row in enumerate(schedule.rows):
        alive: Counter[int] = Counter()
        for step in range(steps + schedule.depth):
            for task in row:
                if not 0 <= step + task.batch < steps or task.stage is None:
                    continue
                if task.kind == begin and (task.microbatch, task.stage) in ended:
                    alive[task.stage] += 1
                    stages[task.stage] = max(stages[task.stage], alive[task.stage])
                    devices[device] = max(devices[device], sum(alive.values()))
                elif task.kind in ends:
                    alive[task.stage] -= 1
    return stages, devices


@pytest.mark.smoke
@pytest.mark.parametrize("name", RECIPES)
def test_the_stash_of_a_library_schedule_is_what_a_run_counts(name: str) -> None:
    for p, m in [(1, 1), (2, 1), (2, 3), (3, 2), (4, 4), (5, 2), (3, 9)]:
        schedule = RECIPES[name](p, m)
        kept = schedule.kept()
        stages, devices = peaks(schedule, "F", "BW")
        assert kept.stages == tuple(stages[s] for s in range(schedule.stages))
        assert kept.devices == tuple(devices[d] for d in range(schedule.devices))
        assert kept.deferred == tuple(
            peaks(schedule, "I", "W")[0][s] for s in range(schedule.stages)
        )


def test_the_stash_is_that_of_the_papers() -> None:
    for p, m in SIZES:
        assert gpipe(p, m).kept().stages == (m,) * p
        assert one_f_one_b(p, m).kept().stages == tuple(min(p - s, m) for s in range(p))
        assert one_f_one_b_async(p, m).kept().stages == tuple(p - s for s in range(p))
        assert two_bw(p, m).kept().stages == tuple(p - s for s in range(p))
        assert inference(p, m).kept().stages == (0,) * p
        if m >= 2 * p:
            assert max(zb_h1(p, m).kept().stages) == p
            assert max(zb_h2(p, m).kept().stages) == 2 * p - 1


def test_a_recompute_keeps_inputs_until_it_runs() -> None:
    text = (
        "schedule mine stages=1 microbatches=3 delay=0\nplace 0\n"
        "0: F0 F1 R0 B0 F2 R1 B1 B2 U\n"  # the last one is kept whole
    )
    kept = Schedule.parse(text).kept()
    assert (kept.stages, kept.inputs) == ((2,), (2,))


def test_a_recomputed_micro_batch_counts_from_its_recompute_on() -> None:
    schedule = add_recompute(gpipe(2, 4), "always")
    assert (schedule.kept().stages, schedule.kept().inputs) == ((1, 1), (4, 4))


def test_a_device_keeps_what_its_stages_keep_together() -> None:
    schedule = gpipe.placed(round_robin(2))(2, 3)
    assert schedule.kept().stages == (3, 3, 3, 3)
    assert schedule.kept().devices == (6, 6)


def test_what_earlier_batches_keep_counts() -> None:
    assert two_bw(3, 2).kept().devices == (3, 2, 1)


def test_the_stash_of_an_incomplete_schedule_is_refused() -> None:
    schedule = one_f_one_b(2, 2)
    with pytest.raises(VerificationError, match="has no backward"):
        replace(schedule, rows=(schedule.rows[0][:1], schedule.rows[1])).kept()
