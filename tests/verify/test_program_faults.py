"""What the verifier of programs says: each fault by name, and all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import fxpipe
from fxpipe.extend import find
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.ir.value import HOST, Buffer, Edge
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, inference, one_f_one_b
from fxpipe.text.program import print_instruction
from fxpipe.verify.program import verify_program
from tests.helpers.faults import faults_of
from tests.helpers.plans import add_reduce, chain, skipping
from tests.verify.test_program import SHARED, lowered

Choose = Callable[[ins.Instruction], bool]


def without(program: Program, choose: Choose) -> Program:
    """The program without the instructions that are chosen."""
    lists = tuple(tuple(x for x in own if not choose(x)) for own in program.lists)
    return replace(program, lists=lists)


def first(program: Program, device: int, kind: type[ins.Instruction]) -> ins.Instruction:
    return next(x for x in program.lists[device] if isinstance(x, kind))


def exchanged(
    program: Program, device: int, one: ins.Instruction, other: ins.Instruction
) -> Program:
    """The program with two instructions of a device in each other's place."""
    swap = {one: other, other: one}
    own = tuple(swap.get(x, x) for x in program.lists[device])
    return replace(program, lists=(*program.lists[:device], own, *program.lists[device + 1 :]))


PROGRAM = lowered(one_f_one_b(2, 2), chain(2))


def test_a_missing_send_names_the_receive_that_waits_for_it() -> None:
    send = first(PROGRAM, 0, ins.Send)
    faults = [str(fault) for fault in faults_of(without(PROGRAM, lambda x: x == send))]
    assert faults == [
        "device 1, position 0, recv act:y0:0->1[0]: device 0 never sends it; send it there"
    ]


def test_a_send_is_judged_by_the_device_that_computes_its_micro_batch() -> None:
    program = lowered(SHARED, chain(2))
    own = list(program.lists[0])
    at, send = next((at, x) for at, x in enumerate(own) if "send act" in print_instruction(x))
    assert isinstance(send, ins.Send) and send.buffer.microbatch == 0
    own.insert(at + 1, ins.Send(send.buffer._replace(microbatch=1)))
    wrong = replace(program, lists=(tuple(own), *program.lists[1:]))
    assert (at + 1, "the value goes from device 2 to device 1") in [
        (fault.position, fault.what) for fault in faults_of(wrong) if fault.device == 0
    ]


def test_a_missing_receive_names_the_send_and_the_read() -> None:
    receive = first(PROGRAM, 1, ins.Receive)
    faults = [str(fault) for fault in faults_of(without(PROGRAM, lambda x: x == receive))]
    assert faults == [
        "device 1, position 0, forward s1[0] v0 keep: act:y0:0->1[0] is never made on this device; "
        "load, receive or compute it before",
        "device 1, position 1, free act:y0:0->1[0]: act:y0:0->1[0] is never made on this device; "
        "load, receive or compute it before",
        "device 0, position 3, send act:y0:0->1[0]: device 1 never receives it; receive it there",
    ]


def test_receives_in_another_order_than_the_sends_are_refused() -> None:
    program = lowered(gpipe(2, 2), chain(2))
    one, other = (x for x in program.lists[1] if isinstance(x, ins.Receive))
    faults = faults_of(exchanged(program, 1, one, other))
    assert (
        "device 1, position 0, recv act:y0:0->1[1]: device 0 sends act:y0:0->1[0] before it, at "
        "position 3; receive in the order of the sends"
    ) in map(str, faults)


def test_a_deadlock_is_shown_device_by_device() -> None:
    """Device 0 takes a gradient before it sends what that gradient comes from."""
    program = communicate(Lower(chain(2))(one_f_one_b(2, 1)))
    send, receive = first(program, 0, ins.Send), first(program, 0, ins.Receive)
    assert [str(fault) for fault in faults_of(exchanged(program, 0, send, receive))] == [
        "device 0, position 2, recv grad:y0:1->0[0]: deadlock: it waits until device 1 is past "
        "position 5, send grad:y0:1->0[0], and that device is stuck in the same circle; "
        "send earlier or receive later on one of the devices of the circle",
        "device 1, position 0, recv act:y0:0->1[0]: deadlock: it waits until device 0 is past "
        "position 3, send act:y0:0->1[0], and that device is stuck in the same circle; "
        "send earlier or receive later on one of the devices of the circle",
    ]


def test_a_device_without_its_barrier_is_named() -> None:
    own = tuple(x for x in PROGRAM.lists[1] if not isinstance(x, ins.Barrier))
    faults = faults_of(replace(PROGRAM, lists=(PROGRAM.lists[0], own)))
    assert any(fault.device == 1 and "no barrier" in fault.what for fault in faults)
    assert any("its barriers and pauses are" in fault.what for fault in faults)


def test_no_update_may_stand_without_a_barrier() -> None:
    faults = faults_of(without(PROGRAM, lambda x: isinstance(x, ins.Barrier)))
    assert [fault.what for fault in faults] == ["no barrier comes before it"] * 2


def test_a_barrier_before_the_last_gradient_deadlocks_or_is_refused() -> None:
    program = lowered(one_f_one_b(2, 1), chain(2))
    backward, barrier = first(program, 0, ins.Backward), first(program, 0, ins.Barrier)
    faults = faults_of(exchanged(program, 0, backward, barrier))
    assert any(fault.what == "it comes after a barrier" for fault in faults)


def test_a_buffer_that_is_never_freed_is_a_leak() -> None:
    gone = first(PROGRAM, 0, ins.Free)
    program = without(PROGRAM, lambda x: x == gone)
    assert [str(fault) for fault in faults_of(program)] == [
        "device 0, position 0, load in:x:host->0[0]: in:x:host->0[0] is still there when its "
        "batch is through; free it after its last use"
    ]
    verify_program(replace(program, passes=("lower", "communicate")))


def test_a_buffer_freed_before_its_last_use_is_named_at_that_use() -> None:
    program = lowered(gpipe(1, 1), chain(1))
    faults = faults_of(exchanged(program, 0, first(program, 0, ins.Output), ins.Free(_loss())))
    assert [(fault.subject, fault.what) for fault in faults] == [
        ("output out:loss:0->host[0]", "out:loss:0->host[0] is freed already")
    ]


def test_a_buffer_freed_twice_is_named() -> None:
    program = lowered(gpipe(1, 1), chain(1))
    lists = ((*program.lists[0], ins.Free(_loss())),)
    (fault,) = faults_of(replace(program, lists=lists))
    assert fault.what == "out:loss:0->host[0] is freed already"


def _loss() -> Buffer:
    return next(
        x.buffer for x in lowered(gpipe(1, 1), chain(1)).lists[0] if isinstance(x, ins.Output)
    )


def test_a_backward_on_another_version_than_its_forward_is_refused() -> None:
    backward = ins.Backward(0, 0)
    lists = tuple(
        tuple(replace(x, version=1) if x == backward else x for x in own) for own in PROGRAM.lists
    )
    (fault,) = faults_of(replace(PROGRAM, lists=lists))
    assert fault.what == "it reads version 1, and its forward read version 0"


def test_forwards_of_a_stage_in_another_order_are_refused_though_all_else_is_right() -> None:
    text = "schedule mine stages=1 microbatches=3 delay=0\nplace 0\n0: F0 F2 F1 B0 B2 B1 U"
    program = lowered(Schedule.parse(text), chain(1))
    (fault,) = faults_of(program)
    assert (fault.subject, fault.what) == ("forward s0[1] v0 keep", "it comes after micro-batch 2")


@pytest.mark.parametrize("twice", [ins.Forward(0, 0), ins.Backward(0, 0), ins.Update(0)])
def test_compute_that_is_there_twice_is_named_before_anything_moves(twice: ins.Instruction) -> None:
    program = Lower(chain(1))(gpipe(1, 1))
    own = tuple(y for x in program.lists[0] for y in ((x, x) if x == twice else (x,)))
    faults = faults_of(replace(program, lists=(own,)))
    assert faults[0].what.startswith("it is there already: device 0, position ")


@pytest.mark.parametrize(("recipe", "keeps"), [(gpipe, False), (inference, True)])
def test_a_forward_keeps_what_a_backward_needs_and_nothing_else(
    recipe: Recipe, keeps: bool
) -> None:
    program = Lower(chain(1))(recipe(1, 1))
    lists = ((ins.Forward(0, 0, keeps=keeps), *program.lists[0][1:]),)
    (fault,) = faults_of(replace(program, lists=lists))
    assert fault.position == 0
    assert "it keeps" in fault.what


def test_what_needs_gradients_stands_before_the_update_and_a_clip_behind_the_norm() -> None:
    fxpipe.define_task("N", "norm", run=lambda context: None, cost=0.1, reads=("gradients",))
    head = "program mine microbatches=1\nplace 0\npasses lower\ndevice 0\n"
    head += "forward s0[0] v0 keep\nbackward s0[0] v0\nbarrier\n"
    program = Program.parse(head + "clip s0\nnorm s0\nupdate s0 v0 -> v1\nrun N s0 v1\n")
    found = [(fault.position, fault.what) for fault in faults_of(program)]
    del KINDS["N"]
    assert found == [
        (3, "it comes before norm s0, position 4, which it needs"),
        (6, "it needs gradients that update s0 v0 -> v1, position 5, has used up"),
    ]


def test_an_output_that_the_caller_never_gets_is_named() -> None:
    program = without(lowered(inference(2, 3), chain(2)), lambda x: isinstance(x, ins.Output))
    (fault,) = faults_of(program)
    assert str(fault) == (
        "device 1, edge out loss 1->host: the caller never gets out loss of micro-batches 0-2; "
        "add an output after the instruction that makes it"
    )


def test_the_gradient_of_an_input_that_the_caller_never_gets_is_named() -> None:
    program = lowered(gpipe(3, 2), skipping(3))
    program = without(program, lambda x: isinstance(x, ins.Output) and x.buffer.kind == "grad")
    (fault,) = faults_of(program)
    assert fault.what == "the caller never gets grad x of micro-batches 0-1"


def test_a_pause_holds_back_gradients_and_nothing_else() -> None:
    program = lowered(gpipe(1, 1), chain(1), updates=False, pause=True)
    load = next(x for x in program.lists[0] if isinstance(x, ins.Load) and x.buffer.kind == "grad")
    faults = faults_of(exchanged(program, 0, load, ins.Pause()))
    assert [fault.what for fault in faults] == ["it comes before the pause"]
    output = first(program, 0, ins.Output)
    faults = faults_of(exchanged(program, 0, output, ins.Pause()))
    assert "it comes after the pause" in [fault.what for fault in faults]


def test_every_fault_is_reported_at_once() -> None:
    late, odd = Buffer("in", "x", HOST, 0, 9), Buffer("act", "z", 1, 0, 0)
    lists = (
        (ins.Forward(7, 0), ins.Update(-1), ins.Load(late), *PROGRAM.lists[0], ins.Free(late)),
        (ins.Forward(0, 0), ins.Backward(1, 9), ins.Send(odd), *PROGRAM.lists[1]),
    )
    found = [fault.what for fault in faults_of(replace(PROGRAM, lists=lists))]
    assert found == [
        "there is no stage 7",
        "there is no stage -1",
        "there is no micro-batch 9",
        "there is no micro-batch 9",
        "stage 0 is on device 0",
        "there is no micro-batch 9",
        "no edge carries this value",
    ]


def test_gradients_on_their_way_between_replicas_are_not_to_be_read() -> None:
    fxpipe.define_task("N", "look", run=lambda context: None, reads=("gradients",), cost=1)
    try:
        program = lowered(add_reduce(one_f_one_b(2, 1)), chain(2))
        own, run = list(program.lists[0]), find("instruction", "run")("N", 0)
        at = [x.opcode for x in own].index("all_gather")
        early = [*own[:at], run, *own[at:]]
        (fault,) = faults_of(replace(program, lists=(tuple(early), program.lists[1])))
        assert str(fault) == (
            f"device 0, position {at}, run N s0 v0: it needs gradients that reduce_scatter s0, "
            f"position {at - 1}, has sent to be summed; move it before that, or behind the stage's "
            "all_gather"
        )
        for place in at - 1, at + 1:
            right = [*own[:place], run, *own[place:]]
            replace(program, lists=(tuple(right), program.lists[1])).verify()
    finally:
        del KINDS["N"]


def test_sums_over_replicas_are_there_exactly_where_there_are_several() -> None:
    program = lowered(add_reduce(one_f_one_b(2, 1)), chain(2))
    found = [fault.what for fault in faults_of(replace(program, replicas=1))]
    assert found == ["the program has one replica"] * 4
    found = [str(fault) for fault in faults_of(replace(PROGRAM, replicas=2))]
    assert found[:2] == [
        "device 0: stage 0 has no reduce; let every stage sum its gradients over the replicas, or "
        "none",
        "device 0: stage 0 has no all_gather; add it",
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"replicas": 0}, "it has 0 replicas"),
        ({"microbatches": 0}, "it has 0 micro-batches"),
        ({"placement": ()}, "it has no stages"),
        ({"placement": (0, 2)}, "stage 1 is placed on device 2"),
        ({"edges": (Edge(0, 2, "y"),)}, "stage 2 does not exist"),
        ({"edges": (Edge(1, 0, "y"),)}, "runs backward"),
        ({"edges": (Edge(HOST, HOST, "y"),)}, "starts where it ends"),
        ({"edges": (Edge(0, 1, "y z"),)}, "'y z' is no name of a value"),
        ({"edges": (Edge(0, 1, "y"), Edge(0, 1, "y"))}, "is there twice"),
        ({"edges": (Edge(0, 1, "y"), Edge(1, HOST, "y"))}, "comes from stage 0 and stage 1"),
    ],
)
def test_counts_placement_and_edges_are_checked_first(change: dict[str, object], what: str) -> None:
    faults = faults_of(replace(PROGRAM, **change))  # type: ignore[arg-type]
    assert what in [fault.what for fault in faults]


@pytest.mark.parametrize("stage", [-3, -1, 2])
def test_a_computation_of_a_stage_that_is_not_there_is_told(stage: int) -> None:
    forward = first(PROGRAM, 0, ins.Forward)
    program = exchanged(PROGRAM, 0, forward, ins.Forward(stage, 0))
    assert f"there is no stage {stage}" in [fault.what for fault in faults_of(program)]
