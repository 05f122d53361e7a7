"""Writes to caches in place, where a graph makes a new cache for each micro-batch.

A graph of operations without side effects copies the whole cache to change a few of its slots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpipe.extend import Extension, Kernels
from fxpipe.extensions.generation.decoder import WRITE
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.kernels.graph import GraphKernel
from fxpipe.kernels.kernel import Kernel


@dataclass(frozen=True)
class InPlace(Extension):
    """Has the kernels of stages write to buffers in place, if nothing else reads their old values.

    The caller keeps no version of a buffer from before a micro-batch: without gradients there is no
    backward that could read it.
    """

    def kernels(self) -> Kernels:
        """Kernels that write in place."""
        return _kernels


def _kernels(
    kernels: Sequence[Kernel], plan: Plan, schedule: Schedule, program: Program
) -> Sequence[Kernel]:
    return [
        replace(kernel, forward_graph=in_place(kernel.forward_graph))
        if isinstance(kernel, GraphKernel) and kernel.backward_graph is None
        else kernel
        for kernel in kernels
    ]


def in_place(module: fx.GraphModule) -> fx.GraphModule:
    """The same module, whose results are the same, and which overwrites the arguments that only a
    write reads."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        if node.target is WRITE and node.args[0].op == "placeholder":
            if len(node.args[0].users) == 1:
                node.target = torch.ops.aten.index_put_.default
    return fx.GraphModule(module, graph)
