"""Moves the constants of graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx


def move_constants(
    module: fx.GraphModule,
    home: torch.device,
    moves: Callable[[torch.device], bool] = lambda device: True,
) -> None:
    """Move the constants of a graph to a device: all, or those whose device ``moves``."""
    for node in module.graph.find_nodes(op="get_attr"):
        owner, _, name = str(node.target).rpartition(".")
        holder = module.get_submodule(owner)
        value = getattr(holder, name)
        if isinstance(value, Tensor) and moves(value.device):
            setattr(holder, name, value.to(home))
