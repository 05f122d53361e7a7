"""Update BatchNorm's running statistics once a step, with those of the whole batch.

before:  bn = batch_norm(x, w, b, mean, var, True, 0.1, eps);  return (bn[3], bn[4], count + 1, …)
         with the writes running_mean = bn[3], running_var = bn[4], num_batches_tracked = count + 1
after:   bn = batch_norm(x, w, b, zeros, zeros, True, 1.0, eps)
         m = gather(moments, x, bn[3], bn[4]);  return (m, …)
         with the write moments = m, from which the end of the step computes the statistics

With momentum 1 the operation returns the micro-batch's own mean and unbiased variance. Each
micro-batch is still normalised by its own statistics, so no output and no gradient changes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxpipe.compiler.options import Options
from fxpipe.errors import TraceError
from fxpipe.extend import Extension
from fxpipe.extensions.deferred_batchnorm.moments import gather
from fxpipe.ir.plan import Argument, Write
from fxpipe.ir.traced import DeferredNorm, Traced
from fxpipe.passes.graph.lazy_module import copied
from fxpipe.passes.graph.unread import drop_unread
from fxpipe.passes.runner import Pass

aten = torch.ops.aten
_BATCH_NORM = aten._native_batch_norm_legit_functional.default
_COPIES = (aten.clone.default, aten.detach.default)
_MEAN, _VARIANCE = 3, 4
"""Indices of the new running statistics among the operation's results."""


def defer_batchnorm(traced: Traced, model: nn.Module) -> Traced:
    """The same graph, in which every BatchNorm that updates its statistics gathers moments instead.

    Raises:
        TraceError: other code than the BatchNorm itself reads or writes its statistics in training,
            or the graph calls modules.
    """
    updating = {
        f"{name}.running_mean" if name else "running_mean": module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None
    }
    modules = {w.target: updating[w.target] for w in traced.writes if w.target in updating}
    if not modules:
        return traced
    if traced.calls:
        raise TraceError(
            f"{min(modules)} is written in a graph that calls modules as they are, and "
            "DeferredBatchNorm gathers statistics only where all is traced; leave out "
            "DeferredBatchNorm, or what is called as it is"
        )
    return _Deferrer(copied(traced), modules).run()


_DEFER = ("seed_randomness", Pass(defer_batchnorm, "traced, model", "traced"))
_PASSES = {"capture": [_DEFER], "join": [_DEFER]}


@dataclass(frozen=True)
class DeferredBatchNorm(Extension):
    """Update BatchNorm's running statistics once per step, by the mean and variance of the whole
    batch, as without micro-batches.

    These are computed from those of the micro-batches, so the last bits may differ. Without this
    extension each micro-batch updates the statistics, in order. Either way each micro-batch is
    normalised by its own statistics.
    """

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """A pass behind the one that seeds random numbers."""
        return _PASSES


@dataclass
class _Deferrer:
    """Rewrites a functional graph, in which BatchNorm is an operation that returns new statistics;
    ``modules`` has each BatchNorm under the name of its running mean."""

    traced: Traced
    modules: dict[str, _BatchNorm]
    norms: list[DeferredNorm] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[Argument] = field(default_factory=list)
    written: list[Write] = field(default_factory=list)

    def run(self) -> Traced:
        graph = self.traced.graph
        deferred: set[str] = set()
        for target in self.modules:
            calls = self._calls(target)
            for call in calls:
                self._gather(call, target)
            prefix = target.removesuffix("running_mean")
            deferred |= {target, f"{prefix}running_var"}
            if self._counts(f"{prefix}num_batches_tracked", len(calls)):
                deferred.add(f"{prefix}num_batches_tracked")
        end = graph.output_node()
        returned: Any = end.args[0]
        by_name = {node.name: node for node in graph.nodes}
        kept = [write for write in self.traced.writes if write.target not in deferred]
        writes = [*kept, *self.written]
        values = returned[len(self.traced.writes) :]
        end.args = ((*(by_name[write.value] for write in writes), *values),)
        read = {node.name for node in graph.nodes} - {a.name for a in self.traced.buffers}
        inputs = {name for name in read if by_name[name].op == "placeholder"}
        drop_unread(graph, inputs | self.traced.saved)
        left = {node.name for node in graph.nodes}
        graph.lint()
        buffers = (*self.traced.buffers, *self.buffers)
        return replace(
            self.traced,
            buffers=tuple(a for a in buffers if a.name in left),
            constants={**self.traced.constants, **self.constants},
            writes=tuple(writes),
            deferred=tuple(self.norms),
        )

    def _calls(self, target: str) -> list[fx.Node]:
        """The calls of one module, in order; each reads the statistics that the last call wrote."""
        prefix = target.removesuffix("running_mean")
        means = self._chain(target, _MEAN)
        variances = self._chain(f"{prefix}running_var", _VARIANCE)
        if not means or means != variances:
            raise TraceError(
                f"the running statistics of BatchNorm {prefix.rstrip('.') or 'the model'!r} are "
                "read or written by other code than it in training, and with DeferredBatchNorm "
                "they change only at the end of a step; leave out DeferredBatchNorm"
            )
        return means

    def _chain(self, target: str, place: int) -> list[fx.Node]:
        """The BatchNorm calls from a buffer to the value that is written to it; empty if there is
        any other operation between."""
        start, value = self._ends(target)
        calls: list[fx.Node] = []
        while start is not None and value is not start:
            while value.target in _COPIES and len(value.users) == 1:
                value = value.args[0]
            call = value.args[0] if value.target is operator.getitem else None
            if not isinstance(call, fx.Node) or call.target is not _BATCH_NORM:
                return []
            if value.args[1] != place or len(value.users) != 1:
                return []
            calls.append(call)
            value = call.args[place]
        return calls[::-1] if start is not None and len(start.users) == 1 else []

    def _ends(self, target: str) -> tuple[fx.Node | None, Any]:
        """A buffer's placeholder and the value written to it; None if it is not read or written."""
        read = [a.name for a in self.traced.buffers if a.target == target]
        written = [w.value for w in self.traced.writes if w.target == target]
        if not read or not written:
            return None, None
        by_name = {node.name: node for node in self.traced.graph.nodes}
        return by_name[read[-1]], by_name[written[-1]]

    def _placeholder(self, target: str, value: Tensor) -> fx.Node:
        """Add a placeholder for the constant ``target``."""
        graph = self.traced.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(target.replace(":", "_"))
        node.meta["val"] = value
        self.buffers.append(Argument(node.name, target))
        self.constants[target] = value
        return node

    def _gather(self, call: fx.Node, target: str) -> None:
        graph, module = self.traced.graph, self.modules[target]
        name = f"moments:{len(self.norms)}"
        assert module.running_mean is not None and module.momentum is not None
        none = torch.zeros_like(module.running_mean)
        # its own, as another BatchNorm may be on another device
        zeros = self._placeholder(f"zeros:{len(self.norms)}", none)
        before = self._placeholder(name, torch.stack([none] * 3))
        args = list(call.args)
        args[_MEAN], args[_VARIANCE], args[6] = zeros, zeros, 1.0
        call.args = tuple(args)
        parts = {n.args[1]: n for n in call.users if n.target is operator.getitem}
        last = max(parts.values(), key=list(graph.nodes).index)
        with graph.inserting_after(last):
            node = graph.call_function(gather, (before, args[0], parts[_MEAN], parts[_VARIANCE]))
        node.meta.update({**parts[_MEAN].meta, "val": before.meta["val"]})
        prefix = target.removesuffix("running_mean")
        tracked = None if module.num_batches_tracked is None else f"{prefix}num_batches_tracked"
        norm = DeferredNorm(name, target, f"{prefix}running_var", tracked, module.momentum)
        self.norms.append(norm)
        self.written.append(Write(name, node.name))

    def _counts(self, target: str, calls: int) -> bool:
        """Whether a buffer is increased by one in each of so many calls, and not read otherwise."""
        start, value = self._ends(target)
        count = 0
        while start is not None and value is not start:
            if value.target is not aten.add.Tensor or value.args[1] != 1 or len(value.users) != 1:
                return False
            value = value.args[0]
            count += 1
        return start is not None and count == calls and len(start.users) == 1
