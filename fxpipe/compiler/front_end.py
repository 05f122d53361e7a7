"""The front end: from a model, its loss and one micro-batch to a traced graph.

It decides which submodules become leaf modules, which are called as they are. The graphs
themselves are made by the tracing passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.compiler import passes
from fxpipe.compiler.guards import Guards
from fxpipe.compiler.leaves import Leaves
from fxpipe.compiler.options import Options
from fxpipe.compiler.preflight import output_dims, refuse_hidden
from fxpipe.errors import TraceError, way_out
from fxpipe.ir.traced import Traced, Value, with_dims
from fxpipe.passes.runner import run_all
from fxpipe.passes.tracing.attach_loss import LossModule
from fxpipe.passes.tracing.explain import differing_line
from fxpipe.passes.tracing.leaf_calls import LeafCalls
from fxpipe.passes.tracing.leaf_nests import REST
from fxpipe.passes.tracing.rest import Calls, split
from fxpipe.passes.tracing.symbolic import is_torchs
from fxpipe.runtime.batch import Batch
from fxpipe.torchtools import source
from fxpipe.torchtools.functions import checkpoints_opened
from fxpipe.torchtools.pytrees import taken_apart
from fxpipe.torchtools.state import assigned_in_place, intra_op_threads, untouched

Dims = Sequence[tuple[int, ...]]
"""Flat input → its dimensions that are the batch."""


class FrontEnd:
    """Traces a model with its loss into one graph. The model's state is not changed.

    Attributes:
        guards: watches what the traces depend on besides tensors.
    """

    def __init__(self, options: Options) -> None:
        """Nothing is traced yet."""
        self.options = options
        self._leaves = Leaves(options)
        self.guards = Guards(options, self._leaves.modules)

    def trace(
        self, batch: Batch, leaves: list[Any], size: int, with_loss_: bool, fixed: bool
    ) -> Traced:
        """The graph of the model, with or without its loss, for micro-batches like this one.

        Args:
            batch: the call.
            leaves: the flat inputs and targets of one micro-batch.
            size: how many samples the micro-batch has.
            with_loss_: whether the graph computes the loss, too.
            fixed: whether the graph need hold for this size only.
        """
        options, loss = self.options, self.options.loss
        args, kwargs, targets = batch.unflatten(leaves)
        every: Dims = [() if dim is None else (dim,) for dim in batch.dims]
        dims, target_dims = every[: batch.inputs], every[batch.inputs :]
        facts = {
            **vars(options),
            "guards": self.guards,
            "args": args,
            "kwargs": kwargs,
            "targets": targets,
            "inputs": dict(zip(batch.names, leaves, strict=True)),
            "size": size,
            "called": self._leaves.modules,
            "is_leaf": self._is_leaf,
            "given_loss": with_loss_ and loss is not None,
            "returned_loss": with_loss_ and loss is None,
            "leaf_loss": False,
            "traced_loss": False,
        }
        self._leaves.renew()
        run_all(passes.ADMIT, facts)
        with untouched(options.model), intra_op_threads(options.threads):
            output = self._tried(facts)
            traced = self._front_end(args, kwargs, dims, size, fixed)
            if not fixed and any(out.dims is None for out in traced.outputs):
                told = output_dims(options.model, args, kwargs, dims, _flat_outputs(traced), size)
                traced = traced if told is None else with_dims(traced, told)
            if with_loss_ and loss is not None:
                flat, spec = pytree.tree_flatten(taken_apart(output))
                module = LossModule(options.objective, loss, spec)
                facts |= {"leaf_loss": traced.leaves, "traced_loss": not traced.leaves}
                if traced.leaves:
                    facts |= {"loss_module": module, "output": flat}
                else:
                    dims = [*_output_dims(traced, size), *target_dims]
                    try:
                        made = self._traced(module, (*flat, *targets), {}, dims, size, fixed)
                    except TraceError as error:
                        self._leaves.take_loss(error)
                        return self.trace(batch, leaves, size, with_loss_, fixed)
                    source.credit(made.graph, loss)
                    facts |= {"loss": made, "tensors": dict(module.named_buffers())}
            joined: Traced = run_all(passes.JOIN, {**facts, "traced": traced})["traced"]
        return joined

    def output_dims(
        self, traced: Traced, batch: Batch, leaves: list[Any], size: int
    ) -> Sequence[tuple[int, ...]] | None:
        """For each flat output of a graph: which dimensions are the batch; None if unknown.

        Args:
            traced: the graph.
            batch: the call.
            leaves: the flat inputs and targets of one micro-batch.
            size: how many samples the micro-batch has.
        """
        args, kwargs, _ = batch.unflatten(leaves)
        dims: Dims = [() if dim is None else (dim,) for dim in batch.dims[: batch.inputs]]
        with untouched(self.options.model), intra_op_threads(self.options.threads):
            return output_dims(self.options.model, args, kwargs, dims, _flat_outputs(traced), size)

    def _is_leaf(self, name: str, module: nn.Module) -> bool:
        """Whether a submodule is a leaf module, which is called as it is."""
        symbolic = self.options.tracer == "symbolic"
        return name in self._leaves.modules or (symbolic and is_torchs(module))

    def refuse_two_traces(
        self, batch: Batch, leaves: list[Any], size: int, with_loss_: bool, error: TraceError
    ) -> None:
        """Trace once more after a graph was found to be wrong, and compare the two traces.

        Raises:
            TraceError: the traces differ, so tracing is not deterministic; names the line.
        """
        graphs = [self.trace(batch, leaves, size, with_loss_, True) for _ in range(2)]
        line = differing_line(*(traced.graph for traced in graphs))
        if line:
            raise TraceError(
                f"{type(self.options.model).__name__} cannot be traced at {line} (tracing is not "
                "deterministic: two traces differ there); let it depend on the inputs and the "
                f"model's parameters and buffers alone, or {way_out('')}"
            ) from error

    def _tried(self, facts: dict[str, Any]) -> Any:
        """The model's output; where it draws from Python's or NumPy's generator, a submodule around
        that line becomes a leaf module."""
        while True:
            try:
                return run_all(passes.TRY, facts)["output"]
            except TraceError as error:
                if not error.submodules or self._leaves.grow(error) is not None:
                    raise

    def _front_end(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims, size: int, fixed: bool
    ) -> Traced:
        """The model's graph. A submodule with a line that cannot be traced becomes a leaf."""
        while True:
            try:
                traced = self._traced(self.options.model, args, kwargs, dims, size, fixed)
            except TraceError as error:
                refusal = self._leaves.grow(error)
                if refusal is not None:
                    traced = self._before(refusal, args, kwargs, size)
                    self._leaves.tell()
                    return traced
            else:
                self._leaves.tell()
                return traced

    def _before(
        self, refusal: TraceError, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> Traced:
        """The model's graph up to a line of its own ``forward`` that cannot be traced.

        What follows that line becomes one leaf module.
        """
        # a leaf module that the user asked for and that does not fit is an error, not such a line
        model, possible = self.options.model, self.options.tracer == "export" and refusal.where
        calls = Calls(model, args, kwargs) if possible else None
        reached: list[str] = []
        begins = 0

        def attempt(count: int) -> tuple[Traced | None, int]:
            nonlocal begins
            assert calls is not None
            while True:
                twin = split(model, calls, count, reached)
                try:
                    traced = self._with_leaves(args, kwargs, size, twin)
                except TraceError as error:
                    if self._leaves.grow(error) is not None:
                        return None, len(reached)
                else:
                    begins = count
                    return traced, count

        traced = None if calls is None else calls.latest(attempt)
        if calls is None or traced is None:
            self._leaves.shrink()
            raise refusal
        called = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
        self._leaves.shrink(called)
        self._leaves.tell_rest(refusal, calls.names, begins)
        return traced

    def _traced(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: Dims,
        size: int,
        fixed: bool,
    ) -> Traced:
        with_leaves = model is self.options.model and (self._leaves.modules or self._leaves.loss)
        if with_leaves and self.options.tracer == "export":
            return self._with_leaves(args, kwargs, size, model)
        return self._graph(model, args, kwargs, dims, size, fixed)

    def _with_leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, model: nn.Module
    ) -> Traced:
        """The exported model's graph with leaf modules; it holds for this batch size only."""
        leaves = dict(self._leaves.modules)
        if REST in model._modules:
            leaves[REST] = model.get_submodule(REST)
        calls = LeafCalls(leaves, {*self._leaves.unasked, REST})
        try:
            return self._graph(model, args, kwargs, None, size, True, calls)
        finally:
            calls.forget()

    def _graph(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: Dims | None,
        size: int,
        fixed: bool,
        calls: LeafCalls | None = None,
    ) -> Traced:
        facts = {
            "model": model,
            "args": args,
            "kwargs": kwargs,
            "dims": dims,
            "size": size,
            "fixed": fixed,
            "calls": calls,
            "leaves": self._leaves.modules.values(),
            "symbolic": self.options.tracer == "symbolic",
        }
        traced: Traced = run_all(passes.TRACE, facts)["traced"]
        return traced

    def refuse_hidden(self, batch: Batch, leaves: list[Any], made: Any) -> None:
        """Check that the model trains nothing but its parameters.

        Args:
            batch: the call.
            leaves: the flat inputs and targets of one micro-batch.
            made: what the model returned for them with gradients enabled.

        Raises:
            TraceError: a backward would also give a gradient to another tensor.
        """
        args, kwargs, _ = batch.unflatten(leaves)

        def again() -> Any:
            return taken_apart(self.call(batch, leaves, False)[0])

        refuse_hidden(self.options.model, (args, kwargs), taken_apart(made), again)

    def call(self, batch: Batch, leaves: list[Any], with_loss_: bool) -> tuple[Any, Tensor | None]:
        """Call the model itself on one micro-batch: its output and its loss, or None."""
        args, kwargs, targets = batch.unflatten(leaves)
        with assigned_in_place(self.options.model), checkpoints_opened():
            output = self.options.model(*args, **kwargs)
        if not with_loss_:
            return output, None
        if self.options.objective.loss is not None:
            return output, self.options.objective(output, *targets)
        found = output.get("loss", output) if isinstance(output, dict) else output
        return output, getattr(found, "loss", found)


def _output_dims(traced: Traced, size: int) -> Dims:
    """For each flat output: which dimensions are the batch; guessed if the graph does not tell."""

    def dims(out: Any, value: Any) -> tuple[int, ...]:
        if isinstance(out, Value) and isinstance(value, Tensor):
            guess = (0,) if value.dim() and value.shape[0] == size else ()
            return guess if out.dims is None else out.dims
        return ()

    return [dims(*pair) for pair in zip(traced.outputs, _flat_outputs(traced), strict=True)]


def _flat_outputs(traced: Traced) -> list[Any]:
    """The flat outputs, without data."""
    values = {node.name: node.meta.get("val") for node in traced.graph.nodes}
    return [values[o.name] if isinstance(o, Value) else o.value for o in traced.outputs]
