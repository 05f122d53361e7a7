"""Constants of graphs move; what is no tensor, or elsewhere, stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from fxpipe.torchtools.constants import move_constants


def graph_with(**constants: object) -> fx.GraphModule:
    root = nn.Module()
    root.inner = nn.Module()
    graph = fx.Graph()
    for name, value in constants.items():
        setattr(root.inner, name, value)
        graph.get_attr(f"inner.{name}")
    graph.output(None)
    return fx.GraphModule(root, graph)


def test_constants_go_to_a_device() -> None:
    module = graph_with(x=torch.ones(2), y=torch.ones(2, device="meta"), z=5)
    move_constants(module, torch.device("meta"))
    inner: Any = module.inner
    assert inner.x.is_meta and inner.y.is_meta and inner.z == 5


def test_only_those_of_some_devices_move_where_these_are_named() -> None:
    module = graph_with(x=torch.ones(2), y=torch.ones(2, device="meta"))
    move_constants(module, torch.device("meta"), lambda device: device.type == "cuda")
    inner: Any = module.inner
    assert not inner.x.is_meta
