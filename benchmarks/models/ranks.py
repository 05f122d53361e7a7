"""Train models over ranks and over the devices of one process, and say whether both are equal."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxpipe
from benchmarks.meeting import meeting_place
from benchmarks.models import own
from benchmarks.models.cases import Case
from benchmarks.models.exact import MICROBATCHES, ROWS

STEPS = 3
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "2bw")
PATIENCE = timedelta(minutes=5)
"""How long one rank waits for another."""


class Setting(NamedTuple):
    """The name of a model, and the schedule that trains it."""

    model: str
    schedule: str


Found = Mapping[str, Tensor]
"""Losses, and weights, buffers and gradients by name."""


class Compared(NamedTuple):
    """What differs, and why one process and the ranks refuse it, if they do."""

    differing: list[str]
    refused: str = ""


def compare(settings: Sequence[Setting], size: int) -> Iterator[Compared]:
    """What so many ranks come to, setting by setting."""
    context, meeting = multiprocessing.get_context("spawn"), meeting_place()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, size, meeting, folder, settings), daemon=True)
            for rank in range(size)
        ]
        for each in ranks:
            each.start()
        try:
            for number, setting in enumerate(settings):
                alone = attempt(setting, ["cpu"] * size)
                found = [
                    _read(Path(folder, f"{number}-{rank}"), ranks[rank]) for rank in range(size)
                ]
                if isinstance(alone, str) and all(isinstance(each, str) for each in found):
                    yield Compared([], alone)
                else:
                    yield Compared(differing(alone, found))
        finally:
            for each in ranks:
                each.kill()
                each.join()


def case_of(name: str) -> Case:
    """A model by its name."""
    cases = {case.name: case for case in own.CASES}
    if name not in cases:
        from benchmarks.models import others  # takes long to import

        cases |= {case.name: case for case in others.CASES}
    return cases[name]


def train(setting: Setting, devices: DeviceMesh | Sequence[str]) -> Found:
    """Three steps; the losses, and what they leave behind of what this process keeps."""
    torch.manual_seed(0)
    case = case_of(setting.model)
    model = case.model()
    batches = [case.batch(ROWS) for _ in range(STEPS)]
    names = {parameter: name for name, parameter in model.named_parameters()}
    gradients: dict[str, Tensor] = {}

    class Noting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            held = [parameter for group in self.param_groups for parameter in group["params"]]
            gradients.update(_gradients(held, names))
            return super().step(closure)

    with fxpipe.compile(
        model,
        devices,
        schedule=setting.schedule,
        microbatches=MICROBATCHES,
        loss=case.loss,
        optimizer=lambda parameters: Noting(parameters, lr=1e-2),
    ) as pipe:
        losses = [pipe.step(*b.args, target=b.target, **b.kwargs) for b in batches]
        found = {f"loss of step {number}": loss.clone() for number, loss in enumerate(losses)}
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        return found | state | gradients


def _gradients(
    parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]
) -> dict[str, Tensor]:
    """By name, those of the step that is made."""
    return {
        f"gradient of {names[parameter]}": parameter.grad.clone()
        for parameter in parameters
        if parameter.grad is not None
    }


def attempt(setting: Setting, devices: DeviceMesh | Sequence[str]) -> Found | str:
    """The same, or the error that came instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return train(setting, devices)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def differing(alone: Found | str, ranks: Sequence[Found | str]) -> list[str]:
    """The names of what the ranks have not as one process has it, bit for bit; or an error."""
    fine = []
    for found in (alone, *ranks):
        if isinstance(found, str):
            return [found]
        fine.append(found)
    alone, *parts = fine
    names = sorted({name for part in parts for name in part} | alone.keys())
    return [name for name in names if not _same(name, alone, parts)]


def _same(name: str, alone: Found, parts: Sequence[Found]) -> bool:
    kept = [part[name] for part in parts if name in part]
    return name in alone and bool(kept) and all(torch.equal(alone[name], each) for each in kept)


def _rank(rank: int, size: int, meeting: str, folder: str, settings: Sequence[Setting]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=meeting,
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    for number, setting in enumerate(settings):
        path = Path(folder, f"{number}-{rank}")
        torch.save(attempt(setting, mesh), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    distributed.destroy_process_group()


def _read(path: Path, process: BaseProcess) -> Found | str:
    """What a rank has written, or will write."""
    while not path.exists() and process.is_alive():
        process.join(0.1)
    if not path.exists():
        return f"the process ended with exit code {process.exitcode}"
    found: Found | str = torch.load(path)
    path.unlink()
    return found
