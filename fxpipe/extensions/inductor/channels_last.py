"""Put images around convolutions into channels-last order, in stages that inductor compiles.

before:  c = conv2d(x, w);  y = relu(c);  z = flatten(y, 1)
after:   x1 = clone(x, memory_format=channels_last);  c = conv2d(x1, w);  y = relu(c)
         y1 = clone(y, memory_format=contiguous_format);  z = flatten(y1, 1)

For contiguous images, oneDNN reorders the input and output of a convolution in every call, which
takes a quarter of a U-Net's time. In channels-last order it reorders nothing, and later operations
keep the order, from stage to stage. Weights, their gradients and what the caller gets stay
contiguous. Results are rounded differently, so pipes without a stage compiler are left alone.

``lay_weights`` moves the copies of convolution weights out of the graphs, so that they are made
once a step and not in the forward and backward of every micro-batch.

before:  forward of x, w:  v = view(view(w));  l = clone(v, channels_last);  c = convolution(x, l)
after:   forward of x, w:  c = convolution(x, w)        the caller passes w in channels-last order
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

from fxpipe.ir.plan import Plan, Stage
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.graph.lazy_module import lazy_module

aten = torch.ops.aten

_GROUPS = {
    aten.conv2d.default: 6,
    aten.conv2d.padding: 6,
    aten.conv_transpose2d.input: 6,
    aten.convolution.default: 8,
}
"""Convolution of images → the position of its number of groups among the arguments."""

_KEEP = {
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.avg_pool2d.default,
    aten.max_pool2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
}
"""Operations whose result has the memory order of their first operand."""


def lay_channels_last(plan: Plan) -> Plan:
    """Put the images of a plan's stages into channels-last order, before differentiation.

    The plan stays as it is if that would take as many copies as it has convolutions.
    """
    if any(stage.under_autograd for stage in plan.stages):
        return plan
    layer = _Layer(plan)
    stages = tuple(map(layer.stage, plan.stages))
    return replace(plan, stages=stages) if layer.copied < layer.convolved else plan


class _Layer:
    """Copies the graphs of stages, in the order in which they run.

    A node is *laid* if its value is in channels-last order.

    Attributes:
        copied: the number of values that are copied into another order.
        convolved: the number of convolutions in channels-last order.
    """

    def __init__(self, plan: Plan) -> None:
        self.copied = self.convolved = 0
        self._results = plan.results
        self._crossing: set[str] = set()  # laid values that other stages read

    def stage(self, stage: Stage) -> Stage:
        new = fx.Graph()
        self._copies: dict[tuple[fx.Node, torch.memory_format | None], fx.Node] = {}
        self._laid: set[fx.Node] = set()
        plain = self._results | {write.value for write in stage.writes}
        for node in stage.graph.graph.nodes:
            orders = self._orders(node, plain)
            operands = {x: self._copy(x, orders.get(x)) for x in node.all_input_nodes}
            if node in self._laid and node.target in _GROUPS:
                weight: Any = node.args[1]
                operands[weight] = self._weight(weight, stage)
            copy = self._copies[node, None] = new.node_copy(node, operands.__getitem__)
            copy.name = node.name  # fx renames a node that is called like a builtin
            if node in self._laid and node.name in plain:
                copy.name = f"{node.name}_before"
                self._copy(node, torch.contiguous_format).name = node.name
        new.lint()
        self._crossing |= {node.name for node in self._laid} - plain
        return replace(stage, graph=lazy_module(stage.graph, new, type(stage.graph).__name__))

    def _orders(self, node: fx.Node, plain: Set[str]) -> dict[fx.Node, torch.memory_format]:
        """Operand → the order in which a node must get it, if that matters. Also notes whether the
        node is laid. ``plain`` are the values that must stay contiguous."""
        if node.op == "placeholder":
            self._laid.update([node] if node.name in self._crossing else [])
            return {}
        operands = node.all_input_nodes
        if node.op == "output":
            results = [operand for operand in operands if operand.name in plain]
            return dict.fromkeys(results, torch.contiguous_format)
        if node.target is getitem:
            self._laid.update([node] if operands[0] in self._laid and _is_image(node) else [])
            return {}
        images, convolves = _images(node), _convolves(node)
        if convolves or self._laid.intersection(images):
            self._laid.add(node)
            self.convolved += convolves
            return dict.fromkeys(images, torch.channels_last)
        return dict.fromkeys(self._laid.intersection(operands), torch.contiguous_format)

    def _copy(self, node: fx.Node, order: torch.memory_format | None) -> fx.Node:
        """Return a node's copy in the new graph, as it is or in an order."""
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
        """Return a weight through two views, whose backward makes its gradient contiguous again.
        A parameter that only convolutions read is also copied; see ``lay_weights``."""
        weight = self._copies[node, None]
        if not node.meta["val"].is_contiguous():
            return weight
        call = weight.graph.call_function
        flat = call(aten.reshape.default, (weight, [-1]))
        nodes = [flat, call(aten.view_as.default, (flat, weight))]
        is_parameter = node.name in {argument.name for argument in stage.parameters}
        if is_parameter and all(user.target in _GROUPS for user in node.users):
            order: dict[str, Any] = {"memory_format": torch.channels_last}
            nodes.append(call(aten.clone.default, (nodes[-1],), order))
        for new in nodes:
            new.meta.update(weight.meta)
        return nodes[-1]


def lay_weights(plan: Plan) -> Plan:
    """Let the forwards of a differentiated plan take convolution weights in channels-last order."""
    stages = (
        replace(stage, kernel=_laid_weights(stage.kernel, len(stage.parameters)))
        if isinstance(stage.kernel, GraphKernel)
        else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def _laid_weights(kernel: GraphKernel, count: int) -> GraphKernel:
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
    """The channels-last copies of a weight or its views; none if these have any other use."""
    copies: list[fx.Node] = []
    for user in weight.users:
        if user.target is aten.view.default and (deeper := _copies_of(user)):
            copies += deeper
        elif user.kwargs.get("memory_format") is torch.channels_last:
            copies.append(user)
        else:
            return []
    return copies


def _convolves(node: fx.Node) -> bool:
    """Whether a node is a convolution that is faster in channels-last order."""
    value: Any = node.meta.get("val")
    if node.target not in _GROUPS or not _is_image(node):
        return False
    groups = [*node.args, *[1] * 9][_GROUPS[node.target]]
    return bool(groups == 1 and value.device.type == "cpu" and value.dtype is torch.float32)


def _images(node: fx.Node) -> Sequence[fx.Node]:
    """The operands whose memory order a node's result takes; none if it may take another."""
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
        operand
        for operand in operands
        if pointwise and "memory_format" not in node.kwargs and _is_image(operand)
        if operand.meta["val"].shape == shape
    ]


def _is_image(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and len(value.shape) == 4
