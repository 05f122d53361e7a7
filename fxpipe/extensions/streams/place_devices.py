"""Replace the device that the model was traced on by each stage's own device, in its graphs.

before, traced on cuda:0:  mask = full([4, 4], 0.0, device=cuda:0)
after, on cuda:2:          mask = full([4, 4], 0.0, device=cuda:2)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.errors import PassError
from fxpipe.ir.plan import Plan, Stage
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.torchtools.constants import move_constants


def place_devices(plan: Plan, device: torch.device, stage_devices: Sequence[torch.device]) -> Plan:
    """Plan → Plan: every stage creates its tensors on the device where it runs.

    A graph names the device that it was traced on where ``arange`` or ``full`` makes a tensor,
    where a value is cast, and by its constants. All are replaced in the stage's graph and in the
    graphs of its kernel; inputs and parameters are on the right device anyway. Tensors that a model
    on another device makes on the CPU stay there. Any other device is refused, because the model
    asks for it by name.

    Args:
        plan: the plan.
        device: the device that the model was traced on.
        stage_devices: stage → its device.

    Raises:
        PassError: a graph names another device.
    """

    def placed(stage: Stage) -> Stage:
        home = stage_devices[stage.index]
        if same(home, device):
            return stage
        move = functools.partial(moved, traced=device, home=home)
        kernel: Any = stage.kernel  # one that a pass made, which has ``mapped``
        return replace(
            stage, graph=move(stage.graph), kernel=None if kernel is None else kernel.mapped(move)
        )

    return replace(plan, stages=tuple(map(placed, plan.stages)))


def moved(module: fx.GraphModule, traced: torch.device, home: torch.device) -> fx.GraphModule:
    """A copy of a graph module for another device than the one that it was traced on.

    Raises:
        PassError: a node names a device other than these two and the CPU.
    """
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        exchange = functools.partial(_exchanged, traced=traced, home=home, node=node)
        node.args = fx.node.map_aggregate(node.args, exchange)
        node.kwargs = fx.node.map_aggregate(node.kwargs, exchange)
    result = lazy_module(module, graph)
    move_constants(result, home, lambda device: same(device, traced))
    return result


def _exchanged(value: Any, traced: torch.device, home: torch.device, node: fx.Node) -> Any:
    if not isinstance(value, torch.device) or same(value, home):
        return value
    if same(value, traced):
        return home
    if value.type == "cpu":
        return value
    raise PassError(
        f"node {node.name} names {value}, and the model was traced on {traced}; let it take the "
        "device of one of its inputs (x.device)"
    )


def same(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are the same; no index means index 0."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)
