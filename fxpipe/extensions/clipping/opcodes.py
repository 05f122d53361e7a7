"""Gradients are clipped by one norm over all stages, which each stage computes for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.ir.opcodes.base import OncePerStep
from fxpipe.ir.task import TaskKind
from fxpipe.ir.value import Buffer, norm_buffer

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


@dataclass(frozen=True, slots=True)
class Norm(OncePerStep):
    """Send a stage's gradient norms to all stages. Roughly: norms = [g.norm() for g in …]."""

    opcode = "norm"
    stands_for = TaskKind("norm", "norm", per_microbatch=False)

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
class Clip(OncePerStep):
    """Scale a stage's gradients by the norm over all stages.

    Roughly: gradients[stage] *= min(1, limit / norm(all norms)).
    """

    opcode = "clip"
    task = "C"

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
