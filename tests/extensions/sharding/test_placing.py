"""Where weights are gathered and dropped: what is accepted, refused, counted and simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe import D, F, G, Schedule
from fxpipe.extensions.replicas.lowering import add_reduce
from fxpipe.extensions.sharding.extension import Sharding
from fxpipe.extensions.sharding.opcodes import (
    AwaitShards,
    DropShards,
    GatherShards,
    UpdateShards,
)
from fxpipe.extensions.sharding.placing import add_shards
from fxpipe.extensions.simulator import Link
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import Recipe, find_recipe
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.text.program import print_instruction
from fxpipe.verify.program import verify_program
from tests.helpers.faults import faults_of
from tests.helpers.flushing import FLUSHING
from tests.helpers.plans import chain

pytestmark = pytest.mark.smoke

SCHEDULES = [*FLUSHING, "inference"]


def sharded(name: str, devices: int, microbatches: int, **how: Any) -> Program:
    made = find_recipe(name)(devices, microbatches)
    return lowered(add_shards(add_reduce(made) if made.trains else made, **how))


def lowered(schedule: Schedule) -> Program:
    program = Lower(chain(schedule.stages), replicas=2)(schedule.verify())
    return free(communicate(Sharding("zero3").shard(program, True)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("how", [{}, {"once": True}, {"ahead": True}], ids=str)
def test_every_schedule_that_flushes_is_accepted_with_gathers(name: str, how: Any) -> None:
    for devices, microbatches in ((1, 3), (2, 4), (3, 6)):
        program = sharded(name, devices, microbatches, **how)
        assert verify_program(program) is program
        assert Program.parse(str(program)) == program
        made = add_shards(find_recipe(name)(devices, microbatches), **how)
        assert Schedule.parse(str(made)) == made


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 8))
def test_a_device_has_one_stage_whole_unless_it_gathers_ahead(
    name: str, devices: int, factor: int
) -> None:
    """Beside the runs of stages in its row."""
    made = find_recipe(name)(devices, devices * factor)
    for row, before in zip(add_shards(made, ahead=False).rows, made.rows, strict=True):
        whole: set[int | None] = set()
        for task in row:
            whole |= {task.stage} if task.kind == "G" else set()
            whole -= {task.stage} if task.kind == "D" else set()
            assert len(whole) <= 1
            assert task.kind not in "FBIWR" or whole == {task.stage}
        assert not whole
        runs = [stage for stage, _ in groupby(t.stage for t in before if t.kind in "FBIWR")]
        assert Counter(t.stage for t in row if t.kind == "G") == Counter(runs)


def test_looped_bfs_gathers_less_than_any_other_of_several_stages_a_device() -> None:
    def gathers(name: str) -> int:
        return max(
            sum(isinstance(x, GatherShards) for x in row) for row in sharded(name, 4, 8).lists
        )

    assert gathers("looped-bfs") == 3
    assert min(gathers("interleaved-1f1b"), gathers("zb-v"), gathers("hanayo")) >= 5


PROGRAM = sharded("looped-bfs", 2, 2)
PLACES = [
    (device, at)
    for device, row in enumerate(PROGRAM.lists)
    for at, x in enumerate(row)
    if isinstance(x, GatherShards | AwaitShards | DropShards)
]


@given(st.sampled_from(PLACES), st.sampled_from(["left out", "twice", "too early", "too late"]))
def test_a_gather_or_a_drop_that_is_not_in_its_place_is_refused(
    place: tuple[int, int], how: str
) -> None:
    device, at = place
    row = [*PROGRAM.lists[device]]
    x = row.pop(at)
    reads = [k for k, y in enumerate(row) if isinstance(y, ins.Compute) and y.stage == x.stage]
    if how == "twice":
        row[at:at] = [x, x]
    elif how == "too early":  # a drop before the last use, or a wait before its gather
        earlier = [k for k in reads if k < at] if isinstance(x, DropShards) else [at - 1]
        row.insert(earlier[-1], x)
    elif how == "too late":
        later = [k for k in reads if k >= at]
        row.insert(later[0] + 1 if later else len(row), x)
    lists = [*PROGRAM.lists]
    lists[device] = tuple(row)
    wrong = replace(PROGRAM, lists=tuple(lists))
    if wrong == PROGRAM or (how == "too early" and isinstance(x, GatherShards)):
        return  # nothing that it moved past needs it
    assert any(f"of stage {x.stage}" in fault.what for fault in faults_of(wrong)) or any(
        f"stage {x.stage} has" in fault.what for fault in faults_of(wrong)
    )


def test_a_program_that_gathers_nothing_is_refused_with_all_its_faults() -> None:
    kinds = GatherShards, AwaitShards, DropShards
    lists = [tuple(x for x in row if not isinstance(x, kinds)) for row in PROGRAM.lists]
    bare = replace(PROGRAM, lists=tuple(lists))
    wrong = [fault for fault in faults_of(bare) if "shard of the weights" in fault.what]
    assert len(wrong) == sum(isinstance(x, UpdateShards) for row in lists for x in row) == 4


def test_buckets_of_gradients_leave_while_the_rest_of_the_last_backward_runs() -> None:
    """Weights are dropped before the last of them leaves."""
    made = add_shards(add_reduce(find_recipe("looped-bfs")(2, 2)))
    plan = chain(made.stages)
    stages = [replace(stage, buckets=((0,), (1,), (2,))) for stage in plan.stages]
    program = Lower(replace(plan, stages=tuple(stages)), replicas=2)(made.verify())
    program = free(communicate(Sharding("zero3").shard(program, True))).verify()
    for stage, device in enumerate(program.placement):
        row = [str(x) for x in map(print_instruction, program.lists[device]) if f"s{stage}" in x]
        assert [x.split(maxsplit=1) for x in row[-7:]] == [
            ["partial_to_owners", f"B s{stage}[1] v0 bucket 0"],
            ["partial_to_owners", f"B s{stage}[1] v0 bucket 1"],
            ["rest_backward", f"s{stage}[1] v0"],
            ["drop_shards", f"s{stage}"],
            ["reduce_to_owners", f"s{stage}"],
            ["await_sums", f"s{stage}"],
            ["update_shards", f"s{stage} v0 -> v1"],
        ]
    whole = [
        ins.Backward(x.stage, x.microbatch, x.version, x.batch)
        if isinstance(x, ins.Backward)
        else x
        for x in program.lists[0]
    ]
    wrong = replace(program, lists=(tuple(whole), *program.lists[1:]))
    assert any("let the rest of that backward" in fault.cure for fault in faults_of(wrong))


def own_gathers(device: int, devices: int, microbatches: int) -> Any:
    """One stage, which gathers for each of two halves."""
    for i in range(microbatches):
        yield from (G(), F(i), D()) if i else (F(i), D())


def test_a_schedule_that_gathers_by_itself_stays_as_it_is_and_is_verified() -> None:
    made = Recipe("own-gathers", own_gathers)(1, 2)
    assert add_shards(made) is made
    (fault, *_) = faults_of(lowered_inference(made))
    assert "the weights of stage 0, which are gone: drop_shards s0" in fault.what
    right = replace(made, rows=((G(0), *made.rows[0]),))
    assert lowered_inference(right).verify()


def lowered_inference(schedule: Schedule) -> Program:
    return communicate(Lower(chain(schedule.stages), replicas=2)(schedule))


def test_gathers_take_time_on_the_link_and_hide_behind_the_run_before_if_begun_ahead() -> None:
    """Four stages a device, whose weights take as long as two forwards to be gathered."""
    every = range(4)
    sizes = Sizes(
        parameters=dict.fromkeys(every, 40),
        each=dict.fromkeys(every, (20, 20)),
        gradients=dict.fromkeys(every, 0),
    )
    free_updates = {"U": 0, "A": 0, "B": 2, "F": 1}
    made = find_recipe("looped-bfs").placed(lambda devices: (0, 0, 0, 0))(1, 4)
    spans = {}
    for ahead in (False, True):
        program = lowered(add_shards(add_reduce(made), ahead=ahead))
        found = program.simulate(free_updates, sizes=sizes, links=Link(bandwidth=10))
        spans[ahead] = found.makespan
        assert found.summed() == (7 * 20,)
        most = max(memory.peak for memory in found.memory)
        assert most == (2 if ahead else 1) * 20 + 4 * 20
    computed = 4 * 4 * 3
    assert spans == {False: computed + 7 * 2, True: computed + 2}
