"""Lowering: any schedule over any edges becomes a program that computes the plain loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import B, F, I, R, Task, U, W
from fxpipe.ir.value import HOST, Buffer, Edge
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.passes.schedule import add_recompute
from fxpipe.schedules import gpipe, inference, one_f_one_b, pipedream, two_bw
from tests.helpers.lines import lines
from tests.helpers.plans import chain, in_turn, plan_of, run, skipping
from tests.oracles.program_executor import program_is_right
from tests.oracles.symbolic_loop import plain_loop


def whole(schedule: Schedule, plan: Plan, *, updates: bool = True, pause: bool = False) -> Program:
    """Lowered, verified after each pass."""
    return run(schedule, Lower(plan, updates=updates, pause=pause), communicate, free)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Stages in a chain, with any further edges from any stage or the caller to later ones."""
    stages = draw(st.integers(1, 5))
    edges = [*chain(stages).edges, *chain(stages).gradients]
    for number in range(draw(st.integers(0, 5))):
        source = draw(st.integers(HOST, stages - 1))
        later = st.sampled_from([*range(source + 1, stages), *([] if source == HOST else [HOST])])
        for target in draw(st.sets(later, min_size=1)):
            edges.append(Edge(source, target, f"v{number}"))
            if draw(st.booleans()):
                edges.append(edges[-1].back)
    return plan_of(stages, *draw(st.permutations(edges)))


@st.composite
def schedules(draw: st.DrawFn, stages: int, trains: bool) -> Schedule:
    """Any placement, and any order in which the tasks can run one after another."""
    devices = draw(st.integers(1, stages))
    microbatches = draw(st.integers(1, 4))
    homes = st.integers(0, devices - 1)
    placement = tuple(draw(st.lists(homes, min_size=stages, max_size=stages)))
    rows: list[list[Task]] = [[] for _ in range(devices)]
    forwards, backwards = [0] * stages, [0] * stages
    for _ in range(stages * microbatches * (1 + trains)):
        ready = [F(i, s) for s, i in enumerate(forwards) if i < ([microbatches, *forwards][s])]
        ready += [
            B(i, s)
            for s, i in enumerate(backwards)
            if trains and i < min(forwards[s], [*backwards, microbatches][s + 1])
        ]
        task = draw(st.sampled_from(ready))
        assert task.stage is not None
        rows[placement[task.stage]].append(task)
        (forwards if task.kind == "F" else backwards)[task.stage] += 1
    if trains:
        for stage, home in enumerate(placement):
            last = max(k for k, task in enumerate(rows[home]) if task.stage == stage)
            rows[home].insert(draw(st.integers(last + 1, len(rows[home]))), U(stage))
    return Schedule("any", microbatches, placement, tuple(map(tuple, rows)))


@given(st.data(), st.booleans(), st.booleans())
def test_any_schedule_over_any_edges_computes_the_plain_loop(
    data: st.DataObject, trains: bool, updates: bool
) -> None:
    plan = data.draw(plans())
    schedule = data.draw(schedules(len(plan.stages), trains))
    program = whole(schedule, plan, updates=updates)
    expected = plain_loop(
        program.stages,
        (*program.edges, *program.gradients),
        program.microbatches,
        trains=trains,
        updates=trains and updates,
    )
    assert program_is_right(program, expected)


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 3), (3, 2), (4, 8), (8, 4)])
def test_a_library_schedule_computes_the_plain_loop(devices: int, microbatches: int) -> None:
    for recipe in (gpipe, one_f_one_b, inference):
        for plan in (chain(devices), *([skipping(devices)] if devices > 2 else [])):
            program = whole(recipe(devices, microbatches), plan)
            trains = recipe is not inference
            edges = (*program.edges, *program.gradients)
            expected = plain_loop(devices, edges, microbatches, trains=trains, updates=trains)
            assert program_is_right(program, expected)


def test_lower_makes_an_instruction_of_each_task_and_a_barrier_before_the_updates() -> None:
    program = Lower(chain(2))(one_f_one_b(2, 2))
    assert program == Program(
        "1f1b",
        2,
        (0, 1),
        chain(2).edges,
        (
            (
                ins.Forward(0, 0),
                ins.Forward(0, 1),
                ins.Backward(0, 0),
                ins.Backward(0, 1),
                ins.Barrier(),
                ins.Update(0),
            ),
            (
                ins.Forward(1, 0),
                ins.Backward(1, 0),
                ins.Forward(1, 1),
                ins.Backward(1, 1),
                ins.Barrier(),
                ins.Update(1),
            ),
        ),
        ("lower",),
        gradients=chain(2).gradients,
    )


def test_updates_move_behind_every_backward_of_their_device() -> None:
    text = "schedule v stages=2 microbatches=1 delay=0\nplace 0 1\n0: F0@0 F0@1 B0@1 U@1 B0@0 U@0"
    assert Lower(chain(2))(Schedule.parse(text)).lists[0][-4:] == (
        ins.Backward(0, 0),
        ins.Barrier(),
        ins.Update(1),
        ins.Update(0),
    )


def test_without_an_optimizer_there_are_neither_updates_nor_barriers() -> None:
    program = whole(gpipe(2, 2), chain(2), updates=False)
    assert not any(isinstance(x, ins.Barrier | ins.Update) for own in program.lists for x in own)


def test_inference_keeps_nothing_and_has_no_gradients() -> None:
    program = whole(inference(3, 2), skipping(3))
    assert not program.gradients
    forwards = [x for own in program.lists for x in own if isinstance(x, ins.Forward)]
    assert not any(forward.keeps for forward in forwards)
    assert program.edges == skipping(3).edges


def test_a_pause_stands_before_the_first_backward_of_every_device() -> None:
    text = "schedule g stages=2 microbatches=1 delay=0\nplace 0 | - | 1\n0: F0 B0 U\n1:\n2: F0 B0 U"
    program = whole(Schedule.parse(text), chain(2), updates=False, pause=True)
    assert program.lists[1] == (ins.Pause(),)
    for device in (0, 2):
        own = [type(x) for x in program.lists[device]]
        assert own.index(ins.Forward) < own.index(ins.Pause) < own.index(ins.Backward)
        assert own.count(ins.Pause) == 1


def test_other_counts_of_stages_are_refused_naming_both() -> None:
    with pytest.raises(InputError, match="is for 3 stages and the plan has 2; cut the model"):
        Lower(chain(2))(gpipe(3, 1))


def test_halves_of_a_backward_and_a_recompute_have_instructions_of_their_own() -> None:
    rows = ((F(0, 0), R(0, 0), I(0, 0), W(0, 0), U(0)),)
    program = Lower(chain(1))(Schedule("mine", 1, (0,), rows))
    assert program.lists[0] == (
        ins.Forward(0, 0, keeps=False, again=True),
        ins.Recompute(0, 0),
        ins.InputGrad(0, 0),
        ins.WeightGrad(0, 0),
        ins.Barrier(),
        ins.Update(0),
    )


def test_overlapping_batches_read_the_version_of_their_own_batch() -> None:
    rows = ((F(0, 0), B(0, 0, batch=-1), U(0, batch=-1)),)
    program = Lower(chain(1))(Schedule("mine", 1, (0,), rows, delay=2))
    assert program.lists[0] == (
        ins.Forward(0, 0, version=-2),
        ins.Backward(0, 0, version=-3, batch=-1),
        ins.Update(0, reads=-1, writes=0, batch=-1),
    )


@pytest.mark.parametrize("recipe", [two_bw, pipedream])
def test_a_value_is_freed_in_the_window_that_reads_it_last(recipe: Callable[..., Schedule]) -> None:
    schedule = add_recompute(recipe(3, 4), "always")
    program = whole(schedule, skipping(3))
    late = 0
    for window in program.lists:  # the list of one shows no order of reads
        own = [x.later(step) for step, x in in_turn(window, 4, program.depth)]
        last: dict[Buffer, int] = {}
        for position, instruction in enumerate(own):
            for buffer in instruction.uses(program):
                last[buffer] = position
        for position, instruction in enumerate(own):
            if isinstance(instruction, ins.Free):
                between = own[last[instruction.buffer] + 1 : position]
                assert all(isinstance(x, ins.Free) for x in between), str(instruction)
                late += isinstance(own[last[instruction.buffer]], ins.Recompute)
    assert late


def moves(program: Program, device: int) -> list[ins.Instruction]:
    """What a device does, frees apart."""
    return [x for x in program.lists[device] if not isinstance(x, ins.Free)]


def test_skips_travel_straight_to_their_consumer_and_their_gradients_straight_back() -> None:
    program = whole(gpipe(3, 1), skipping(3), updates=False)
    skip, size = Buffer("skip", "h", 0, 2, 0), Buffer("skip", "size", 0, 2, 0)
    back = Buffer("grad", "h", 2, 0, 0)
    first, middle, last = (moves(program, device) for device in range(3))
    assert {ins.Stash(skip), ins.Stash(size), ins.Receive(back)} <= set(first)
    assert {ins.Pop(skip), ins.Pop(size), ins.Send(back)} <= set(last)
    assert not any(getattr(x, "buffer", None) in (skip, size, back) for x in middle)
    assert not any(x.buffer.value == "size" for x in last if isinstance(x, ins.Send))


def test_the_caller_gives_and_gets_values_and_gradients_where_they_are_used_and_made() -> None:
    program = whole(gpipe(3, 1), skipping(3), updates=False)
    first, last = moves(program, 0), moves(program, 2)
    assert first[:2] == [ins.Load(Buffer("in", "x", HOST, 0, 0)), ins.Forward(0, 0)]
    assert first[-2:] == [ins.Backward(0, 0), ins.Output(Buffer("grad", "x", 0, HOST, 0))]
    at = last.index(ins.Backward(2, 0))
    assert last[at - 3 : at] == [
        ins.Output(Buffer("out", "out", 2, HOST, 0)),
        ins.Output(Buffer("out", "loss", 2, HOST, 0)),
        ins.Load(Buffer("grad", "loss", HOST, 2, 0)),
    ]
    assert ins.Load(Buffer("in", "t", HOST, 2, 0)) in last


def test_nothing_moves_between_two_stages_of_one_device() -> None:
    schedule = gpipe(1, 2)
    rows = ((*(F(i, s) for i in range(2) for s in range(2)), B(0, 1), B(0, 0), B(1, 1), B(1, 0)),)
    schedule = Schedule("one", 2, (0, 0), ((*rows[0], U(0), U(1)),))
    program = whole(schedule, chain(2))
    assert not any(isinstance(x, ins.Send | ins.Receive) for x in program.lists[0])


def test_receives_come_in_the_order_of_the_sends_where_they_are_used_in_another() -> None:
    """Down and up again: device 1 uses the gradient before the activation that left earlier."""
    text = (
        "schedule v stages=4 microbatches=2 delay=0\nplace 0 3 | 1 2\n"
        "0: F0@0 F0@3 F1@0 B0@3 B0@0 F1@3 B1@3 B1@0 U@0 U@3\n"
        "1: F0@1 F0@2 B0@2 B0@1 F1@1 F1@2 B1@2 B1@1 U@1 U@2\n"
    )
    program = whole(Schedule.parse(text), chain(4), updates=False)
    late, early = Buffer("grad", "y2", 3, 2, 0), Buffer("act", "y0", 0, 1, 1)
    sent = [x.buffer for x in program.lists[0] if isinstance(x, ins.Send)]
    received = [x.buffer for x in program.lists[1] if isinstance(x, ins.Receive)]
    assert sent == received
    assert received.index(early) < received.index(late)


def test_each_buffer_is_freed_right_after_its_last_use() -> None:
    program = whole(gpipe(3, 2), skipping(3))
    for own in program.lists:
        for position, instruction in enumerate(own):
            if isinstance(instruction, ins.Free):
                before = [x for x in own[:position] if not isinstance(x, ins.Free)][-1]
                uses = (*before.uses(program), *before.makes(program))
                assert instruction.buffer in uses
                assert not any(instruction.buffer in x.uses(program) for x in own[position:])


@pytest.mark.parametrize("each", [communicate, free])
def test_a_pass_out_of_its_order_is_refused(each: Callable[[Program], Program]) -> None:
    with pytest.raises(InputError, match="the passes done are: lower communicate free"):
        each(whole(gpipe(2, 1), chain(2)))


def test_frees_need_communication() -> None:
    with pytest.raises(InputError, match="the passes done are: lower"):
        free(Lower(chain(2))(gpipe(2, 1)))


def test_the_work_grows_with_the_number_of_instructions_alone() -> None:
    def work(microbatches: int) -> int:
        schedule, plan = one_f_one_b(8, microbatches), chain(8)
        return lines(lambda: free(communicate(Lower(plan)(schedule))))

    assert work(128) < 9 * work(16)  # 8 times the instructions
