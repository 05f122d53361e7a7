"""How lowering sums gradients over replicas: when sums begin, and who waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fxpipe
from fxpipe.errors import InputError
from fxpipe.extensions.clipping.opcodes import Clip, Norm
from fxpipe.extensions.own_tasks.opcodes import Run
from fxpipe.extensions.replicas import opcodes
from fxpipe.extensions.replicas.lowering import add_reduce, gather_weights
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, inference, one_f_one_b, two_bw
from fxpipe.text.program import print_instruction
from tests.helpers.plans import chain


def summed(text: str, *, updates: bool = True) -> Program:
    """A schedule of one stage a device, lowered for three replicas."""
    schedule = Schedule.parse(f"schedule mine stages=2 microbatches=1 {text}").verify()
    return Lower(chain(2), updates=updates, replicas=3)(schedule)


def summing(program: Program) -> list[list[str]]:
    """What each device does that concerns sums over replicas."""
    kinds = opcodes.Summing | Norm | Clip | Run | ins.Barrier | ins.Update
    return [[print_instruction(x) for x in own if isinstance(x, kinds)] for own in program.lists]


def test_sums_over_replicas_begin_at_their_task_and_are_waited_for_before_the_barrier() -> None:
    text = "delay=0\nplace 0 | 1\n0: F0 B0 A U\n1: F0 B0 A U\n"
    for updates, behind in (True, ["barrier", "update s1 v0 -> v1"]), (False, []):
        program = summed(text, updates=updates)
        assert program.replicas == 3
        assert summing(program)[1] == ["reduce_scatter s1", "all_gather s1", *behind]


def test_buckets_begin_to_be_summed_before_the_backward_ahead_of_the_reduce_is_through() -> None:
    plan = chain(2)
    first, second = plan.stages
    first = replace(first, buckets=((1,), (0, 2)))
    second = replace(second, buckets=tuple([(k,) for k in range(3)]))
    plan = replace(plan, stages=(first, second))
    text = "schedule mine stages=2 microbatches=2 delay=0\nplace 0 | 1\n"
    text += "0: F0 F1 B0 B1 A U\n1: F0 I0 F1 I1 W0 W1 A U\n"
    schedule = Schedule.parse(text).verify()
    program = Lower(plan, replicas=2)(schedule)
    own, other = [[*map(print_instruction, row)] for row in program.lists]
    assert own[3:8] == [
        "partial_backward B s0[1] v0 bucket 0",
        "rest_backward s0[1] v0",
        "reduce_scatter s0",
        "all_gather s0",
        "barrier",
    ]
    assert other[5:9] == [
        "partial_backward W s1[1] v0 bucket 0",
        "partial_backward W s1[1] v0 bucket 1",
        "rest_weight_grad s1[1] v0",
        "reduce_scatter s1",
    ]
    assert "bucket" not in str(Lower(plan, replicas=1)(schedule))
    text = "schedule mine stages=2 microbatches=1 delay=0\nplace 0 1\n"
    text += "0: F0@0 F0@1 B0@1 B0@0 A@1 A@0 U@0 U@1\n"
    late = Lower(plan, replicas=2)(Schedule.parse(text).verify())
    assert [each for each in map(print_instruction, late.lists[0]) if "partial" in each] == []


@pytest.mark.smoke
def test_sums_over_replicas_are_waited_for_where_they_are_needed_first() -> None:
    clips = "delay=0\nplace 0 1\n0: F0@0 F0@1 B0@1 A@1 B0@0 A@0 C@0 C@1 U@0 U@1\n"
    assert summing(summed(clips))[0][:8] == [
        "reduce_scatter s1",
        "reduce_scatter s0",
        "all_gather s1",
        "norm s1",
        "all_gather s0",
        "norm s0",
        "clip s0",
        "clip s1",
    ]
    late = "delay=1\nplace 0 | 1\n0: F0 U' B0 A\n1: F0 B0 A' U'\n"
    assert summing(summed(late)) == [
        ["all_gather s0'", "update s0' v-1 -> v0", "reduce_scatter s0"],
        ["reduce_scatter s1'", "all_gather s1'", "update s1' v-1 -> v0"],
    ]


def test_a_task_of_ones_own_that_reads_gradients_waits_for_their_sums() -> None:
    fxpipe.define_task("N", "look", run=lambda context: None, reads=("gradients",), cost=1)
    fxpipe.define_task("L", "look", run=lambda context: None, reads=("parameters",), cost=1)
    try:
        text = "delay=0\nplace 0 | 1\n0: F0 B0 N A L U\n1: F0 B0 A L N U\n"
        assert [own[:4] for own in summing(summed(text))] == [
            ["run N s0 v0", "reduce_scatter s0", "run L s0 v0", "all_gather s0"],
            ["reduce_scatter s1", "run L s1 v0", "all_gather s1", "run N s1 v0"],
        ]
    finally:
        del KINDS["N"], KINDS["L"]


def test_with_one_replica_a_reduce_becomes_nothing() -> None:
    schedule = one_f_one_b(3, 4)
    assert Lower(chain(3))(add_reduce(schedule)) == Lower(chain(3))(schedule)


def test_several_replicas_need_a_schedule_that_sums_their_gradients() -> None:
    with pytest.raises(InputError, match=r"has no A, .* 2 replicas would never be summed"):
        Lower(chain(2), replicas=2)(gpipe(2, 2))
    assert Lower(chain(2), replicas=2)(inference(2, 2)).replicas == 2


def test_with_shards_weights_are_gathered_right_behind_their_update() -> None:
    plain = Lower(chain(2), replicas=2)(add_reduce(one_f_one_b(2, 2)))
    for device, own in enumerate(gather_weights(plain).lists):
        told = [*map(print_instruction, own)]
        assert told[-3:] == ["barrier", f"update s{device} v0 -> v1", f"gather_weights s{device}"]
    window = gather_weights(Lower(chain(2), replicas=2)(add_reduce(two_bw(2, 4))))
    for own in window.lists:
        told = [*map(print_instruction, own)]
        at = next(at for at, line in enumerate(told) if line.startswith("update"))
        batch = told[at].split()[1]
        assert told[at + 1] == f"gather_weights {batch}"
