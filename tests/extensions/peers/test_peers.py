"""Schedules of torch.distributed.pipelining: its CSV, read, judged and written."""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as theirs
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import InputError, ParseError, Schedule, VerificationError
from fxpipe.ir.recipe import find_recipe
from fxpipe.passes.schedule import add_reduce
from tests.oracles import loop

FLUSHING = [
    *("1f1b", "dualpipe-v", "gpipe", "interleaved-1f1b", "looped-bfs", "naive"),
    *("v-half", "v-min", "zb-h1", "zb-h2", "zb-v"),
]
CLASSES = {
    "interleaved-1f1b": theirs.ScheduleInterleaved1F1B,
    "looped-bfs": theirs.ScheduleLoopedBFS,
    "zero bubble": theirs.ScheduleInterleavedZeroBubble,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}
Order = dict[int, list[Any]]


def stages(ranks: int, own: Sequence[int], each: int) -> list[Any]:
    """Stands for the stages that a rank of theirs holds; no process group is needed."""
    return [
        SimpleNamespace(
            num_stages=ranks * each,
            group_size=ranks,
            group_rank=0,
            stage_index=stage,
            is_first=stage == 0,
            is_last=stage == ranks * each - 1,
            has_backward=True,
            submod=nn.Identity(),
        )
        for stage in own
    ]


def their_schedule(name: str, ranks: int, microbatches: int, **options: Any) -> Any:
    """A schedule as they make it for rank 0, with the orders of all ranks."""
    vee = name in ("zb-v", "dualpipe-v")
    own = stages(ranks, (0, 2 * ranks - 1) if vee else (0, ranks), 2)
    return CLASSES[name](own, microbatches, loss_fn=mse_loss, **options)


def written(order: Order) -> str:
    """As their ``_dump_csv`` writes it."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for rank in sorted(order):
        writer.writerow(order[rank])
    return text.getvalue()


def loaded(schedule: Schedule, text: str, path: Any) -> Any:
    """Their runtime with this CSV, read by their own reader."""
    path.write_text(text)
    own = stages(schedule.devices, schedule.held_by(0), 1)
    for stage in own:
        stage.num_stages = schedule.stages
    runtime = theirs._PipelineScheduleRuntime(own, schedule.microbatches, loss_fn=mse_loss)
    runtime._load_csv(str(path))
    return runtime


def at_the_end(schedule: Schedule) -> Schedule:
    """The same with its updates at the ends of its rows, in the order of the stages."""
    rows = tuple(
        (*(t for t in row if t.kind != "U"), *sorted((t for t in row if t.kind == "U"), key=str))
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


@pytest.mark.parametrize("name", FLUSHING)
def test_a_schedule_of_the_library_comes_back_from_their_reader(name: str, tmp_path: Any) -> None:
    for devices in (1, 2, 4):
        for microbatches in (devices, 4 * devices):
            schedule = find_recipe(name)(devices, microbatches)
            runtime = loaded(schedule, schedule.csv(), tmp_path / "own.csv")
            expected = schedule if name != "looped-bfs" else at_the_end(schedule)
            assert Schedule.from_csv(written(runtime.pipeline_order), name=name) == expected
            lowered = Schedule.from_csv(written(runtime.pipeline_order_with_comms), name=name)
            assert lowered == add_reduce(expected).verify()
            assert lowered.csv() == schedule.csv()


def test_bubbles_are_written_as_empty_cells_where_every_task_takes_one() -> None:
    text = find_recipe("1f1b")(2, 3).csv()
    assert text == "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"


@pytest.mark.smoke
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_their_schedules_are_read_and_verify(name: str, ranks: int, microbatches: int) -> None:
    found = their_schedule(name, ranks, microbatches)
    alone, lowered = written(found.pipeline_order), written(found.pipeline_order_with_comms)
    schedule = Schedule.from_csv(alone, name=name)
    assert Schedule.from_csv(lowered, name=name) == add_reduce(schedule.verify())
    if name in FLUSHING and name not in ("interleaved-1f1b", "looped-bfs", "zb-v"):  # these differ
        own = at_the_end(find_recipe(name)(ranks, microbatches))
        assert schedule == own
    assert 0 < schedule.simulate().bubble < 0.5


@pytest.mark.models
@pytest.mark.parametrize("name", CLASSES)
def test_what_they_write_trains_as_the_plain_loop(name: str) -> None:
    text = written(their_schedule(name, 2, 4).pipeline_order_with_comms)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)))
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 5).unbind()
    cuts = ["1", "2", "3"]
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        schedule=Schedule.from_csv(text),
        microbatches=4,
        loss=mse_loss,
        partition=cuts,
    ) as pipe:
        pipe.step(x, target=y)
    order = [3, 2, 1, 0] if name == "looped-bfs" else None
    loop.train(alone, 4, x, loss=mse_loss, target=y, order=order)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


LOWERED = """\
0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD
1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD
"""


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ((",1REDUCE_GRAD", ""), "device 1: stage 1 has no reduce"),
        (("0B0,0REDUCE_GRAD", "0REDUCE_GRAD,0B0"), "position 1, A@0: it comes before B0@0"),
        ((",0B0", ""), "device 0: stage 0 has no backward of micro-batch 0"),
        (("1F0,1B0", "1B0,1F0"), "device 1, position 0, B0@1: it comes before F0@1"),
        (("1F0,", "1F0,1F0,"), "device 1, position 1, F0@1: it is there already"),
        (("1B0,", "1I0,"), "device 1: stage 1 has no weight gradient of micro-batch 0"),
        (("1F0,", "1F0,0F1,"), "row 2 holds F1@0, and stage 0 is in row 1 already"),
    ],
)
def test_the_computations_of_a_list_are_verified(edit: tuple[str, str], told: str) -> None:
    assert Schedule.from_csv(LOWERED).stages == 2
    with pytest.raises(InputError if "row" in told else VerificationError) as caught:
        Schedule.from_csv(LOWERED.replace(*edit, 1))
    assert told in str(caught.value)


def test_sends_receives_and_waits_are_dropped() -> None:
    awaited = (
        "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0\n"
    )
    alone = LOWERED.replace("0SEND_F0,0RECV_B0,", "").replace("1RECV_F0,", "")
    assert Schedule.from_csv(LOWERED) == Schedule.from_csv(awaited) == Schedule.from_csv(alone)


def test_overlapped_actions_are_read_as_tasks_in_a_row() -> None:
    text = "0F0,0F1,(0B0;0B1)OVERLAP_F_B\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    assert Schedule.from_csv(text) == Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")


def test_an_invalid_list_is_read_without_the_check() -> None:
    text = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
    with pytest.raises(VerificationError, match="device 0, position 1, B0@0: deadlock"):
        Schedule.from_csv(text)
    assert len(Schedule.from_csv(text, check=False).rows[1]) == 5


@pytest.mark.parametrize(
    ("text", "line", "column", "told"),
    [
        ("0F0,0B0xyz\n", 1, 8, "unexpected 'xyz' behind an action"),
        ("0F0,0B0\n1F0,1F\n", 2, 7, "a micro-batch, such as 1F0"),
        ("0F0,0BW0\n", 1, 6, "write I for its B and B for its BW"),
        ("0F0,B0\n", 1, 5, "expected an action such as 0F1"),
        ("0F0,0X0\n", 1, 6, "there is no action 'X' here"),
        ("(0F0;0SEND_F0)OVERLAP_F_B\n", 1, 7, "there is no action 'SEND_F' here"),
        ("(0F0;0B0)\n", 1, 10, "OVERLAP_F_B behind ')'"),
        ("(0F0\n", 1, 5, "';' or ')'"),
        ("0REDUCE_GRAD3\n", 1, 13, "unexpected '3'"),
        ("0F" + "1" * 30, 1, 3, "has 30 digits"),
    ],
)
def test_a_cell_that_is_no_action_is_told_by_line_and_column(
    text: str, line: int, column: int, told: str
) -> None:
    with pytest.raises(ParseError, match="line") as caught:
        Schedule.from_csv(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "0F0,0B0\n2F0,2B0\n", "9F0\n"])
def test_stages_that_are_missing_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="count the stages from 0"):
        Schedule.from_csv(text)


def test_counts_that_only_a_slip_can_mean_are_refused_at_once() -> None:
    with pytest.raises(VerificationError):
        Schedule.from_csv("0F999999999,0B0\n")
    with pytest.raises(InputError):
        Schedule.from_csv("0F0,999999999B0\n")


def test_spaces_quotes_and_line_ends_of_a_spreadsheet_are_read() -> None:
    text = '"0F0", 0F1 ,0B0,0B1\r\n"",1F0,1B0, (1F1; 1B1)OVERLAP_F_B \r\n'
    assert Schedule.from_csv(text, name="1f1b").rows[1] == (
        *(fxpipe.Task(kind, i, 1) for i in range(2) for kind in "FB"),
        fxpipe.U(1),
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("2bw", "take a schedule that ends with a flush and has delay=0, such as 1f1b"),
        ("inference", "write a schedule that trains, such as gpipe, and call eval() there"),
    ],
)
def test_what_they_have_no_action_for_is_refused_by_name(name: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        find_recipe(name)(2, 2).csv()
    assert name in str(caught.value)
    assert told in str(caught.value)


def test_recompute_clipping_and_idle_devices_are_refused_together() -> None:
    schedule = Schedule.parse(
        "schedule own stages=1 microbatches=1 delay=0\nplace 0 | -\n0: F0 R0 B0 C U\n1:\n"
    )
    with pytest.raises(InputError) as caught:
        schedule.csv()
    for told in ("no recompute: leave R out", "no clip: leave C out", "device 1 holds no stage"):
        assert told in str(caught.value)
