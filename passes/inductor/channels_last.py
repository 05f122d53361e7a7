"""Lay the images around convolutions in channels-last order, in stages that inductor compiles.

before:  c = conv2d(x, w);  y = relu(c);  z = flatten(y, 1)
after:   x1 = clone(x, memory_format=channels_last);  c = conv2d(x1, w);  y = relu(c)
         y1 = clone(y, memory_format=contiguous_format);  z = flatten(y1, 1)

On images in PyTorch's own order, oneDNN reorders what a convolution reads and makes in every call;
that took a quarter of a U-Net's time. In channels-last order it reorders nothing, and whatever
follows keeps the order, from stage to stage. Weights, their gradients and what the caller gets stay
in their order. Results differ in their rounding, so a pipe without a stage compiler is left alone.

``lay_weights`` has the weights of convolutions copied into that order once a step, not in the
forward and the backward of every micro-batch.

before:  forward of x, w:  v = view(view(w));  l = clone(v, channels_last);  c = convolution(x, l)
after:   forward of x, w:  c = convolution(x, w)        whoever calls it gives w in that order
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from copy import deepcopy
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fxpipe.ir.plan import Plan, Stage, pop, stash
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.graph.lazy_module import lazy_module

aten = torch.ops.aten

_GROUPS = {
    aten.conv2d.default: 6,
    aten.conv2d.padding: 6,
    aten.conv_transpose2d.input: 6,
    aten.convolution.default: 8,
}
"""Convolutions of images → the place of the number of groups among the operands."""

_KEEP = {
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.avg_pool2d.default,
    aten.max_pool2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
}
"""Operations whose result lies as their first operand does."""


def lay_channels_last(plan: Plan) -> Plan:
    """A plan as it was cut, whose stages are to be compiled by inductor.

    It stays as it is where it would take as many copies as it has convolutions.
    """
    if any(stage.leaves for stage in plan.stages):
        return plan
    layer = _Layer(plan)
    stages = tuple(map(layer.stage, plan.stages))
    return replace(plan, stages=stages) if layer.copied < layer.convolved else plan


class _Layer:
    """Copies the graphs of stages, in the order in which they run.

    Attributes:
        copied: so many values are copied into another order.
        convolved: so many convolutions read and make images in channels-last order.
    """

    def __init__(self, plan: Plan) -> None:
        self.copied = self.convolved = 0
        self._results = plan.results
        self._crossing: set[str] = set()

    def stage(self, stage: Stage) -> Stage:
        """The stage with its new graph."""
        made = fx.Graph()
        self._copies: dict[tuple[fx.Node, torch.memory_format | None], fx.Node] = {}
        self._laid: set[fx.Node] = set()
        plain = self._results | {write.value for write in stage.writes}
        for node in stage.graph.graph.nodes:
            orders = self._orders(node, plain)
            given = {each: self._copy(each, orders.get(each)) for each in node.all_input_nodes}
            if node in self._laid and node.target in _GROUPS:
                weight: Any = node.args[1]
                given[weight] = self._weight(weight, stage)
            copy = self._copies[node, None] = made.node_copy(node, given.__getitem__)
            copy.name = node.name  # fx would rename one that is called like a builtin
            if node in self._laid and node.name in plain:
                copy.name = f"{node.name}_before"
                self._copy(node, torch.contiguous_format).name = node.name
        made.lint()
        self._crossing |= {node.name for node in self._laid} - plain
        graph = lazy_module(stage.graph, made, type(stage.graph).__name__)
        return replace(stage, graph=graph)

    def _orders(self, node: fx.Node, plain: Set[str]) -> dict[fx.Node, torch.memory_format]:
        """In which order a node gets what it reads, where that matters; notes how it lies."""
        if node.op == "placeholder" or node.target is pop:
            self._laid.update([node] if node.name in self._crossing else [])
            return {}
        operands = node.all_input_nodes
        if node.op == "output" or node.target is stash:
            asked = [each for each in operands if each.name in plain]
            return dict.fromkeys(asked, torch.contiguous_format)
        if node.target is getitem:
            self._laid.update([node] if operands[0] in self._laid and _is_image(node) else [])
            return {}
        images, begins = _images(node), _convolves(node)
        if begins or self._laid.intersection(images):
            self._laid.add(node)
            self.convolved += begins
            return dict.fromkeys(images, torch.channels_last)
        return dict.fromkeys(self._laid.intersection(operands), torch.contiguous_format)

    def _copy(self, node: fx.Node, order: torch.memory_format | None) -> fx.Node:
        """A node's copy in the new graph, in some order."""
        copy = self._copies[node, None]
        if order is None or (node in self._laid) == (order is torch.channels_last):
            return copy
        if (node, order) not in self._copies:
            self.copied += 1
            name = f"{node.name}_laid"
            clone = copy.graph.create_node(
                "call_function", aten.clone.default, (copy,), {"memory_format": order}, name
            )
            clone.meta.update(copy.meta)
            self._copies[node, order] = clone
        return self._copies[node, order]

    def _weight(self, node: fx.Node, stage: Stage) -> fx.Node:
        """A weight as two views, whose backward gives the gradient the weight's own order. If it is
        a parameter that only convolutions read, a copy of it, see ``lay_weights``."""
        weight, order = self._copies[node, None], torch.channels_last
        if not node.meta["val"].is_contiguous():
            return weight
        make = weight.graph.call_function
        flat = make(aten.reshape.default, (weight, [-1]))
        viewed = make(aten.view_as.default, (flat, weight))
        given = viewed
        parameter = node.name in {argument.name for argument in stage.parameters}
        if parameter and all(user.target in _GROUPS for user in node.users):
            given = make(aten.clone.default, (viewed,), {"memory_format": order})
        for each in {flat, viewed, given}:
            each.meta.update(weight.meta)
        return given


def lay_weights(plan: Plan) -> Plan:
    """A differentiated plan → the same, whose forwards get weights as convolutions read them."""
    stages = (
        replace(stage, kernel=_laid_weights(stage.kernel, len(stage.parameters)))
        if isinstance(stage.kernel, GraphKernel)
        else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def _laid_weights(kernel: GraphKernel, count: int) -> GraphKernel:
    """One kernel; ``count`` is the number of its parameters."""
    graph = deepcopy(kernel.forward_graph.graph)
    strides: list[tuple[int, ...] | None] = [None] * count
    for index, weight in enumerate(graph.find_nodes(op="placeholder")[:count]):
        copies = _copies_of(weight)
        if not copies:
            continue
        weight.meta["val"] = copies[0].meta["val"]
        strides[index] = weight.meta["val"].stride()
        for copy in copies:
            copy.replace_all_uses_with(weight)
    if not any(strides):
        return kernel
    graph.eliminate_dead_code()
    module = lazy_module(kernel.forward_graph, graph, type(kernel.forward_graph).__name__)
    return replace(kernel, forward_graph=module, parameter_strides=tuple(strides))


def _copies_of(weight: fx.Node) -> list[fx.Node]:
    """The copies in channels-last order, if nothing else is made of a weight or its views."""
    copies: list[fx.Node] = []
    for user in weight.users:
        if user.target is aten.view.default:
            made = _copies_of(user)
        else:
            made = [user] if user.kwargs.get("memory_format") is torch.channels_last else []
        if not made:
            return []
        copies += made
    return copies


def _convolves(node: fx.Node) -> bool:
    """Whether a node is a convolution that is faster on images in channels-last order."""
    value: Any = node.meta.get("val")
    if node.target not in _GROUPS or not _is_image(node):
        return False
    groups = [*node.args, *[1] * 9][_GROUPS[node.target]]
    return bool(groups == 1 and value.device.type == "cpu" and value.dtype is torch.float32)


def _images(node: fx.Node) -> Sequence[fx.Node]:
    """The operands that a node's result lies like; none if it may lie otherwise."""
    operands, target = node.all_input_nodes, node.target
    if target in _KEEP or target in _GROUPS:
        return operands[:1] if _is_image(operands[0]) else ()
    if not _is_image(node):
        return ()
    if target is aten.cat.default:
        return operands if all(map(_is_image, operands)) else ()
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    shape = node.meta["val"].shape
    return [
        each
        for each in operands
        if pointwise and "memory_format" not in node.kwargs and _is_image(each)
        if each.meta["val"].shape == shape
    ]


def _is_image(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and len(value.shape) == 4
