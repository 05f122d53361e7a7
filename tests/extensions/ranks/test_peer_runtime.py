"""torch.distributed.pipelining runs our schedules, as CSV, to the gradients that ours give."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import loop

RANKS, MICROBATCHES = 2, 4
NAMES = ["1f1b", "gpipe", "naive", "zb-h1", "zb-h2", "interleaved-1f1b", "looped-bfs"]
if [int(part) for part in torch.__version__.split(".")[:2]] >= [
    2,
    13,
]:  # in older ones neighbours on one rank fail under gloo
    NAMES += ["zb-v", "v-half", "v-min", "dualpipe-v"]

Gradients = dict[str, Tensor | None]


def csv(schedule: Schedule) -> str:
    """A row for each rank, as their reader takes it."""
    rows = [
        [f"{t.stage}{t.kind}{t.microbatch}" for t in row if t.kind != "U"] for row in schedule.rows
    ]
    return "".join(f"{','.join(row)}\n" for row in rows)


def model_of(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(stages)))


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)).unbind()
    return x, y


def in_torch(mesh: DeviceMesh, folder: Path) -> dict[str, Gradients]:
    """Schedule → the gradients of this rank's stages after one step of torch's runtime."""
    found: dict[str, Gradients] = {}
    x, y = batch()
    for name in NAMES:
        schedule = find_recipe(name)(RANKS, MICROBATCHES)
        model = model_of(schedule.stages)
        cpu, group = torch.device("cpu"), mesh.get_group()
        own = [
            PipelineStage(model[stage], stage, schedule.stages, cpu, group=group)
            for stage in schedule.held_by(mesh.get_local_rank())
        ]
        runtime = _PipelineScheduleRuntime(own, MICROBATCHES, loss_fn=mse_loss)
        runtime._load_csv(str(folder / f"{name}.csv"))
        runtime.step(*((x,) if own[0].is_first else ()), target=y)
        found[name] = {k: v for k, v in loop.gradients(model).items() if v is not None}
    return found


def ours(name: str) -> Gradients:
    schedule = find_recipe(name)(RANKS, MICROBATCHES)
    model = model_of(schedule.stages)
    x, y = batch()
    cuts = [str(stage) for stage in range(1, schedule.stages)]
    with fxpipe.compile(
        model,
        ["cpu"] * RANKS,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss=mse_loss,
        partition=cuts,
    ) as pipe:
        pipe.step(x, target=y)
    return loop.gradients(model)


def test_torch_runs_our_schedules_to_our_gradients(tmp_path: Path) -> None:
    for name in NAMES:
        text = csv(find_recipe(name)(RANKS, MICROBATCHES))
        (tmp_path / f"{name}.csv").write_text(text)
    first, second = on_ranks(RANKS, in_torch, tmp_path)
    for name in NAMES:
        assert not first[name].keys() & second[name].keys()
        torch.testing.assert_close(first[name] | second[name], ours(name))
