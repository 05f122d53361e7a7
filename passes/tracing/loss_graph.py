"""Note what a loss computes in operations that are still whole, to find what it divides by.

before:  loss node: getitem(nll_loss_forward(log_softmax(y), target), 0)
after:   the same; and among its metadata a graph that never runs: cross_entropy_loss(y, target)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpipe.ir.traced import Traced
from fxpipe.passes.tracing.loss_module import LossModule
from fxpipe.torchtools import source

LOSS_GRAPH = "fxpipe.loss_graph"
"""Key of the loss node's metadata: a graph of the loss for analysis, which never runs, and the
input that each of its placeholders stands for, or None."""

READING = frozenset(
    (
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__),
        *(Tensor.__repr__, Tensor.__format__, Tensor.__array__),
    )
)
"""Methods that read numbers from a tensor, which the graph does not hold."""


class Unproxied(TorchFunctionMode):
    """Inside of ``make_fx``, lets code read numbers from the tensors that it traces."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with disable_proxy_modes_tracing() if func in READING else nullcontext():
            return func(*args, **(kwargs or {}))


def note_loss(
    traced: Traced,
    loss_module: LossModule,
    output: Sequence[Any],
    real_targets: Any,
    numbers: Sequence[Tensor],
) -> Traced:
    """Give the loss node of a graph its LOSS_GRAPH, if the loss can be traced so.

    Args:
        loss_module: the loss.
        output: the flat output of the model on the micro-batch.
        real_targets: the targets on it.
        numbers: those that come after the targets among the graph's inputs.
    """
    leaves, spec = pytree.tree_flatten(real_targets)
    end = len(traced.inputs) - len(numbers)
    names = traced.inputs[end - len(leaves) : end]
    loss = next(node for node in traced.graph.nodes if node.name == traced.loss)
    with suppress(Exception):  # not every loss can be traced
        loss.meta[LOSS_GRAPH] = graph_of_loss(loss_module, output, leaves, spec, names)
    return traced


def graph_of_loss(
    loss: LossModule,
    output: Sequence[Any],
    targets: Sequence[Any],
    spec: pytree.TreeSpec,
    names: Sequence[str | None],
) -> tuple[fx.GraphModule, list[str | None]]:
    """The value of LOSS_GRAPH for a loss.

    Args:
        output: the flat output of the model.
        targets: the flat targets.
        spec: how they nest.
        names: the inputs of the whole graph that they are.
    """
    examples, count = [*output, *targets], len(output)
    tensors = {i: value for i, value in enumerate(examples) if isinstance(value, torch.Tensor)}

    def call(*proxies: torch.Tensor) -> Any:
        values = [*examples]
        for index, proxy in zip(tensors, proxies, strict=True):
            values[index] = proxy
        with Unproxied():
            made = loss(*values[:count], *pytree.tree_unflatten(values[count:], spec))
        return made[0] if loss.logged else made

    with torch.no_grad():
        module = make_fx(call, pre_dispatch=True)(*tensors.values())
    source.credit(module.graph, loss.function)
    return module, [names[i - count] if i >= count else None for i in tensors]
