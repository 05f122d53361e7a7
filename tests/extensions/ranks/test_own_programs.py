"""What a rank keeps of a program."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fxpipe.extensions.ranks.program import CROSSING, OwnProgram, devices_near
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir import instruction as ins
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.value import HOST, Buffer
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from tests.helpers.plans import add_clip, chain, in_turn, skipping


@pytest.mark.parametrize("name", RECIPES)
def test_it_has_the_window_and_depth_of_the_whole(name: str) -> None:
    for p, m in [(2, 4), (3, 3)]:
        schedule = RECIPES[name](p, m)
        lowered = free(communicate(Lower(chain(schedule.stages))(schedule)))
        for program in (lowered, Streams()(lowered)):
            for device in range(p):
                own = OwnProgram.of(program, device)
                assert (own.window, own.depth) == (program.window, program.depth)
                assert own.lists[device] == program.lists[device]
                assert sum(map(len, own.lists)) == len(program.lists[device])


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_rank_makes_without_the_lists_of_others_is_what_the_whole_gives_it(
    name: str,
) -> None:
    for p, m in [(3, 4), (5, 3)]:
        written = RECIPES[name](p, m)
        for schedule in (written, add_clip(written)):
            for plan_of in (chain, skipping) if schedule.stages > 2 else (chain,):
                plan = plan_of(schedule.stages)
                whole = free(communicate(Lower(plan)(schedule)))
                for device in range(p):
                    only = devices_near(schedule, plan, device)
                    part = free(communicate(Lower(plan, only=only)(schedule)))
                    own, known = OwnProgram.of(part, device), OwnProgram.of(whole, device)
                    assert own == known and own.confirmed == known.confirmed
                    assert own.links == known.links and own.depth == known.depth
                    if only:
                        assert {d for d, row in enumerate(part.lists) if row} == only


def test_a_rank_of_a_chain_makes_the_lists_of_its_neighbours_alone() -> None:
    plan = chain(8)
    assert devices_near(RECIPES["1f1b"](8, 4), plan, 3) == {2, 3, 4}
    assert devices_near(RECIPES["1f1b"](8, 4), plan, 7) == {6, 7}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_let_go_of_at_a_receive_had_arrived_before_that_value_was_sent(name: str) -> None:
    for p, m in [(2, 4), (4, 8)]:
        schedule = RECIPES[name](p, m)
        for plan in (chain, skipping) if schedule.stages > 2 else (chain,):
            program = free(communicate(Lower(plan(schedule.stages))(schedule)))
            steps = 2 + program.depth
            runs = [
                places([x.later(step) for step, x in in_turn(window, steps, program.depth)])
                for window in program.lists
            ]
            confirms = set[tuple[int, int]]()
            every = [OwnProgram.of(program, device).confirmed for device in range(program.devices)]
            own = [(d, *each) for d, confirmed in enumerate(every) for each in confirmed.items()]
            for device, at, last in own:
                x = program.lists[device][at]
                assert isinstance(x, ins.Receive)
                source = program.origin(x)
                confirms.add((device, source))
                for shift in range(-program.depth, steps + program.depth):
                    value = x.buffer._replace(batch=x.buffer.batch + shift)
                    before = last._replace(batch=last.batch + shift)
                    if value in runs[device] and before in runs[device]:
                        assert runs[device][before] < runs[device][value]
                        assert runs[source][before] < runs[source][value]
            both = {
                (device, program.origin(x))
                for device, row in enumerate(program.lists)
                for x in row
                if isinstance(x, ins.Receive) and x.buffer.kind in CROSSING
            }
            two_way = {(a, b) for a, b in both if (b, a) in both}
            assert confirms <= two_way and bool(confirms) == bool(two_way)


@pytest.mark.parametrize("name", RECIPES)
def test_links_join_the_devices_of_edges_and_a_rank_knows_its_own(name: str) -> None:
    for p, m in [(2, 4), (4, 8)]:
        schedule = RECIPES[name](p, m)
        plan = (skipping if schedule.stages > 2 else chain)(schedule.stages)
        program = free(communicate(Lower(plan)(schedule)))
        at = {
            (task.stage, task.microbatch): device
            for device, row in enumerate(schedule.rows)
            for task in row
            if task.kind == "F"
        }
        expected = set[tuple[int, int]]()
        gradients = plan.gradients if schedule.trains else ()
        for edge in (*plan.edges, *gradients):
            if HOST in (edge.source, edge.target):
                continue
            ends = {(at[edge.source, i], at[edge.target, i]) for i in range(schedule.microbatches)}
            expected |= {(a, b) for a, b in ends if a != b}
        for device in range(schedule.devices):
            own = tuple(link for link in sorted(expected) if device in link)
            assert OwnProgram.of(program, device).links == own


def places(row: Sequence[ins.Instruction]) -> dict[Buffer, int]:
    """Where a device's list sends or receives each value that crosses to another device."""
    kinds = ins.Send | ins.Receive
    return {x.buffer: at for at, x in enumerate(row) if isinstance(x, kinds)}
