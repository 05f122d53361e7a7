"""Pictures of programs: every instruction is there, and every transfer has its arrow."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fxpipe.errors import Fault
from fxpipe.extensions.draw.picture import FAULT, GRADIENT, SKIP, Picture
from fxpipe.extensions.draw.program import (
    DETAILED,
    draw_program,
    program_rows,
    sketch_program,
)
from fxpipe.extensions.draw.styles import instruction_style
from fxpipe.extensions.draw.timeline import Timeline
from fxpipe.extensions.replicas import opcodes
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Bucket, Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST, Buffer
from fxpipe.passes.lowering.chain import chain_program
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.passes.lowering.streams import Streams
from fxpipe.passes.schedule import add_reduce
from fxpipe.schedules import gpipe, inference, one_f_one_b, two_bw
from tests.helpers.opcodes import of_extensions
from tests.helpers.plans import chain, skipping

X = Buffer("in", "x", HOST, 0, 0)
Y = Buffer("act", "y", 0, 1, 0)
H = Buffer("skip", "h", 0, 1, 0)
OUT = Buffer("out", "z", 1, HOST, 0)

EVERY: dict[str, ins.Instruction] = {
    "load": ins.Load(X),
    "output": ins.Output(OUT),
    "send": ins.Send(Y),
    "recv": ins.Receive(Y),
    "stash": ins.Stash(H),
    "pop": ins.Pop(H),
    "forward": ins.Forward(0, 0),
    "recompute": ins.Recompute(0, 0),
    "backward": ins.Backward(0, 0),
    "input_grad": ins.InputGrad(0, 0),
    "weight_grad": ins.WeightGrad(0, 0),
    "run": ins.Run("N", 0, 0),
    "norm": ins.Norm(0),
    "clip": ins.Clip(0),
    "free": ins.Free(X),
    "barrier": ins.Barrier(),
    "pause": ins.Pause(),
    "update": ins.Update(0),
} | of_extensions()


def lowered(plan: Plan, schedule: Schedule, *, pause: bool = False) -> Program:
    return free(communicate(Lower(plan, pause=pause)(schedule)))


def walk_program(program: Program) -> Timeline[ins.Instruction]:
    return sketch_program(program, program_rows(program), 0.0)


def by_hand(*lists: tuple[ins.Instruction, ...]) -> Program:
    return Program("by hand", 1, tuple(range(len(lists))), (), lists)


def drawn(picture: Picture) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(picture.pipe("json"))
    return loaded


def legend(picture: Picture) -> set[str]:
    return {node["label"].removesuffix(r"\l") for node in drawn(picture)["objects"]}


def arrows(picture: Picture, tooltip: str) -> list[dict[str, Any]]:
    return [edge for edge in drawn(picture)["edges"] if edge.get("tooltip") == tooltip]


def test_the_samples_are_every_opcode() -> None:
    assert {word: type(made) for word, made in EVERY.items()} == ins.every_opcode()


@pytest.mark.parametrize("word", ins.every_opcode())
def test_every_opcode_is_drawn_and_explained(word: str) -> None:
    # A receive and a pop need a partner; a barrier and a pause must have none that does not come.
    partner = () if word in ("barrier", "pause") else ((ins.Send(Y), ins.Stash(H)),)
    program = by_hand((EVERY[word],), *partner)
    picture = draw_program(program)
    assert word in legend(picture)
    assert instruction_style(EVERY[word], program).label in legend(picture)
    assert "STUCK" not in picture.source


def test_opcodes_look_different() -> None:
    glyphs = [instruction_style(made, by_hand((), ())) for made in EVERY.values()]
    assert len({(made.label, made.look) for made in glyphs}) == len(ins.every_opcode())


@pytest.mark.parametrize(
    "program",
    [
        lowered(chain(1), one_f_one_b(1, 2)),
        lowered(chain(4), one_f_one_b(4, 6)),
        lowered(skipping(4), gpipe(4, 3)),
        lowered(skipping(3), gpipe(3, 2), pause=True),
        lowered(skipping(3), inference(3, 2)),
    ],
    ids=lambda program: f"{program.name}-{program.devices}-{program.microbatches}",
)
def test_every_instruction_of_a_real_program_has_one_box(program: Program) -> None:
    objects = drawn(draw_program(program))["objects"]
    boxes = [node["tooltip"] for node in objects if "tooltip" in node]
    assert len(boxes) == sum(map(len, program.lists)) <= DETAILED
    assert not walk_program(program).stuck


def test_transfers_are_arrows_and_skips_are_dashed() -> None:
    picture = draw_program(lowered(skipping(3), gpipe(3, 1)))
    (act,) = arrows(picture, "act:y0:0->1[0]")
    (skip,) = arrows(picture, "skip:h:0->2[0]")
    (gradient,) = arrows(picture, "grad:y0:1->0[0]")
    assert (act["style"], skip["style"], gradient["style"]) == ("solid", "dashed", "solid")
    assert (skip["color"], gradient["color"]) == (SKIP, GRADIENT)
    assert {"value to the next stage", "value that skips stages", "gradient"} <= legend(picture)


@pytest.mark.parametrize(("buffer", "down"), [("act:y0:0->1[0]", 1), ("grad:y0:1->0[0]", -1)])
def test_an_arrow_joins_the_edges_of_its_boxes_that_face_each_other(buffer: str, down: int) -> None:
    picture = draw_program(lowered(chain(2), one_f_one_b(2, 1)))
    boxes = {node["tooltip"]: node for node in drawn(picture)["objects"] if "tooltip" in node}
    (edge,) = arrows(picture, buffer)
    tip, start, *_ = edge["pos"].removeprefix("e,").split()
    for point, box, side in ((start, f"send {buffer}", -down), (tip, f"recv {buffer}", down)):
        x, y = map(float, point.split(","))
        middle, height = map(float, boxes[box]["pos"].split(","))
        assert abs(x - middle) <= 36 * float(boxes[box]["width"])
        assert y == pytest.approx(height + side * 36 * float(boxes[box]["height"]), abs=0.1)


def test_the_parts_of_a_backward_take_together_what_a_whole_one_takes() -> None:
    schedule = add_reduce(one_f_one_b(2, 2))
    parted = chain_program(schedule, buckets={0: [Bucket((k,)) for k in range(4)]})
    whole = chain_program(schedule)
    assert any(isinstance(x, opcodes.PartialBackward) for x in parted.lists[0])
    took = [
        sum(s.end - s.start for s in walk_program(program).spans if s.task.letter == "B")
        for program in (parted, whole)
    ]
    assert took == [8, 8]


def test_a_transfer_within_a_device_is_drawn_too() -> None:
    picture = draw_program(by_hand((ins.Send(Y), ins.Receive(Y))))
    assert len(arrows(picture, str(Y))) == 1


def test_of_a_large_program_the_tasks_are_drawn_to_scale_as_its_simulation_is() -> None:
    program = lowered(chain(4), one_f_one_b(4, 32))
    assert sum(map(len, program.lists)) > DETAILED
    picture = draw_program(program)
    assert picture.source == program.simulate().draw().source
    assert not arrows(picture, "act:y0:0->1[31]")
    boxes = drawn(picture)["objects"]
    texts = {node["tooltip"] for node in boxes if "tooltip" in node}
    assert Counter(text.partition(",")[0] for text in texts) == {
        "forward": 128,
        "backward": 128,
        "update": 4,
    }


def test_receives_wait_for_sends_and_barriers_for_all() -> None:
    walked = walk_program(
        by_hand(
            (ins.Forward(0, 0), ins.Send(Y), ins.Barrier(), ins.Update(0)),
            (ins.Receive(Y), ins.Forward(1, 0), ins.Backward(1, 0), ins.Barrier(), ins.Update(1)),
        )
    )
    starts = [(span.device, span.start) for span in walked.spans]
    assert starts == [(0, 0), (0, 1), (0, 4), (0, 4), (1, 1), (1, 1), (1, 2), (1, 4), (1, 4)]


@pytest.mark.parametrize(
    "rows",
    [
        ((ins.Forward(0, 0), ins.Receive(Y), ins.Send(H)),),
        ((ins.Pop(H), ins.Stash(H)),),
        ((ins.Barrier(), ins.Update(0)), (ins.Forward(1, 0),)),
        ((ins.Pause(), ins.Backward(0, 0)), (ins.Forward(1, 0),)),
    ],
)
def test_a_program_that_never_ends_is_marked(rows: tuple[tuple[ins.Instruction, ...], ...]) -> None:
    picture = draw_program(by_hand(*rows), faults=())
    borders = [node.get("color") for node in drawn(picture)["objects"]]
    assert borders.count(FAULT) == 2  # the instruction and the legend
    assert "STUCK" in picture.source
    boxes = [node["tooltip"] for node in drawn(picture)["objects"] if "tooltip" in node]
    assert len(boxes) == sum(map(len, rows))


def test_what_an_earlier_window_sent_is_there() -> None:
    program = lowered(chain(2), two_bw(2, 2)).verify()
    assert "STUCK" not in draw_program(program).source


def test_a_stuck_instruction_is_marked_in_a_large_program_too() -> None:
    program = lowered(chain(4), one_f_one_b(4, 32))
    first = tuple(i for i in program.lists[0] if not isinstance(i, ins.Send))
    picture = draw_program(replace(program, lists=(first, *program.lists[1:])))
    nodes = drawn(picture)["objects"]
    red = [node["tooltip"] for node in nodes if node.get("color") == FAULT and "tooltip" in node]
    # Device 1 lacks all that device 0 sends; the others wait.
    assert sum(text.startswith("recv act:y0:0->1[") for text in red) == 32
    assert len(red) == 35
    assert "STUCK" in picture.source
    assert "1. device 1, position 0, recv act:y0:0->1[0]: device 0 never sends it" in picture.source


def test_devices_with_several_stages_name_them() -> None:
    program = Program(
        "looped", 1, (0, 0), (), ((ins.Forward(0, 0), ins.Forward(1, 0), ins.Update(1)),)
    )
    assert {"F0@0", "F0@1", "U@1", "device 0 (stages 0, 1)"} <= legend(draw_program(program))


def test_an_empty_program_can_be_drawn() -> None:
    assert draw_program(by_hand(())).pipe("svg")
    assert draw_program(by_hand()).pipe("svg")


def test_streams_are_rows_and_events_arrows() -> None:
    program = Streams()(lowered(chain(2), one_f_one_b(2, 2)))
    picture = draw_program(program)
    assert "STUCK" not in picture.source
    assert {
        "device 0 · compute",
        "device 0 · in",
        "device 0 · in1",
        "device 1 · compute",
        "device 1 · in",
        "device 1 · in0",
        "waits for an event",
    } <= legend(picture)
    boxes = [node["tooltip"] for node in drawn(picture)["objects"] if "tooltip" in node]
    assert len(boxes) == sum(map(len, program.lists))
    dotted = [edge for edge in drawn(picture)["edges"] if edge.get("style") == "dotted"]
    recorded = {
        launch.record: (device, launch.stream)
        for device, launches in enumerate(program.launches)
        for launch in launches
    }
    waits = [
        event
        for device, launches in enumerate(program.launches)
        for launch in launches
        for event in launch.waits
        if recorded[event] != (device, launch.stream)
    ]
    assert len(dotted) == len(waits) + 1  # and the legend's


def test_what_waits_for_an_event_starts_after_it() -> None:
    program = Streams()(lowered(chain(3), one_f_one_b(3, 4)))
    rows = program_rows(program)
    spans = {(s.device, s.position): s for s in sketch_program(program, rows, 0.25).spans}
    assert len(spans) == sum(map(len, program.lists))
    for place, sources in rows.waits.items():
        assert all(spans[source].end <= spans[place].start for source in sources)
    forward = next(s for s in spans.values() if s.task == ins.Forward(2, 0))
    assert forward.start >= 2  # two stages came before


def test_faults_of_a_program_with_streams_stand_at_its_rows() -> None:
    program = Streams()(lowered(chain(2), one_f_one_b(2, 2)))
    position = next(at for at, launch in enumerate(program.launches[1]) if launch.stream == "in0")
    picture = draw_program(program, faults=[Fault("late", "hurry", 1, position)])
    red = [
        node["tooltip"]
        for node in drawn(picture)["objects"]
        if node.get("color") == FAULT and "tooltip" in node
    ]
    assert red == ["recv act:y0:0->1[0]"]
