"""List scheduling: known schedules come of their rules, and no device idles without need."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxpipe
from fxpipe.errors import InputError
from fxpipe.ir.recipe import Placement, Recipe, one_each, round_robin, vee
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.schedules import gpipe, hanayo, inference, interleaved_zb, one_f_one_b
from fxpipe.schedules.one_f_one_b import seq1f1b
from tests.oracles.small_simulator import (
    AS_LONG,
    HALVES,
    Ran,
    device_kept,
    makespan,
    simulate,
    times,
)


def listed(kinds: str, urgent: str = "BIFW", **options: Any) -> Recipe:
    """Kinds in this order, then the later stages first, then the micro-batches in turn."""

    @fxpipe.list_schedule("mine", kinds, **options)
    def recipe(task: Task, devices: int) -> Any:
        assert task.stage is not None
        return urgent.index(task.kind), -task.stage, task.microbatch

    return recipe


@pytest.mark.parametrize(
    ("recipe", "kinds", "urgent", "limit"),
    [
        (one_f_one_b, "FB", "BF", lambda device, devices: devices - device),
        (gpipe, "FB", "FB", None),
        (inference, "F", "F", 1),
    ],
)
def test_the_rules_of_a_schedule_give_its_order(
    recipe: Recipe, kinds: str, urgent: str, limit: Any
) -> None:
    limit = None if kinds == "F" else limit
    own = listed(kinds, urgent, limit=limit)
    for p in range(1, 6):
        for m in range(1, 10):
            assert own(p, m).verify().rows == recipe(p, m).rows


def test_interleaved_zero_bubble_has_a_bubble_of_one_task_for_each_other_device() -> None:
    for p in range(1, 9):
        for m in (p, 2 * p, 3 * p):
            schedule = interleaved_zb(p, m)
            assert makespan(simulate(schedule, HALVES)) == 6 * m + p - 1
            assert max(device_kept(schedule, device) for device in range(p)) <= 2 * p


def test_waves_have_less_than_half_of_the_bubble_of_1f1b_for_few_microbatches() -> None:
    for p in range(1, 13):
        timeline = simulate(hanayo(p, p).verify(), AS_LONG)  # a micro-batch has 8 tasks a device
        assert makespan(timeline) - 8 * p <= 7 * (p - 1) / 2
        assert makespan(simulate(one_f_one_b(p, p), AS_LONG)) * 4 - 8 * p == 8 * (p - 1)


placements: st.SearchStrategy[Placement] = st.sampled_from(
    [one_each, vee, round_robin(2), lambda devices: vee(devices) * 2]
)


@given(
    st.sampled_from(["FB", "FIW"]),
    st.permutations("BIFW").map("".join),
    placements,
    st.integers(1, 4),
    st.integers(1, 6),
    st.tuples(*[st.integers(1, 3)] * 3),
)
def test_a_device_is_idle_only_where_none_of_its_tasks_could_start(
    kinds: str, urgent: str, placement: Placement, p: int, m: int, takes: tuple[int, int, int]
) -> None:
    costs = times(*takes)
    schedule = listed(kinds, urgent, placement=placement, costs=costs)(p, m).verify()
    timeline = simulate(schedule, costs)
    ends = {ran.task: ran.end for own in timeline for ran in own}
    for own in timeline:
        for ran in own:
            if ran.task.kind == "U":  # at the end of its row
                continue
            for start, end in gaps(own):
                ready = max((ends[need] for need in needs(ran.task, schedule)), default=0)
                # what runs after a gap was not there at its start
                assert not (ran.start >= end and ready <= start)


def needs(task: Task, schedule: Schedule) -> list[Task]:
    """The tasks whose results it takes, of those that there are."""
    kind, stage = KINDS[task.kind], task.stage
    assert stage is not None
    near = ((kind.follows, stage), (kind.previous, stage - 1), (kind.next, stage + 1))
    every = {t for row in schedule.rows for t in row}
    made = [Task(letter, task.microbatch, at) for letters, at in near for letter in letters]
    return [need for need in made if need in every]


def gaps(own: list[Ran]) -> list[tuple[int, int]]:
    """The times at which a device is idle before a task."""
    edges = [0, *(ran.end for ran in own)]
    starts = [ran.start for ran in own]
    return [(end, start) for end, start in zip(edges, starts, strict=False) if start > end]


@given(
    st.sampled_from(["FB", "FIW"]),
    st.sampled_from(["BIFW", "FBIW", "WBIF"]),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(1, 9),
)
def test_no_device_keeps_more_than_its_limit(
    kinds: str, urgent: str, p: int, m: int, limit: int
) -> None:
    schedule = listed(kinds, urgent, limit=limit)(p, m).verify()
    assert max(device_kept(schedule, device) for device in range(p)) <= limit


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_rules_over_slices_give_seq1f1b(slices: int) -> None:
    """Its forwards and backwards, numbered over all slices, take turns."""

    @fxpipe.list_schedule(
        "mine",
        "FB",
        placement=round_robin(slices),
        slices=slices,
        limit=lambda device, devices: devices - device + slices - 1,
    )
    def turns(task: Task, devices: int) -> int:
        assert task.stage is not None
        assert task.microbatch is not None
        part, device = divmod(task.stage, devices)
        if task.kind == "B":
            return 2 * (slices * task.microbatch + slices - 1 - part)
        return 2 * (slices * task.microbatch + part - (devices - device + slices - 1)) + 1

    for p in range(1, 5):
        for m in range(1, 6):
            own, seq = turns(p, m).verify(), seq1f1b(slices)(p, m)
            assert own.slices == slices
            assert own.rows == seq.rows


@given(
    st.sampled_from(["FB", "FIW"]),
    st.permutations("BIFW").map("".join),
    st.integers(2, 3),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_slices_in_any_order_of_kinds_come_after_those_whose_keys_they_read(
    kinds: str, urgent: str, slices: int, p: int, m: int
) -> None:
    listed(kinds, urgent, placement=round_robin(slices), slices=slices)(p, m).verify()


class Bytes(NamedTuple):
    saved: dict[int, int]
    deferred: dict[int, int]


@given(
    st.sampled_from(["FB", "FIW"]),
    st.sampled_from(["BIFW", "FBIW", "WBIF"]),
    st.sampled_from([one_each, vee, round_robin(2)]),
    st.tuples(st.integers(1, 3), st.integers(1, 6)),
    st.lists(st.integers(1, 9), min_size=12, max_size=12),
    st.floats(1, 4),
)
def test_no_device_keeps_more_than_its_bytes(
    kinds: str,
    urgent: str,
    placement: Placement,
    counts: tuple[int, int],
    drawn: list[int],
    share: float,
) -> None:
    """There are enough for a micro-batch on all of a device's stages. But earlier stages may leave
    no room for later ones, so some orders are refused."""
    p, m = counts
    places = placement(p)
    sizes = Bytes(dict(enumerate(drawn[:6])), dict(enumerate(drawn[6:])))
    most = [max(pair) for pair in zip(drawn[:6], drawn[6:], strict=True)]
    least = [sum(most[s] for s, at in enumerate(places) if at == d) for d in range(p)]
    recipe = listed(
        kinds,
        urgent,
        placement=placement,
        memory=lambda device, devices: share * least[device],
        sizes=sizes,
    )
    try:
        schedule = recipe(p, m).verify()
    except InputError:
        assert len(places) > p  # with a stage a device nothing gets stuck
        return
    for row, one in zip(schedule.rows, least, strict=True):
        kept: dict[tuple[int | None, int | None], int] = {}
        for task in row:
            after = {"F": sizes.saved, "I": sizes.deferred}.get(task.kind, {})
            kept[task.microbatch, task.stage] = after.get(task.stage or 0, 0)
            assert sum(kept.values()) <= share * one


@given(st.sampled_from(["FB", "FIW"]), placements, *[st.integers(1, 5)] * 2, st.integers(4, 9))
def test_a_limit_in_bytes_of_one_each_is_a_limit_in_microbatches(
    kinds: str, placement: Placement, p: int, m: int, limit: int
) -> None:
    stages = range(4 * p)
    ones = Bytes(dict.fromkeys(stages, 1), dict.fromkeys(stages, 1))
    counted = listed(kinds, placement=placement, limit=limit)
    weighed = listed(kinds, placement=placement, memory=limit, sizes=ones)
    try:
        rows = counted(p, m).rows
    except InputError:
        with pytest.raises(InputError, match="raise memory= or limit="):
            weighed(p, m)
        return
    assert weighed(p, m).rows == rows


def test_an_input_gradient_makes_room_for_what_a_weight_gradient_does_not_need() -> None:
    sizes = Bytes({0: 2}, {0: 1})
    rows = str(listed("FIW", "FIW", memory=3, sizes=sizes)(1, 3).verify()).splitlines()
    assert rows[2] == "0: F0 I0 F1 I1 W0 F2 I2 W1 W2 U"


def test_a_recompute_comes_right_before_its_backward_if_it_sorts_last() -> None:
    schedule = listed("FRB", "BFR", limit=2)(1, 3)
    assert str(schedule.verify()).splitlines()[2] == "0: F0 F1 R0 B0 F2 R1 B1 R2 B2 U"


def test_costs_of_a_stage_go_before_those_of_its_kind() -> None:
    slow = listed("FB", costs={"F": 1, ("F", 1): 9, "B": 1})(2, 4)
    assert str(slow).splitlines()[2] == "0: F0 F1 F2 F3 B0 B1 B2 B3 U"


def test_a_limit_that_lets_no_micro_batch_through_is_refused() -> None:
    with pytest.raises(InputError, match=r"'mine': the devices wait for one another.*raise limit="):
        listed("FB", placement=vee, limit=1)(2, 2)


@pytest.mark.parametrize(
    ("kinds", "options", "said"),
    [
        ("BIW", {}, "give a forward, F, too"),
        ("FBU", {}, "'U' is no task of a micro-batch"),
        ("FX", {}, "'X' is no task of a micro-batch"),
        ("FB", {"costs": {"F": -1}}, "the time of 'F' is -1"),
        ("FB", {"costs": {"B": float("nan")}}, "the time of 'B' is nan"),
        ("FB", {"memory": 8}, "a limit in bytes takes both"),
        ("FB", {"sizes": Bytes({}, {})}, "a limit in bytes takes both"),
        ("FB", {"memory": "8", "sizes": Bytes({}, {})}, "memory is '8'; give bytes"),
        ("FB", {"slices": 0}, "slices is 0; give a whole number above 0"),
    ],
)
def test_rules_that_make_no_schedule_are_refused(
    kinds: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        listed(kinds, **options)


def test_stages_that_no_slices_share_are_refused() -> None:
    with pytest.raises(InputError, match=r"'mine': there are 3 stages in 2 slices; .*round_robin"):
        listed("FB", slices=2)(3, 2)


def test_a_rule_of_ones_own_is_replaced_and_the_librarys_is_not() -> None:
    assert listed("FB") is not listed("FB", "FB")

    def rule(task: Task, devices: int) -> Any:
        return task.kind

    with pytest.raises(InputError, match="'hanayo' is a schedule of the library"):
        fxpipe.list_schedule("hanayo", "FB")(rule)


def test_copies_are_refused() -> None:
    with pytest.raises(InputError, match="no copies"):
        listed("FB", placement=lambda devices: ((0, 1), (1, 0)))(2, 2)


def test_stages_side_by_side_start_at_once() -> None:
    recipe = listed("FB", "BF", edges=((0, 1), (1, 3), (2, 3)))
    schedule = recipe(4, 4).verify()
    assert schedule.edges == ((0, 1), (1, 3), (2, 3))
    # the third stage does not wait for the first two; the fourth never pauses from then on
    costs = {"F": 1, "B": 2, "U": 0}
    assert schedule.simulate(costs).makespan == 2 + 4 * 3 + 2 * 2
