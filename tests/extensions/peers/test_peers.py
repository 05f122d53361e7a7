"""Schedules for torch.distributed.pipelining, as its own reader takes them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining import schedules as theirs
from torch.nn.functional import mse_loss

from fxpipe import InputError, Schedule
from fxpipe.ir.recipe import find_recipe

FLUSHING = [
    *("1f1b", "dualpipe-v", "gpipe", "interleaved-1f1b", "looped-bfs", "naive"),
    *("v-half", "v-min", "zb-h1", "zb-h2", "zb-v"),
]


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


def loaded(schedule: Schedule, text: str, path: Any) -> Any:
    """Their runtime with this CSV, read by their own reader."""
    path.write_text(text)
    own = stages(schedule.devices, schedule.held_by(0), 1)
    for stage in own:
        stage.num_stages = schedule.stages
    runtime = theirs._PipelineScheduleRuntime(own, schedule.microbatches, loss_fn=mse_loss)
    runtime._load_csv(str(path))
    return runtime


@pytest.mark.smoke
@pytest.mark.parametrize("name", FLUSHING)
def test_their_reader_reads_the_computations_of_a_schedule(name: str, tmp_path: Any) -> None:
    for devices in (1, 2, 4):
        for microbatches in (devices, 4 * devices):
            schedule = find_recipe(name)(devices, microbatches)
            runtime = loaded(schedule, schedule.csv(), tmp_path / "own.csv")
            read = {
                rank: [
                    f"{a.stage_index}{a.computation_type.value}{a.microbatch_index}"
                    for pair in row
                    for a in pair.sub_actions or (pair,)
                ]
                for rank, row in runtime.pipeline_order.items()
            }
            assert read == {
                device: [f"{t.stage}{t.kind}{t.microbatch}" for t in row if t.kind != "U"]
                for device, row in enumerate(schedule.rows)
            }
            assert runtime.pipeline_order_with_comms.keys() == read.keys()


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
