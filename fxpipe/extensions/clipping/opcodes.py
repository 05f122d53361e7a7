"""Gradients are clipped by one norm over all stages, which each stage computes for itself.

``add_clip``: each stage waits for the gradient norms of all stages before it updates.

before:  0: F0 B2' F1 B3' U' F2 B0 F3 B1         2: F0 B0 F1 B1 F2 B2 F3 B3 U
after:   0: F0 B2' F1 B3' F2 B0 F3 B1 C' U'      2: F0 B0 F1 B1 F2 B2 F3 B3 C' U'
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxpipe.ir.opcodes.base import OncePerStep
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task, TaskKind
from fxpipe.ir.value import Buffer, norm_buffer

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


class _Clipping(OncePerStep):
    __slots__ = ()

    @classmethod
    def of_every_stage(cls, program: Program, there: Container[str]) -> bool:
        return "C" in there


@dataclass(frozen=True, slots=True)
class Norm(_Clipping):
    """Send a stage's gradient norms to all stages. Roughly: norms = [g.norm() for g in …]."""

    opcode = "norm"
    stands_for = TaskKind("norm", "norm", per_microbatch=False, lacking=KINDS["C"].lacking)

    @property
    def needs(self) -> Sequence[str]:
        return ("gradients",)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        every = range(program.stages)
        return tuple([norm_buffer(self.stage, other, self.batch) for other in every])

    def run(self, machine: Machine) -> None:
        absolute = machine.step + self.batch
        gradients = machine.store.gradients.get((self.stage, self.batch), [])
        clipping = machine.jobs[absolute].clipping
        if clipping is not None:
            clipping.unscale(absolute, gradients)
        norms = norms_of(gradients)
        machine.store.values.update(dict.fromkeys(self.makes(machine.program), norms))


@dataclass(frozen=True, slots=True)
class Clip(_Clipping):
    """Scale a stage's gradients by the norm over all stages.

    Roughly: gradients[stage] *= min(1, limit / norm(all norms)).
    """

    opcode = "clip"
    task = "C"

    @property
    def needs(self) -> Sequence[str]:
        return ("norm",)

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        every = range(program.stages)
        return tuple([norm_buffer(other, self.stage, self.batch) for other in every])

    def run(self, machine: Machine) -> None:
        store, absolute = machine.store, machine.step + self.batch
        names = [x.target for stage in machine.stages for x in stage.parameters]
        norms: list[Tensor | None] = []
        for buffer in self.uses(machine.program):
            norms += store.values[buffer]
        clipping = machine.jobs[absolute].clipping
        if clipping is not None:
            norms = clipping.in_order(names, norms)
            clipping.clip(absolute, store.gradients.get((self.stage, self.batch), []), norms)


def norms_of(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The 2-norm of each gradient; that of half precision is computed in float32."""
    import torch  # texts of programs need none

    present = [gradient for gradient in gradients if gradient is not None]
    norms = {}
    for dtype in {gradient.dtype for gradient in present}:
        alike = [gradient for gradient in present if gradient.dtype == dtype]
        computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms[dtype] = iter(torch._foreach_norm(alike, 2, computed))
    return [None if gradient is None else next(norms[gradient.dtype]) for gradient in gradients]


def add_clip(schedule: Schedule) -> Schedule:
    """Schedule → Schedule: a clip before every update.

    With a flush, a device clips and updates once it has all of its gradients. Where batches
    overlap, a stage that finishes early would wait for the others. So all stages clip and update
    at the end of the step in which the last of them has its gradients. Meanwhile early stages keep
    the gradients of two batches.
    """
    if "C" in schedule.kinds or "U" not in schedule.kinds:
        return schedule
    if not schedule.overlaps:
        return replace(schedule, rows=tuple(map(_clipped, schedule.rows)))
    batch = min(task.batch for row in schedule.rows for task in row if task.kind != "U")
    late: list[tuple[Task, ...]] = []
    for device, row in enumerate(schedule.rows):
        tasks = [task for task in row if task.kind != "U"]
        for stage in schedule.held_by(device):
            tasks += [Task("C", None, stage, batch), Task("U", None, stage, batch)]
        late.append(tuple(tasks))
    return replace(schedule, rows=tuple(late))


def _clipped(row: tuple[Task, ...]) -> tuple[Task, ...]:
    """A device's tasks, where all clips and updates come behind its last backward or reduce."""
    complete = 1 + max((at for at, task in enumerate(row) if task.kind in "BIWA"), default=-1)
    before = [task for task in row[:complete] if task.kind != "U"]
    early = [task for task in row[:complete] if task.kind == "U"]
    clips = [replace(task, kind="C") for task in row if task.kind == "U"]
    return (*before, *clips, *early, *row[complete:])
