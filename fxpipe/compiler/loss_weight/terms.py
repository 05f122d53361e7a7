"""Find what a loss divides by: a mean over targets that are not ignored is no mean over samples.

loss:     ce = cross_entropy(logits, flatten(y), weight, ignore_index=-100);  ce + 0.1 * penalty
divisor:  y → the sum of weight[t] over all t in flatten(y) other than -100
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.ir.called import Called
from fxpipe.ir.traced import DRAWS, Traced
from fxpipe.passes.differentiate.extract import ancestors, extract
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.tracing.loss_graph import LOSS_GRAPH
from fxpipe.random import arguments_of
from fxpipe.torchtools import source
from fxpipe.torchtools.constants import move_constants

_SAME = {"alias", "clone", "contiguous", "neg", "reshape", "squeeze", "to", "_to_copy", "view"}
_SHAPES = _SAME - {"neg"} | {"flatten", "permute", "t", "transpose", "unsqueeze"}
_SUMS = {"add", "sub", "rsub"}
_PRODUCTS = {"mul", "div"}
_REDUCED = {"sum", "mean", "getitem"}
_STACKS = {"stack", "cat"}
_MEANS = {"cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"}
_MEANS |= {"nll_loss_forward", "nll_loss2d_forward"}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Divisor:
    """The number that a term of the loss is divided by, which differs between micro-batches.

    Attributes:
        line: the user's line that computes the term.
        mean: whether it is a mean, so that those of the micro-batches, weighted by their divisors,
            give that of the whole batch.
        leaves: the flat inputs that the divisor depends on.
        buffers: the names of the buffers that it depends on.
        made: computes the divisor from these on the ``device``, by default the CPU, as a number or
            a scalar; None if it is not known before the run.
        ignored: the value of entries that do not count, if the divisor is the number of all other
            entries of its only leaf.
        sums: whether the term is a sum, which is not divided at all.
        counts: whether it is the number of targets that are not ignored. No gradient of such a mean
            is NaN, even where it is 0.
    """

    line: str
    mean: bool = False
    leaves: tuple[int, ...] = ()
    buffers: tuple[str, ...] = ()
    made: Callable[..., float | Tensor] | None = None
    ignored: int | None = None
    sums: bool = False
    counts: bool = False


def loss_terms(traced: Traced, split: Collection[int]) -> tuple[Divisor | None, ...]:
    """The divisor of each term of a loss; ``split`` are the flat inputs that are split.

    None for a mean over samples, or over entries of which each sample has the same number. Terms
    that are the same in all micro-batches, such as a penalty on weights, are left out.
    """
    loss = next(node for node in traced.graph.nodes if node.name == traced.loss)
    leaves = {name: index for index, name in enumerate(traced.inputs) if name is not None}
    if LOSS_GRAPH in loss.meta:
        module, targets = loss.meta[LOSS_GRAPH]
        placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        pairs = zip(placeholders, targets, strict=True)
        leaves = {name: leaves[target] for name, target in pairs if target is not None}
        return _Reader(module, leaves, {}, (), split).terms(module.graph.output_node().args[0])
    written = {write.target for write in traced.writes}
    buffers = {a.name: a.target for a in traced.buffers if a.target not in written}
    fixed = [argument.name for argument in traced.parameters]
    return _Reader(traced.module, leaves, buffers, fixed, split).terms(loss)


class _Reader:
    """Finds the divisors in a graph.

    Attributes:
        varies: the nodes whose values differ between micro-batches.
        known: the nodes that depend on inputs and buffers only, and are known before the run.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        leaves: Mapping[str, int],
        buffers: Mapping[str, str],
        fixed: Collection[str],
        split: Collection[int],
    ) -> None:
        """Find out which nodes vary, and which are known.

        Args:
            leaves: placeholder → its flat input.
            buffers: placeholder → its buffer, for buffers that the graph does not write.
            fixed: the other placeholders that are the same in every micro-batch.
        """
        self.module, self.leaves, self.buffers = module, leaves, buffers
        self.varies: set[fx.Node] = set()
        self.known: set[fx.Node] = set()
        for node in module.graph.nodes:
            name, read = node.name, node.all_input_nodes
            if node.op == "placeholder":
                shared = leaves[name] not in split if name in leaves else name in fixed
                if not shared and name not in buffers:
                    self.varies.add(node)
                if name in leaves or name in buffers:
                    self.known.add(node)
                continue
            if not self.varies.isdisjoint(read):
                self.varies.add(node)
            if self.known.issuperset(read) and self._pure(node):
                self.known.add(node)

    def terms(self, loss: fx.Node) -> tuple[Divisor | None, ...]:
        """The divisors of a loss's terms; see ``loss_terms``."""
        divisors: list[Divisor | None] = []
        todo: list[Any] = [loss]
        scaled = False
        while todo:
            node = todo.pop()
            if node not in self.varies:
                continue
            operation, read = self._operation(node), node.all_input_nodes
            inner = self._operation(read[0]) if read else ""
            left, right = (*node.args, *node.kwargs.values(), None, None)[:2]
            if operation in _MEANS:
                divisors.append(self._mean(node))
            elif operation in _SUMS:
                todo += read
            elif operation in _SAME or (operation in _REDUCED and inner in _MEANS):
                todo.append(read[0])
            elif operation in _REDUCED and inner in _STACKS:
                todo += read[0].all_input_nodes
            elif operation in _PRODUCTS and right not in self.varies:
                todo.append(left)
                scaled |= not isinstance(right, fx.Node)
            elif operation == "mul" and left not in self.varies:
                todo.append(right)
                scaled |= not isinstance(left, fx.Node)
            else:
                asked = self._asked(node, operation)
                divisors += [Divisor(source.of_node(node)) if asked else None, *self._within(node)]
        # a sum times a constant may be a mean: the number of samples is a constant in the graph
        return tuple(None if scaled and x is not None and x.sums else x for x in divisors)

    def _mean(self, node: fx.Node) -> Divisor | None:
        """The divisor of a cross-entropy or the like."""
        given = arguments_of(node.target, node.args, node.kwargs)
        reduction, target, weight = given.get("reduction", 1), given["target"], given.get("weight")
        ignored = given.get("ignore_index", -100)
        line = source.of_node(node)
        if reduction == 2:
            return Divisor(line, sums=True)
        if reduction != 1:
            return None
        while self._operation(target) in _SHAPES:  # counting does not depend on the shape
            target = target.args[0]
        read = [value for value in (target, weight) if isinstance(value, fx.Node)]
        if not self.known.issuperset(read):
            return None if weight is None else Divisor(line, mean=True)
        count = partial(_count, ignored, given.get("label_smoothing", 0.0))
        if isinstance(weight, Tensor):
            count = partial(count, weight=weight)
        divisor = self._divisor(line, read, count)
        if weight is not None:
            return divisor
        counts_input = target.op == "placeholder" and target in self.varies
        return replace(divisor, counts=True, ignored=ignored if counts_input else None)

    def _asked(self, node: fx.Node, operation: str) -> bool:
        """Whether a node divides by something that is not read from the graph: a quotient by a
        value of the inputs, or a mean over what a mask selects."""
        read = node.all_input_nodes
        if operation == "div":
            return read[-1] in self.known
        selects = operation == "mean" and read[0].op == "call_function"
        selection = self._operation(read[0]) if selects else ""
        if selection != "index":
            return selection == "masked_select"
        chosen = [n.meta.get("val") for n in read[0].all_input_nodes[1:]]
        return any(x is not None and x.dtype is torch.bool for x in chosen)

    def _within(self, node: fx.Node) -> list[Divisor]:
        """The divisors of the means that a term depends on in some other way."""
        above = ancestors([node]) & self.varies
        means = [n for n in self.module.graph.nodes if n in above and self._operation(n) in _MEANS]
        divisors = map(self._mean, means)
        return [divisor for divisor in divisors if divisor is not None and not divisor.sums]

    def _divisor(
        self,
        line: str,
        read: Sequence[fx.Node],
        made: Callable[..., Any],
    ) -> Divisor:
        """The divisor of a mean, which ``made`` computes from known values, as a number or a
        scalar tensor."""
        above = ancestors(read)
        nodes = [node for node in self.module.graph.nodes if node in above]
        inputs = [node for node in nodes if node.op == "placeholder"]
        inputs.sort(key=lambda node: node.name in self.buffers)
        graph = extract(inputs, [node for node in nodes if node.op != "placeholder"], read)

        @cache
        def values_on(device: torch.device) -> fx.GraphModule:
            return _moved(self.module, graph, device)

        def run(*given: Any, device: torch.device = _CPU) -> Any:
            with torch.no_grad():
                moved = (v.to(device) if isinstance(v, Tensor) else v for v in given)
                return made(*values_on(device)(*moved))

        leaves = tuple(self.leaves[node.name] for node in inputs if node.name in self.leaves)
        buffers = tuple(self.buffers[node.name] for node in inputs if node.name in self.buffers)
        return Divisor(line, True, leaves, buffers, run)

    def _pure(self, node: fx.Node) -> bool:
        """Whether a node may be computed again: it draws no random numbers and writes nothing."""
        schema = getattr(node.target, "_schema", None)
        writes = schema is not None and schema.is_mutable
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        return (
            node.op != "call_module"
            and not isinstance(node.target, Called)
            and not (writes or draws or node.meta.get(DRAWS))
        )

    def _operation(self, node: Any) -> str:
        """The name of the operator that a node calls."""
        target: Any = node.target if isinstance(node, fx.Node) else None
        if target is operator.getitem:
            return "getitem"
        overload = isinstance(target, torch._ops.OpOverload)
        return target._schema.name.rpartition("::")[2] if overload else ""


def _count(
    ignored: int, smooth: float, target: Tensor, weight: Tensor | None = None
) -> float | Tensor:
    """The number that ``cross_entropy`` divides by.

    A class index counts with the weight of its class, or not at all if it is ignored. Targets that
    are class probabilities all count. NaN if a sum that is not 0 would be divided by 0.
    """
    if target.is_floating_point():
        return target.numel()
    kept = target != ignored
    if weight is None:
        return kept.sum()
    weights = current_copy(weight, target.device).double()[target.where(kept, 0)]
    total = weights.where(kept, 0).sum()
    return total.where((total != 0) | ~kept.any(), math.nan) if smooth else total


_COPIES = WeakTensorKeyDictionary()
"""Tensor → device → the tensor's version, and a copy of it."""


def current_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, not to be written.

    It is copied anew where it has been written since, so that the host waits for a device only
    then.
    """
    if tensor.device == device:
        return tensor
    copies: dict[torch.device, tuple[int, Tensor]] = _COPIES.setdefault(tensor, {})
    version, copy = copies.get(device, (-1, tensor))
    if version != tensor._version:
        copy = tensor.to(device)
        copies[device] = tensor._version, copy
    return copy


def _moved(module: fx.GraphModule, graph: fx.Graph, device: torch.device) -> fx.GraphModule:
    """A module for a part of another one's graph that makes all of its tensors on a device."""
    graph = copy.deepcopy(graph)

    def exchange(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, exchange)
        node.kwargs = fx.node.map_aggregate(node.kwargs, exchange)
    result = lazy_module(module, graph)
    move_constants(result, device)
    return result
