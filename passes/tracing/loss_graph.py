"""Note what a loss computes in operations that are still whole, to find what it divides by.

before:  loss node: getitem(nll_loss_forward(log_softmax(y), target), 0)
after:   the same; and among its metadata a graph that never runs: cross_entropy_loss(y, target)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxpipe.ir.traced import Traced
from fxpipe.passes.tracing.loss_module import LossModule
from fxpipe.torchtools import source

LOSS_GRAPH = "fxpipe.loss_graph"
"""Key of the loss node's metadata: a graph of the loss for analysis, which never runs, and the
input that each of its placeholders stands for, or None."""


def note_loss(
    traced: Traced,
    loss_module: LossModule,
    output: Sequence[Any],
    real_targets: Any,
    count: int,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Traced:
    """Give the loss node of a graph its LOSS_GRAPH, if the loss can be traced so.

    Args:
        loss_module: the loss.
        output: the flat output of the model on the micro-batch.
        real_targets: the targets on it.
        count: how many numbers come after the targets among the graph's inputs.
        inside: the loss runs inside of it.
    """
    leaves, spec = pytree.tree_flatten(real_targets)
    end = len(traced.inputs) - count
    names = traced.inputs[end - len(leaves) : end]
    loss = next(node for node in traced.graph.nodes if node.name == traced.loss)
    with suppress(Exception):  # not every loss can be traced
        loss.meta[LOSS_GRAPH] = graph_of_loss(loss_module, output, leaves, spec, names, inside)
    return traced


def graph_of_loss(
    loss: LossModule,
    output: Sequence[Any],
    targets: Sequence[Any],
    spec: pytree.TreeSpec,
    names: Sequence[str | None],
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[fx.GraphModule, list[str | None]]:
    """The value of LOSS_GRAPH for a loss.

    Args:
        output: the flat output of the model.
        targets: the flat targets.
        spec: how they nest.
        names: the inputs of the whole graph that they are.
        inside: the loss runs inside of it.
    """
    examples, count = [*output, *targets], len(output)
    tensors = {i: value for i, value in enumerate(examples) if isinstance(value, torch.Tensor)}

    def call(*proxies: torch.Tensor) -> Any:
        values = [*examples]
        for index, proxy in zip(tensors, proxies, strict=True):
            values[index] = proxy
        with inside():
            made = loss(*values[:count], *pytree.tree_unflatten(values[count:], spec))
        return made[0] if loss.logged else made

    with torch.no_grad():
        module = make_fx(call, pre_dispatch=True)(*tensors.values())
    source.credit(module.graph, loss.function)
    return module, [names[i - count] if i >= count else None for i in tensors]
