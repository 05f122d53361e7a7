"""Pictures of programs: every instruction is there, in order, and arrows for what it waits for."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import VerificationError
from fxpipe.extensions.draw.picture import FAINT, FAULT, GRADIENT, SKIP, TASKS, Picture
from fxpipe.extensions.draw.program import DEVICES, ROWS, draw_program
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Launch
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES, Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST, Buffer, Edge
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, one_f_one_b, two_bw
from fxpipe.text.program import print_instruction
from tests.helpers.mutants import edits
from tests.helpers.opcodes import of_extensions
from tests.helpers.plans import both, chain, chain_program, plan_of, skipping

LIBRARY = sorted(name for name, recipe in RECIPES.items() if isinstance(recipe, Recipe))
At = tuple[int, int]
"""Device and position."""


@dataclass(frozen=True)
class Box:
    """An instruction's box, as it was drawn; ``x`` and ``y`` are its middle, y down."""

    label: str
    tooltip: str
    x: float
    y: float
    node: dict[str, Any]


def lowered(schedule: Schedule, *, skips: bool = False, pause: bool = False) -> Program:
    plan = (skipping if skips and schedule.stages > 2 else chain)(schedule.stages)
    lower = Lower(plan, pause=pause, updates="U" in schedule.kinds and not pause)
    return free(communicate(lower(schedule)))


def loaded(picture: Picture) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(picture.pipe("json"))
    return found


def boxes(picture: Picture) -> dict[At, Box]:
    found = {}
    for node in loaded(picture).get("objects", []):
        if match := re.fullmatch(r"instruction(\d+)_(\d+)", node["name"]):
            x, y = map(float, node["pos"].split(","))
            at = int(match[1]), int(match[2])
            found[at] = Box(node["label"], node["tooltip"], x, -y, node)
    return found


def arrows(picture: Picture) -> list[tuple[At, At, dict[str, Any]]]:
    """Device and position of both ends of each arrow between instructions."""
    drawn = loaded(picture)
    names = {node["_gvid"]: node["name"] for node in drawn["objects"]}
    found = []
    for edge in drawn.get("edges", []):
        ends = [re.fullmatch(r"instruction(\d+)_(\d+)", names[edge[k]]) for k in ("tail", "head")]
        if all(ends):
            tail, head = ((int(end[1]), int(end[2])) for end in ends if end)
            found.append((tail, head, edge))
    return found


def texts(picture: Picture) -> list[str]:
    return [node["label"].removesuffix(r"\l") for node in loaded(picture).get("objects", [])]


def in_text(program: Program, *words: str) -> dict[str, At]:
    """What the program's text says behind one of these words → device and position."""
    found: dict[str, At] = {}
    device, position = -1, 0
    for line in str(program).splitlines():
        if line.startswith("device "):
            device, position = device + 1, 0
        elif device >= 0:
            word, *operands = line.split()
            if word in words:
                found[operands[0]] = device, position
            position += 1
    return found


def assert_whole(program: Program) -> Picture:
    """Each instruction has one box with its text, below what it waits for; each transfer and each
    event has its arrow."""
    picture = draw_program(program)
    drawn = boxes(picture)
    assert {at: box.label for at, box in drawn.items()} == {
        (device, position): print_instruction(x)
        for device, row in enumerate(program.lists)
        for position, x in enumerate(row)
    }
    columns = defaultdict(list)
    for at in sorted(drawn):
        launch = program.launches[at[0]][at[1]] if program.launches else Launch()
        columns[at[0], launch.stream].append(drawn[at])
    for column in columns.values():
        assert len({box.x for box in column}) == 1
        assert all(above.y < below.y for above, below in pairwise(column))
    assert len({column[0].x for column in columns.values()}) == len(columns)
    found = arrows(picture)
    sent, received = in_text(program, "send", "stash"), in_text(program, "recv", "pop")
    transfers = {(sent[buffer], at, buffer) for buffer, at in received.items() if buffer in sent}
    told = {edge["tooltip"]: (tail, head) for tail, head, edge in found}
    assert {(*told[buffer], buffer) for *_, buffer in transfers} == transfers
    waits = {
        (device, position, str(event))
        for device, launches in enumerate(program.launches)
        for position, launch in enumerate(launches)
        for event in launch.waits
    }
    recorded = {
        str(launch.record): (device, position, launch.stream)
        for device, launches in enumerate(program.launches)
        for position, launch in enumerate(launches)
        if launch.record
    }
    crossing = {
        (recorded[event][:2], (device, position), event)
        for device, position, event in waits
        if event in recorded
        and (device, program.launches[device][position].stream) != recorded[event][::2]
    }
    dotted = {(a, b, edge["tooltip"]) for a, b, edge in found if edge["style"] == "dotted"}
    assert dotted == crossing
    assert len(found) == len(transfers) + len(crossing)
    assert all(drawn[tail].y < drawn[head].y for tail, head, _ in found)
    assert "STUCK" not in picture.source
    return picture


@given(st.sampled_from(LIBRARY), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.booleans())
def test_a_picture_has_every_instruction_in_order_and_every_wait(
    name: str, p: int, m: int, skips: bool, streams: bool
) -> None:
    p = 2 * ((p + 1) // 2) if name == "chimera" else p
    program = lowered(RECIPES[name](p, p * m), skips=skips)
    picture = draw_program(program)
    if "only rows" in picture.source:
        assert len({box.y for box in boxes(picture).values()}) <= ROWS
    else:
        assert_whole(Streams()(program) if streams and not program.copies else program)


def test_transfers_are_named_by_their_value_and_dashed_past_stages() -> None:
    picture = assert_whole(lowered(gpipe(3, 1), skips=True))
    looks = {edge["tooltip"]: (edge["style"], edge["color"]) for *_, edge in arrows(picture)}
    assert looks["skip:h:0->2[0]"] == ("dashed", SKIP)
    assert looks["act:y0:0->1[0]"][0] == "solid"
    assert looks["grad:y0:1->0[0]"] == ("solid", GRADIENT)
    assert {"y0[0]", "h[0]", "size[0]"} <= set(texts(picture))
    assert {"value to the next stage", "value that skips stages", "gradient"} <= set(texts(picture))


def test_tasks_have_their_colours_and_frees_are_faint() -> None:
    program = lowered(one_f_one_b(2, 2))
    for at, box in boxes(draw_program(program)).items():
        x = program.lists[at[0]][at[1]]
        if x.letter is not None:
            assert box.node["fillcolor"] == TASKS[x.letter]
        assert (box.node["fontcolor"] == FAINT) is isinstance(x, ins.Free)


def test_streams_are_columns_and_tooltips_tell_events() -> None:
    program = Streams()(lowered(one_f_one_b(2, 2)))
    picture = assert_whole(program)
    assert {"device 0", "device 1", "compute", "in", "in0", "in1"} <= set(texts(picture))
    (at,) = (at for at, box in boxes(picture).items() if box.label == "recv act:y0:0->1[0]")
    launch = program.launches[at[0]][at[1]]
    told = [f"position {at[1]}: recv act:y0:0->1[0]", *(f"waits for {e}" for e in launch.waits)]
    assert boxes(picture)[at].tooltip.replace("&#45;", "-").replace("&gt;", ">") == ", ".join(
        [*told, f"records {launch.record}"]
    )


def test_what_an_earlier_step_has_sent_has_no_arrow_and_that_is_told() -> None:
    picture = assert_whole(lowered(two_bw(2, 2)))
    heads = {head for _, head, _ in arrows(picture)}
    without = {b.label for at, b in boxes(picture).items() if at not in heads}
    assert "recv grad:y0:1->0[1']" in without
    assert "recv grad:y0:1->0[0]" not in without
    assert "recv without an arrow: sent in an earlier step" in texts(picture)
    assert "the batch before" in texts(picture)


def test_instructions_at_fault_are_red_and_the_faults_listed() -> None:
    program = lowered(one_f_one_b(2, 3))
    at = program.lists[0].index(ins.Send(Buffer("act", "y0", 0, 1, 1)))
    rest = (*program.lists[0][:at], *program.lists[0][at + 1 :])
    broken = replace(program, lists=(rest, program.lists[1]))
    with pytest.raises(VerificationError) as caught:
        broken.verify()
    picture = broken.draw()
    drawn = boxes(picture)
    red = {k for k, box in drawn.items() if box.node.get("color") == FAULT}
    faults = {(fault.device, fault.position) for fault in caught.value.faults}
    dashed = {k for k in red if "dashed" in drawn[k].node["style"]}
    assert red - dashed == faults
    assert {drawn[k].label for k in dashed} == {"recv grad:y0:1->0[1]"}  # which waits for it
    assert len(drawn) == sum(map(len, broken.lists))
    shown = texts(picture)
    assert all(f"{n}. {f}" in shown for n, f in enumerate(caught.value.faults, start=1))
    assert {"at fault", "waits for ever", "never runs"} <= set(shown)
    assert "image/svg+xml" in broken._repr_mimebundle_()


def test_a_large_program_is_drawn_in_part_and_that_is_told() -> None:
    program = lowered(one_f_one_b(8, 16))
    picture = draw_program(program)
    drawn = boxes(picture)
    assert ROWS - 2 < len({box.y for box in drawn.values()}) <= ROWS
    assert {device for device, _ in drawn} == {*range(DEVICES)}
    (told,) = (text for text in texts(picture) if text.startswith("only"))
    assert re.match(rf"only rows 0 to {ROWS - 1} of \d+ and devices 0 to 5 of 8, ", told)
    for device in range(DEVICES):  # the first instructions of each
        positions = [at for own, at in sorted(drawn) if own == device]
        assert positions == [*range(len(positions))]
    assert all(tail in drawn and head in drawn for tail, head, _ in arrows(picture))


@pytest.mark.parametrize("device", [0, 7])
def test_the_part_that_is_drawn_has_the_first_fault(device: int) -> None:
    program = lowered(one_f_one_b(8, 16))
    lists = [[*row] for row in program.lists]
    lists[device].insert(-1, lists[device][-3])
    broken = replace(program, lists=tuple(map(tuple, lists)))
    with pytest.raises(VerificationError) as caught:
        broken.verify()
    picture = draw_program(broken)
    red = {at for at, box in boxes(picture).items() if box.node.get("color") == FAULT}
    assert red == {(fault.device, fault.position) for fault in caught.value.faults}
    assert "only rows" in picture.source


def test_long_names_are_shortened_and_tooltips_whole() -> None:
    value = "a_value_with_a_name_that_is_far_too_long_for_any_picture"
    plan = plan_of(2, Edge(HOST, 0, "x"), Edge(0, 1, value), *both(1, HOST, "loss"))
    program = free(communicate(Lower(plan)(gpipe(2, 1))))
    picture = draw_program(program)
    assert max(len(box.label) for box in boxes(picture).values()) <= 40
    assert any(value in box.tooltip for box in boxes(picture).values())
    ((_, _, edge),) = arrows(picture)
    assert value in edge["tooltip"]
    assert any(re.fullmatch(r"a_value_w….*_picture\[0\]", text) for text in texts(picture))


@pytest.mark.parametrize("word", sorted(of_extensions()))
def test_instructions_of_extensions_are_drawn(word: str) -> None:
    made = of_extensions()[word]
    (box,) = boxes(draw_program(Program("one", 1, (0,), (), ((made,),)))).values()
    assert box.label == print_instruction(made)


def test_any_program_can_be_drawn() -> None:
    """Whatever an edit makes of it, each instruction is there, and each fault that has a place."""
    plain = Streams()(lowered(one_f_one_b(2, 1)))
    for number, (_, _, lists) in enumerate(edits(plain.lists)):
        if number % 7:
            continue
        edited = replace(plain, lists=lists)  # the launches may not fit
        if number % 2:
            edited = replace(edited, launches=(), passes=plain.passes[:-1])
        assert len(boxes(draw_program(edited))) == sum(map(len, lists))
    for odd in (
        Program("none", 0, (), (), ()),
        Program("empty", 1, (0,), (), ((),)),
        lowered(gpipe(3, 2), pause=True),
        chain_program(gpipe(2, 2), replicas=2),
    ):
        assert len(boxes(draw_program(odd))) == sum(map(len, odd.lists))


def test_names_of_devices_stand_apart_where_these_run_nothing() -> None:
    program = Program("idle", 1, (0, 1, 2) * 3, (), ((), (), ()))
    nodes = loaded(draw_program(program))["objects"]
    named = [node for node in nodes if node["label"].startswith("device")]
    assert len(named) == 3
    ends = sorted((float(node["pos"].split(",")[0]), float(node["width"]) * 36) for node in named)
    assert all(x + half <= after - other for (x, half), (after, other) in pairwise(ends))
