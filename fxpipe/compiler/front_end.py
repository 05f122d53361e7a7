"""The front end: from a model and one micro-batch to a traced graph, with its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fxpipe.compiler.guards import Guards
from fxpipe.compiler.hidden import hidden, refuse_hidden
from fxpipe.compiler.hooks import refuse_hooks
from fxpipe.compiler.leaves import Leaves
from fxpipe.compiler.objective import Objective
from fxpipe.compiler.pythonic import refuse_changes
from fxpipe.compiler.tryout import (
    output_dims,
    refuse_sparse,
    try_loss,
    try_model,
    try_own_loss,
)
from fxpipe.errors import InputError, TraceError, way_out
from fxpipe.ir.traced import Traced, Value, with_dims
from fxpipe.log import telling
from fxpipe.passes.graph.functionalise import functionalise
from fxpipe.passes.graph.randomness import seed_randomness
from fxpipe.passes.tracing.attach_loss import (
    LossModule,
    attach_leaf_loss,
    attach_loss,
    own_loss,
    with_loss,
)
from fxpipe.passes.tracing.explain import (
    differing_line,
    explained,
    refuse_control_flow,
    refuse_entries,
    refuse_values,
)
from fxpipe.passes.tracing.leaf_calls import LeafCalls, call_leaves
from fxpipe.passes.tracing.leaf_nests import REST
from fxpipe.passes.tracing.rest import Calls, split
from fxpipe.passes.tracing.symbolic import is_torchs, trace_symbolically
from fxpipe.passes.tracing.trace import accepts, trace
from fxpipe.runtime.batch import Batch
from fxpipe.torchtools import source
from fxpipe.torchtools.own_backward import checkpoints_opened
from fxpipe.torchtools.pytrees import apart
from fxpipe.torchtools.untouched import assigned_in_place, intra_op_threads, same_sizes, untouched

Tracer = Literal["export", "symbolic"]

Dims = Sequence[tuple[int, ...]]
"""Flat input → its dimensions that are the batch."""


class FrontEnd:
    """Traces a model, its loss, and the two as one graph. The model's state is left alone.

    Attributes:
        guards: what the traces depend on besides tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        tracer: Tracer,
        threads: int,
        leaf_modules: Mapping[str, nn.Module],
    ) -> None:
        """Nothing is traced yet.

        Args:
            model: the model.
            objective: the loss.
            tracer: "export" or "symbolic".
            threads: intra-op threads while the model is tried.
            leaf_modules: name → submodule that is called as it is.
        """
        self.model = model
        self.objective = objective
        self.tracer = tracer
        self._threads = threads
        self._leaves = Leaves(model, leaf_modules)
        self.guards = Guards(model, objective.loss, self._leaves.modules)

    def trace(
        self, batch: Batch, leaves: list[Any], size: int, with_loss_: bool, fixed: bool
    ) -> Traced:
        """The graph of the model, and of its loss, for micro-batches like this one.

        Args:
            batch: the call.
            leaves: the flat inputs and targets of one micro-batch.
            size: its samples.
            with_loss_: whether the loss belongs to it.
            fixed: whether it need hold for this size alone.
        """
        args, kwargs, targets = batch.unflatten(leaves)
        every: Dims = [() if dim is None else (dim,) for dim in batch.dims]
        dims, target_dims = every[: batch.inputs], every[batch.inputs :]
        self._leaves.renew()
        refuse_sparse(self.model, dict(zip(batch.names, leaves, strict=True)), self.tracer)
        refuse_hooks(self.model, self._is_leaf)
        with untouched(self.model), intra_op_threads(self._threads):
            with same_sizes(self.model):
                run = self.guards.reading()(lambda: try_model(self.model, args, kwargs))
                output = refuse_changes(self.model, self._leaves.modules, run)
            if with_loss_ and self.objective.loss is not None:
                with self.guards.reading():
                    try_loss(self.model, self.objective, output, targets, size)
            elif with_loss_:
                try_own_loss(output)
            traced = self._front_end(args, kwargs, dims, size, fixed)
            if not fixed and any(out.dims is None for out in traced.outputs):
                told = output_dims(self.model, args, kwargs, dims, _flat_outputs(traced), size)
                traced = traced if told is None else with_dims(traced, told)
            if not with_loss_:
                return seed_randomness(traced)
            if self.objective.loss is None:
                name = own_loss(traced)
                if name is None:
                    raise InputError(
                        "there is no loss: the model returns neither one tensor nor something "
                        "with .loss; give compile(..., loss=function)"
                    )
                return with_loss(seed_randomness(traced), name)
            flat, spec = pytree.tree_flatten(apart(output))
            module = LossModule(self.objective, self.objective.loss, spec)
            if traced.leaves:
                return seed_randomness(attach_leaf_loss(traced, module, flat, targets))
            dims = [*_output_dims(traced, size), *target_dims]
            try:
                loss = self._traced(module, (*flat, *targets), {}, dims, size, fixed)
            except TraceError as error:
                self._leaves.take_loss(error)
                return self.trace(batch, leaves, size, with_loss_, fixed)
            source.credit(loss.graph, self.objective.loss)
        # seeded as one graph: no draw of the loss has the number of one of the model's
        return seed_randomness(attach_loss(traced, loss, dict(module.named_buffers())))

    def output_dims(
        self, traced: Traced, batch: Batch, leaves: list[Any], size: int
    ) -> Sequence[tuple[int, ...]] | None:
        """For each flat output of a graph the dimensions that are the batch; None if nobody knows.

        Args:
            traced: the graph.
            batch: the call.
            leaves: the flat inputs and targets of one micro-batch.
            size: its samples.
        """
        args, kwargs, _ = batch.unflatten(leaves)
        dims: Dims = [() if dim is None else (dim,) for dim in batch.dims[: batch.inputs]]
        with untouched(self.model), intra_op_threads(self._threads):
            return output_dims(self.model, args, kwargs, dims, _flat_outputs(traced), size)

    def _is_leaf(self, name: str, module: nn.Module) -> bool:
        """Whether a submodule is called as it is."""
        return name in self._leaves.modules or (self.tracer == "symbolic" and is_torchs(module))

    def refuse_two_traces(
        self, batch: Batch, leaves: list[Any], size: int, with_loss_: bool, error: TraceError
    ) -> None:
        """After a graph was found to be wrong: a reason is that no two traces are the same.

        Raises:
            TraceError: so it is; names the line.
        """
        graphs = [self.trace(batch, leaves, size, with_loss_, True) for _ in range(2)]
        line = differing_line(*(traced.graph for traced in graphs))
        if line:
            raise TraceError(
                f"{type(self.model).__name__} cannot be traced at {line} (tracing is not "
                "deterministic: two traces differ there); let it depend on the inputs and the "
                f"model's parameters and buffers alone, or {way_out('')}"
            ) from error

    def _front_end(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims, size: int, fixed: bool
    ) -> Traced:
        """The model's graph; where a line cannot be traced, a submodule around it is a leaf."""
        while True:
            try:
                traced = self._traced(self.model, args, kwargs, dims, size, fixed)
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
        """The model's graph up to a line of its own that cannot be traced; the rest is a leaf."""
        # what was asked for and cannot be called so is no line's fault
        possible = self.tracer == "export" and refusal.where
        calls = Calls(self.model, args, kwargs) if possible else None
        reached: list[str] = []
        begins = 0

        def attempt(count: int) -> tuple[Traced | None, int]:
            nonlocal begins
            assert calls is not None
            while True:
                twin = split(self.model, calls, count, reached)
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
        if self.tracer == "symbolic":
            with telling(f"trace {type(model).__name__}"):
                return trace_symbolically(model, args, kwargs, self._leaves.modules.values())
        if model is self.model and (self._leaves.modules or self._leaves.loss):
            return self._with_leaves(args, kwargs, size, self.model)
        with telling(f"trace {type(model).__name__}"):
            program = trace(model, args, kwargs, size, fixed, dims)
        return _functional(model, program, accepts(program, args, kwargs, size, dims))

    def _with_leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, model: nn.Module
    ) -> Traced:
        """The exported model's graph with its leaf modules; it holds for this size alone."""
        leaves = dict(self._leaves.modules)
        if REST in model._modules:
            leaves[REST] = model.get_submodule(REST)
        calls = LeafCalls(leaves, {*self._leaves.unasked, REST})
        try:
            with calls.recorded(), torch.no_grad():
                model(*args, **kwargs)
            with calls.opaque(model), telling(f"trace {type(model).__name__}"):
                program = trace(model, args, kwargs, size, fixed=True)
            traced = _functional(model, program, accepts(program, args, kwargs, size))
        finally:
            calls.forget()
        values = zip(traced.inputs, pytree.tree_leaves((args, kwargs)), strict=True)
        given = {name: value for name, value in values if name is not None}
        return call_leaves(traced, model, calls, given)

    def refuse_hidden(self, batch: Batch, leaves: list[Any], made: Any) -> None:
        """See that the model trains nothing but its parameters.

        Args:
            batch: the call.
            leaves: the flat inputs and targets of one micro-batch.
            made: what the model made of them with gradients enabled.

        Raises:
            TraceError: gradients go to another tensor, too.
        """
        args, kwargs, _ = batch.unflatten(leaves)
        once = hidden(self.model, apart(made), (args, kwargs))
        if once:
            made, _ = self.call(batch, leaves, False)
            refuse_hidden(self.model, once, hidden(self.model, apart(made), (args, kwargs)))

    def call(self, batch: Batch, leaves: list[Any], with_loss_: bool) -> tuple[Any, Tensor | None]:
        """The model itself, and its loss, on one micro-batch."""
        args, kwargs, targets = batch.unflatten(leaves)
        with assigned_in_place(self.model), checkpoints_opened():
            output = self.model(*args, **kwargs)
        if not with_loss_:
            return output, None
        if self.objective.loss is not None:
            return output, self.objective(output, *targets)
        found = output.get("loss", output) if isinstance(output, dict) else output
        return output, getattr(found, "loss", found)


def _functional(
    model: nn.Module, program: ExportedProgram, accepts_: Callable[[int], bool]
) -> Traced:
    """The exported program as one functional graph; all that fails is a TraceError."""
    refuse_control_flow(model, program.graph_module)
    with telling("functionalise"):
        try:
            traced = functionalise(program, accepts_)
        except Exception as error:
            raise explained(model, error, "export") from error
    refuse_values(model, traced)
    refuse_entries(model, traced)
    return traced


def _output_dims(traced: Traced, size: int) -> Dims:
    """The dimensions of each flat output that are the batch; guessed where nothing tells."""

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
