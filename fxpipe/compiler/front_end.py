"""The front end: from a model, its loss and one micro-batch to a traced graph.

It decides which submodules become leaf modules, which are called as they are. The graphs
themselves are made by the tracing passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.compiler import passes
from fxpipe.compiler.guards import Guards
from fxpipe.compiler.leaves import Leaves
from fxpipe.compiler.options import Options
from fxpipe.compiler.preflight import output_dims, own_loss, refuse_hidden
from fxpipe.compiler.timetable import Purpose
from fxpipe.errors import TraceError, way_out
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import SEED, Traced, Value, with_dims
from fxpipe.log import LOGGER
from fxpipe.passes.differentiate.differentiate import Wanted
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
from fxpipe.torchtools.state import assigned_in_place, intra_op_threads, put_back, untouched

Dims = Sequence[tuple[int, ...]]
"""Flat input → its dimensions that are the batch."""


@dataclass(frozen=True)
class Call:
    """What is traced, and what a plan is made for: a call's micro-batches of the same size.

    Attributes:
        batch: the call's inputs, and its targets for a step.
        leaves: the flat inputs and targets of one micro-batch.
        size: how many samples the micro-batch has.
        purpose: what the call is for.
        wants: for each leaf whether the call returns a gradient for it.
        schedule: the call's schedule.
        fixed: whether the graph shall hold for this size only; None if it does not matter.
    """

    batch: Batch
    leaves: list[Any]
    size: int
    purpose: Purpose
    wants: tuple[bool, ...]
    schedule: Schedule
    fixed: bool | None = None

    @property
    def dims(self) -> Dims:
        """For each flat input and target its dimensions that are the batch."""
        return [() if dim is None else (dim,) for dim in self.batch.dims]

    @property
    def uniform(self) -> bool:
        """Whether all micro-batches of the call have this size."""
        return self.batch.size % self.schedule.microbatches == 0

    @property
    def with_loss(self) -> bool:
        """Whether the graph computes the loss."""
        return self.purpose == "step"

    @property
    def parted(self) -> bool:
        """Whether backwards are split into two halves."""
        return "I" in self.schedule.kinds

    def without_data(self) -> Call:
        """The same call with tensors without data, so that it does not keep the batch alive."""
        return self._mapped(lambda tensor: tensor.detach().to("meta"))

    def zeros(self) -> Call:
        """The same call with zeros for data, on the CPU."""
        return self._mapped(lambda tensor: torch.zeros_like(tensor, device="cpu"))

    def random(self) -> Call:
        """The same call with random numbers for data, or zeros where they are whole numbers."""
        made, generator = self.zeros(), torch.Generator()
        for leaf in made.leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.uniform_(generator=generator)
        return made

    def resized(self, size: int) -> Call:
        """The same call for micro-batches of another size, with zeros for data."""

        def change(leaf: Any, dim: int | None) -> Any:
            if dim is None or not isinstance(leaf, Tensor):
                return leaf
            return leaf.new_zeros((*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]))

        leaves = list(map(change, self.leaves, self.batch.dims))
        return replace(self, leaves=leaves, size=size)

    def facts(self, traced: Traced, model: nn.Module) -> dict[str, Any]:
        """What passes are told of a graph for this call: ``traced``, the graph itself; ``values``,
        the micro-batch's leaf for each input, which requires a gradient if that is returned;
        ``state``, the model's parameters, buffers and constants; and ``wanted``."""
        values: dict[str, Any] = {}
        for name, leaf, wants in zip(traced.inputs, self.leaves, self.wants, strict=True):
            if name is not None:
                values[name] = leaf.detach().requires_grad_() if wants else leaf
        if traced.seeded:
            values[SEED] = torch.zeros((), dtype=torch.int64)
        state, wanted = traced.state_of(model), self.wanted(traced)
        return {"traced": traced, "values": values, "state": state, "wanted": wanted}

    def wanted(self, traced: Traced) -> Wanted:
        """The values of a graph whose gradients start the backwards."""
        match self.purpose:
            case "step":
                assert traced.loss is not None
                return Wanted(frozenset((traced.loss,)))
            case "call":
                names = (out.name for out in traced.outputs if isinstance(out, Value))
                return Wanted(frozenset(names), inputs=True)
            case "infer":
                return Wanted()

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        leaves = pytree.tree_map_only(Tensor, change, self.leaves)
        return replace(self, batch=self.batch.mapped(change), leaves=leaves)


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
        self._written: set[str] = set()  # inputs that the model writes into

    def trace(self, call: Call, *, fixed: bool) -> Traced:
        """The graph of the model for micro-batches like this one, for a step with its loss; it need
        hold for this size only if that is ``fixed``."""
        options, loss, size = self.options, self.options.loss, call.size
        args, kwargs, targets = call.batch.unflatten(call.leaves)
        dims, target_dims = call.dims[: call.batch.inputs], call.dims[call.batch.inputs :]
        facts = {
            **vars(options),
            "guards": self.guards,
            "args": args,
            "kwargs": kwargs,
            "targets": targets,
            "inputs": dict(zip(call.batch.names, call.leaves, strict=True)),
            "size": size,
            "called": self._leaves.modules,
            "is_leaf": self._is_leaf,
            "given_loss": call.with_loss and loss is not None,
            "returned_loss": call.with_loss and loss is None,
            "leaf_loss": False,
            "traced_loss": False,
        }
        self._leaves.renew()
        run_all(passes.ADMIT, facts)
        with (
            untouched(options.model),
            put_back(facts["inputs"]),
            intra_op_threads(options.threads),
        ):
            given = call.leaves[: call.batch.inputs]
            with put_back(dict(zip(call.batch.names, given, strict=False))) as written:
                output = self._tried(facts)
            self._tell_written(written)
            traced = self._front_end(args, kwargs, dims, size, fixed)
            if not fixed and any(out.dims is None for out in traced.outputs):
                told = output_dims(options.model, args, kwargs, dims, _flat_outputs(traced), size)
                traced = traced if told is None else with_dims(traced, told)
            if call.with_loss and loss is not None:
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
                        return self.trace(call, fixed=fixed)
                    source.credit(made.graph, loss)
                    facts |= {"loss": made, "tensors": dict(module.named_buffers())}
            joined: Traced = run_all(passes.JOIN, {**facts, "traced": traced})["traced"]
        return joined

    def output_dims(self, traced: Traced, call: Call) -> Sequence[tuple[int, ...]] | None:
        """For each flat output of a graph: which dimensions are the batch; None if unknown."""
        args, kwargs, _ = call.batch.unflatten(call.leaves)
        dims, model = call.dims[: call.batch.inputs], self.options.model
        with untouched(model), intra_op_threads(self.options.threads):
            return output_dims(model, args, kwargs, dims, _flat_outputs(traced), call.size)

    def _is_leaf(self, name: str, module: nn.Module) -> bool:
        """Whether a submodule is a leaf module, which is called as it is."""
        symbolic = self.options.tracer == "symbolic"
        return name in self._leaves.modules or (symbolic and is_torchs(module))

    def refuse_two_traces(self, call: Call, error: TraceError) -> None:
        """Trace once more after a graph was found to be wrong, and compare the two traces.

        Raises:
            TraceError: the traces differ, so tracing is not deterministic; names the line.
        """
        graphs = [self.trace(call, fixed=True) for _ in range(2)]
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

    def _tell_written(self, names: Sequence[str]) -> None:
        """Say once that what the model writes into its inputs is seen by itself alone."""
        for name in (name for name in names if name not in self._written):
            LOGGER.warning(
                "the model writes into its input %r: each micro-batch is a copy to it, and your "
                "tensor keeps its values",
                name,
            )
            self._written.add(name)

    def _front_end(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims, size: int, fixed: bool
    ) -> Traced:
        """The model's graph. A submodule with a line that cannot be traced becomes a leaf."""
        traced: Traced | None = None
        while traced is None:
            try:
                traced = self._traced(self.options.model, args, kwargs, dims, size, fixed)
            except TraceError as error:
                refusal = self._leaves.grow(error)
                if refusal is not None:
                    traced = self._before(refusal, args, kwargs, size)
        self._leaves.tell()
        return traced

    def _before(
        self, refusal: TraceError, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> Traced:
        """The model's graph up to a line of its own ``forward`` that cannot be traced.

        What follows that line becomes one leaf module.
        """
        model = self.options.model
        # a leaf module that the user asked for and that does not fit is an error, not such a line
        if self.options.tracer != "export" or not refusal.where:
            self._leaves.shrink()
            raise refusal
        calls = Calls(model, args, kwargs)
        reached: list[str] = []
        begins = 0

        def attempt(count: int) -> tuple[Traced | None, int]:
            nonlocal begins
            while True:
                twin = split(model, calls, count, reached)
                try:
                    traced = self._traced(twin, args, kwargs, (), size, True)
                except TraceError as error:
                    if self._leaves.grow(error) is not None:
                        return None, len(reached)
                else:
                    begins = count
                    return traced, count

        traced = calls.latest(attempt)
        if traced is None:
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
        dims: Dims | None,
        size: int,
        fixed: bool,
    ) -> Traced:
        """The graph of the model, or of its loss. One with leaf modules holds for this batch size
        only."""
        calls = None
        has_rest = REST in model._modules
        own = has_rest or model is self.options.model
        known = dict(self._leaves.modules)
        if own and self.options.tracer == "export" and (known or has_rest or self._leaves.loss):
            if has_rest:
                known[REST] = model.get_submodule(REST)
            calls, dims, fixed = LeafCalls(known, {*self._leaves.unasked, REST}), None, True
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
            "discards": own,
        }
        try:
            traced: Traced = run_all(passes.TRACE, facts)["traced"]
        finally:
            if calls is not None:
                calls.forget()
        return traced

    def refuse_hidden(self, call: Call, made: Any) -> None:
        """Check that the model, which returned ``made``, trains nothing but its parameters.

        Raises:
            TraceError: a backward would also give a gradient to another tensor.
        """
        args, kwargs, _ = call.batch.unflatten(call.leaves)

        def again() -> Any:
            return taken_apart(self.call(call, False)[0])

        refuse_hidden(self.options.model, (args, kwargs), taken_apart(made), again)

    def call(self, call: Call, with_loss: bool) -> tuple[Any, Tensor | None]:
        """Call the model itself on one micro-batch: its output and its loss, or None."""
        if self._written:
            call = call._mapped(torch.clone)
        args, kwargs, targets = call.batch.unflatten(call.leaves)
        with assigned_in_place(self.options.model), checkpoints_opened():
            output = self.options.model(*args, **kwargs)
        if not with_loss:
            return output, None
        if self.options.objective.loss is not None:
            return output, self.options.objective(output, *targets)
        return output, own_loss(output)


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
