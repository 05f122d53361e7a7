"""``fxpipe.CudaGraphs``: which stages run as captured CUDA graphs, and how many slots each needs.

A slot is one set of captured graphs of a stage, with memory for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import Extension, Kernels
from fxpipe.extensions.cuda_graphs.captured import Captured
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import SEED
from fxpipe.ir.value import HOST
from fxpipe.kernels.graph import GraphKernel
from fxpipe.kernels.kernel import Kernel
from fxpipe.log import LOGGER
from fxpipe.torchtools import source

_HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operations whose result the host must read: a number, or a size that depends on data."""


class Capturing:
    """Replaces the kernels of stages by captured ones, and keeps these for later calls."""

    def __init__(self) -> None:
        # by id: each entry keeps its kernel, so that no id is used again
        self._captured_kernels: dict[int, Captured] = {}
        self._versions = 1
        self._told: set[str] = set()

    def __call__(
        self, kernels: Sequence[Kernel], plan: Plan, schedule: Schedule, program: Program
    ) -> list[Kernel]:
        """Return a mapping: stage → its kernel. A stage that cannot be captured keeps its own
        kernel, which the log says once."""
        written = {write.target for stage in plan.stages for write in stage.writes}
        needed = slots(program)
        if schedule.overlaps:
            self._versions = max(schedule.delays) + 1
        made: list[Kernel] = []
        for stage, kernel in zip(plan.stages, kernels, strict=True):
            reason = obstacle(plan, stage)
            if reason is not None or not isinstance(kernel, GraphKernel):
                reason = reason or "it has a kernel of another extension"
                text = f"stage {stage.index} runs uncaptured: {reason}"
                if text not in self._told:
                    self._told.add(text)
                    LOGGER.info("%s", text)
                made.append(kernel)
                continue
            captured = self._captured_kernels.get(id(kernel))
            if captured is None:
                captured = self._captured_kernels[id(kernel)] = Captured(
                    kernel,
                    stage.index,
                    [argument.target in written for argument in stage.buffers],
                )
            captured.versions = self._versions
            captured.slots = max(captured.slots, needed[stage.index])
            made.append(captured)
        return made


def slots(program: Program) -> tuple[int, ...]:
    """Count for each stage the most micro-batches that occupy a slot of its graphs at once.

    A micro-batch occupies a slot from its forward or recomputation to the end of its backward, or
    of both halves of that. A forward that saves nothing occupies a slot while it runs. If batches
    overlap, enough steps are counted for all batches that can overlap another.
    """
    most, held = [0] * program.stages, [0] * program.stages
    steps = 2 * program.depth + 1
    for list_ in program.lists:
        repeated = (
            x for step in range(steps + program.depth) for x in list_ if 0 <= step + x.batch < steps
        )
        for instruction in repeated:
            match instruction:
                case ins.Forward(stage, keeps=keeps):
                    most[stage] = max(most[stage], held[stage] + 1)
                    held[stage] += keeps
                case ins.Recompute(stage):
                    held[stage] += 1
                    most[stage] = max(most[stage], held[stage])
                case ins.Backward(stage) | ins.WeightGrad(stage):
                    held[stage] -= 1
    return tuple(most)


def obstacle(plan: Plan, stage: Stage) -> str | None:
    """The reason why a stage cannot be captured, as one clause; None if there is none."""
    kernel = stage.kernel
    if not isinstance(kernel, GraphKernel):
        return "autograd drives its backward"
    if stage.calls:
        return "it calls a part of the model as it is"
    for edge in plan.edges_into(stage.index):
        spec = plan.specs.get(edge.value)
        if edge.value == SEED:
            return "it draws random numbers, by a seed that is read on the host"
        if edge.source == HOST and spec and not spec.shape and not spec.dtype.is_floating_point:
            return f"its input {edge.value!r} is one whole number, which is read on the host"
    for module in (kernel.forward_graph, kernel.backward_graph):
        for node in () if module is None else module.graph.nodes:
            tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
            if any(tag in tags for tag in _HOST_TAGS):
                line = source.of_node(node)
                where = f" at {line}" if line else ""
                return f"{node.target}{where} gives what the host has to wait for"
    return None


@dataclass(frozen=True)
class CudaGraphs(Extension):
    """On CUDA devices, capture the computation of a stage into CUDA graphs in the first steps and
    replay them from then on: one launch instead of one for each operation.

    Results are the same to the bit. For each micro-batch size, a stage has fixed memory for as many
    micro-batches as the schedule has in flight there (with the temporary memory of their
    operations) and for one more set of parameter gradients; ``simulate`` does not count it. Graphs
    read parameters at their addresses: if these change (an assigned state dict), the stage is
    captured again. Stages that draw random numbers, have leaf modules, or compute sizes from data
    run without graphs; the logger "fxpipe" has an info record for each.
    If batches overlap, call ``pipe.flush()`` before ``torch.cuda.synchronize()`` as long as stages
    are being captured: nothing may wait for a device during a capture.
    """

    holds_saved = True

    def check(self, options: Options) -> None:
        """Raise InputError over several ranks, or if the devices are not CUDA devices."""
        options.group.refuse(
            "CudaGraphs",
            "a capture waits for the device, which may wait for another rank; leave it out",
        )
        home = options.torch_devices[0]
        if home.type != "cuda":
            raise InputError(
                f"CudaGraphs is given and the devices are {home.type.upper()} devices, which have "
                "none; leave it out, or name CUDA devices"
            )

    def kernels(self) -> Kernels:
        """Captured kernels in place of those that can be captured."""
        return Capturing()
