"""Append the loss to a graph with leaf modules, as one more of them.

before:  model: (x) → y = self.body(x)
after:   (x, target_0) → y = self.body(x), fxpipe_loss = self.fxpipe_loss(y, target_0)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.extensions.leaf_modules.draws import DrawsWatched, draw_from
from fxpipe.extensions.leaf_modules.logging_loss import Unproxied
from fxpipe.ir.plan import Argument
from fxpipe.ir.traced import AUTOCAST, DRAWS, Literal, Traced
from fxpipe.passes.partition.assignment import compute_nodes
from fxpipe.passes.tracing.attach_loss import LOSS_GRAPH, LossModule, copy_nodes
from fxpipe.passes.tracing.loss_graph import graph_of_loss
from fxpipe.torchtools.state import autocasts, other_states

LEAF_LOSS = "fxpipe_loss"
"""The name of the loss among leaf modules."""


def attach_leaf_loss(
    traced: Traced, loss_module: LossModule, output: Sequence[Any], targets: tuple[Any, ...]
) -> Traced:
    """One graph of a model with leaf modules and its loss, which is called as it is, too.

    Raises:
        InputError: the loss is not a scalar.
        TraceError: it draws from Python's or NumPy's generator.
    """
    module = fx.GraphModule(traced.module, fx.Graph())
    module.add_submodule(LEAF_LOSS, loss_module)
    for name, _ in traced.module.named_children():
        module.add_submodule(name, traced.module.get_submodule(name))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copy_nodes(traced.graph.find_nodes(op="placeholder"), graph, copies)
    leaves, spec = pytree.tree_flatten(targets)
    names = [f"target_{index}" for index in range(len(leaves))]
    placeholders = [graph.placeholder(name) for name in names]
    for node in traced.graph.find_nodes(op="get_attr"):
        if "." not in (name := str(node.target)):
            setattr(module, name, getattr(traced.module, name))
    copy_nodes(compute_nodes(traced.graph), graph, copies)
    by_name = {node.name: node for node in graph.nodes}
    outputs = [
        out.value if isinstance(out, Literal) else by_name[out.name] for out in traced.outputs
    ]
    call = graph.call_module(LEAF_LOSS, (*outputs, *pytree.tree_unflatten(placeholders, spec)))
    before = other_states()
    with torch.no_grad(), DrawsWatched() as watch:
        call.meta["val"] = loss_module(*output, *targets)
    if other_states() != before:
        raise TraceError(
            "the loss draws from Python's random or numpy.random, which no seed of a micro-batch "
            "controls; draw with torch.rand"
        )
    call.meta[DRAWS] = draw_from if watch.drew else None
    call.meta[AUTOCAST] = autocasts()
    value, scalars = call, []
    if loss_module.logged:
        value, *scalars = (
            graph.call_function(operator.getitem, (call, i)) for i in range(len(call.meta["val"]))
        )
        for node, result in zip((value, *scalars), call.meta["val"], strict=True):
            node.meta["val"] = result
    with suppress(Exception):  # not every loss can be traced
        value.meta[LOSS_GRAPH] = graph_of_loss(loss_module, output, leaves, spec, names, Unproxied)
    written = [node for node in outputs if isinstance(node, fx.Node)]
    graph.output((*written, value, *scalars))
    graph.lint()
    module.graph = graph
    held = {f"{LEAF_LOSS}.{name}": buffer for name, buffer in loss_module.named_buffers()}
    return replace(
        traced,
        module=module,
        buffers=(*traced.buffers, *(Argument(name, name) for name in held)),
        constants={**traced.constants, **held},
        inputs=(*traced.inputs, *names),
        accepts=lambda shapes: traced.accepts(shapes[: len(traced.inputs)]),
        loss=value.name,
        logged=dict(zip(loss_module.logged, (node.name for node in scalars), strict=True)),
    )
