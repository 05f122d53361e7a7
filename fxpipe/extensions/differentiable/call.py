"""A differentiable call: autograd sees the whole pipeline as one function.

Its forward fills the pipeline and pauses the program. Its backward feeds the gradients of the
outputs and lets the pipeline drain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.compiler.compiled import Compiled
from fxpipe.errors import InputError
from fxpipe.ir.traced import Traced, Value, WholeBackward
from fxpipe.ir.value import HOST
from fxpipe.locks import PipeLock, locked
from fxpipe.passes.partition.assignment import readers
from fxpipe.runtime.backend import Backend
from fxpipe.runtime.group import Group
from fxpipe.runtime.host import BatchHost, times
from fxpipe.runtime.run import FlushedRun

_DETACH = (torch.ops.aten.detach.default, torch.detach, "detach")


def differentiable_call(
    compiled: Compiled, host: BatchHost, run: FlushedRun, lock: PipeLock, backend: Backend
) -> list[Any]:
    """Run the forwards and return the flat outputs with a backward for autograd. An input that the
    model returns unchanged is returned as it is.

    WholeBackward may be called from any thread. It waits until no other thread uses the pipe.
    """
    inputs = {
        name: leaf
        for name, leaf in zip(compiled.traced.inputs, host.micro.batch.leaves, strict=True)
        if name is not None and isinstance(leaf, Tensor) and leaf.requires_grad
    }
    parameters = run.weights.by_name
    leaves = (leaf for leaf in host.micro.batch.leaves if isinstance(leaf, Tensor))
    buffers = chain.from_iterable(map(run.weights.buffers, range(len(compiled.plan.stages))))
    watched = [*leaves, *parameters.values(), *buffers]
    devices = {name: leaf.device for name, leaf in inputs.items()}
    call = _Call(
        lock,
        backend.group,
        compiled,
        host,
        run,
        backend.caller(),
        devices,
        list(parameters),
        watched,
    )
    tensors = (*inputs.values(), *parameters.values())
    outputs = _Pipe.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return [
        host.whole[spec.name] if isinstance(spec, Value) and spec.name in host.whole else out
        for out, spec in zip(outputs, compiled.traced.outputs, strict=True)
    ]


@dataclass(eq=False)
class _Call:
    """What forward keeps for backward.

    Attributes:
        caller: orders the backward by the streams of the thread that called forward, too.
        inputs: name of each input that gets a gradient → the device where it has to be.
        parameters: names of the parameters in the model.
        watched: tensors that must not change in place between forward and backward.
        versions: the versions of those tensors after forward.
    """

    _lock: PipeLock
    _group: Group
    compiled: Compiled
    host: BatchHost
    run: FlushedRun | None
    caller: Callable[[], AbstractContextManager[None]]
    inputs: Mapping[str, torch.device]
    parameters: list[str]
    watched: list[Tensor]
    versions: list[int] = field(default_factory=list)

    @property
    def differentiable(self) -> list[str]:
        """The outputs whose gradients the program loads."""
        gradients = self.compiled.plan.gradients
        back = {edge.value for edge in gradients if edge.source == HOST}
        names = (out.name for out in self.compiled.traced.outputs if isinstance(out, Value))
        return [name for name in dict.fromkeys(names) if name in back]

    @locked
    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Let the pipeline drain; see torch.autograd.Function."""
        with self._group.calling("backward"):
            run = self.run
            if run is None:
                raise InputError(
                    "backward ran a second time through one call of the pipe, whose activations "
                    "are freed; call the pipe again"
                )
            if [tensor._version for tensor in self.watched] != self.versions:
                raise InputError(
                    "a parameter, buffer or input of the pipe was changed in place between its "
                    "call and backward; run backward before the optimizer's step"
                )
            self.run = None
            totals: dict[str, Tensor | None] = dict.fromkeys(self.differentiable)
            for spec, gradient in zip(self.compiled.traced.outputs, gradients, strict=True):
                if isinstance(spec, Value) and spec.name in totals and gradient is not None:
                    before = totals[spec.name]
                    totals[spec.name] = gradient if before is None else before + gradient
            _split(self.host, totals)
            with self.caller():
                by_name = run.advance(lambda: {**self._to_inputs(), **_taken(run)})
        if None in totals.values():
            used = [name for name, total in totals.items() if total is not None]
            flows = reached(self.compiled.traced, used)
            by_name = {name: gradient for name, gradient in by_name.items() if name in flows}
        return (None, *(by_name.get(name) for name in (*self.inputs, *self.parameters)))

    def _to_inputs(self) -> dict[str, Tensor]:
        """The gradients of the inputs, where these are."""
        gradients = _of_inputs(self.host)
        return {name: gradient.to(self.inputs[name]) for name, gradient in gradients.items()}


def _split(host: BatchHost, gradients: Mapping[str, Tensor | None]) -> None:
    """Split the gradients of the joined outputs over the micro-batches; None means zeros."""
    dims = {out.name: out.dims for out in host.traced.outputs if isinstance(out, Value)}
    for name, gradient in gradients.items():
        if name == host.traced.loss and gradient is not None:
            host.gradients[name] = [times(gradient, weight) for weight in host.micro.weights]
        else:
            parts = host.outputs[name]
            host.gradients[name] = _split_like(parts, gradient, host.micro.sizes, dims[name])


def _split_like(
    parts: Sequence[Tensor],
    gradient: Tensor | None,
    sizes: Sequence[int],
    dims: tuple[int, ...] | None,
) -> list[Tensor]:
    """The gradient of each micro-batch's part of an output: the backward of ``host.join``."""
    if gradient is None:
        return [torch.zeros_like(part) for part in parts]
    if len(parts) == 1:
        return [gradient]
    if gradient.dim() == 0:
        return [gradient * (size / sum(sizes)) for size in sizes]  # the output was averaged
    dim = 0 if dims is None else next(iter(dims), None)
    if dim is not None and gradient.shape[dim] == sum(sizes):
        return list(gradient.split(list(sizes), dim))
    return [gradient, *(torch.zeros_like(gradient) for _ in parts[1:])]  # ``join`` copied the first


def _of_inputs(host: BatchHost) -> dict[str, Tensor]:
    """The gradient of each input that gets one, for the whole batch."""
    joined: dict[str, Tensor] = {}
    dims = dict(zip(host.traced.inputs, host.micro.batch.dims, strict=True))
    for name, by_microbatch in host.input_gradients.items():
        # beginning with the last stage, in the order of the backwards
        parts = [
            reduce(add, [host.here(of_stage[s]) for s in sorted(of_stage, reverse=True)])
            for _, of_stage in sorted(by_microbatch.items())
        ]
        dim = dims[name]
        joined[name] = reduce(add, parts) if dim is None else torch.cat(parts, dim)
    return joined


def reached(traced: Traced, outputs: Sequence[str]) -> set[str]:
    """The inputs, and the parameters by their names in the model, to which gradients of these
    outputs flow. The program gives zeros to the others, by which an optimizer with momentum or
    weight decay would move them; so they must get None instead."""
    if traced.backward is not None:
        return _given(traced, traced.backward, outputs)
    wanted = {*outputs}
    rest = [node for node in traced.graph.nodes if node.name in wanted]
    seen = {*rest}
    while rest:
        node = rest.pop()
        above = () if _ends_gradients(node) else node.all_input_nodes
        rest += {*above} - seen
        seen.update(above)
    used = {
        name
        for name, nodes in readers(traced).items()
        if any(node in seen and not _ends_gradients(node) for node in nodes)
    }
    return used | {node.name for node in seen if node.op == "placeholder"}


def _given(traced: Traced, backward: WholeBackward, outputs: Sequence[str]) -> set[str]:
    """The same, by a captured backward."""
    seeds = {backward.given[name] for name in outputs if name in backward.given}
    reached: set[fx.Node] = set()
    for node in backward.graph.nodes:
        if node.name in seeds or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    names = {node.name for node in reached}
    targets = {a.name: a.target for a in traced.parameters}
    found = {name for name, value in backward.gradients.items() if value in names}
    return {targets.get(name, name) for name in found}


def _ends_gradients(node: fx.Node) -> bool:
    """Whether a node passes no gradient on: it detaches, or returns integers or booleans."""
    value = node.meta.get("val")
    discrete = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return discrete or node.target in _DETACH


class _Pipe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        assert call.run is not None
        outputs = call.run.advance(call.host.called)
        call.versions = [tensor._version for tensor in call.watched]
        ctx.call = call
        ctx.set_materialize_grads(False)
        wanted = set(call.differentiable)
        plain = [
            out
            for out, spec in zip(outputs, call.compiled.traced.outputs, strict=True)
            if isinstance(out, Tensor) and not (isinstance(spec, Value) and spec.name in wanted)
        ]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True asks for gradients of gradients, and a pipe's backward has no "
                "history of its own; compute them on the model itself (close the pipe first)"
            )
        call: _Call = ctx.call
        return call.backward(gradients)


def _taken(run: FlushedRun) -> dict[str, Tensor]:
    """The summed gradients of a run by name in the model, which are kept out of ``.grad``."""
    gradients = run.weights.named(run.gradients())
    for machine in run.machines:
        machine.store.gradients.clear()
    return gradients
