"""Bytes and FLOPs of each stage as expressions in the batch size.

before:  stage 0: y = linear(x, w)        x: b × 32 floats, w: 64 × 32
after:   forward 4096·b FLOPs, backward 4096·b, saved 128·b bytes, sent 256·b bytes

Every stage runs once, forward and backward, on tensors without data whose batch size is a symbol.
PyTorch's own counter counts the FLOPs, and autograd's hooks see what is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.ir.plan import Plan, Stage, ValueSpec
from fxpipe.ir.value import HOST, outputs_of
from fxpipe.passes.differentiate.joint import StageSides
from fxpipe.torchtools.pytrees import memory, size_in_bytes

BATCH = sympy.Symbol("b", integer=True, positive=True)
"""Samples in a micro-batch."""


@dataclass(frozen=True)
class Extent:
    """What a stage computes, keeps and sends for a micro-batch of ``b`` samples.

    Attributes:
        forward: FLOPs of matrix products, convolutions and attention in the forward.
        backward: the same in the backward.
        saved: bytes that the stage keeps from forward to backward, without parameters.
        sent: bytes that it sends to other stages.
    """

    forward: sympy.Expr
    backward: sympy.Expr
    saved: sympy.Expr
    sent: sympy.Expr


def extents(plan: Plan, state: Mapping[str, Tensor], batch: int) -> tuple[Extent, ...]:
    """Stage → its extent; a constant if the graph holds for one size only.

    Args:
        plan: a differentiated plan without leaf modules.
        state: name in the model → parameter, buffer or constant.
        batch: samples in the micro-batch that the plan was made for. If the first dimension of an
            input has this size, it becomes ``b``.
    """
    try:
        return _Walk(plan, state, batch).run()
    except RuntimeError:  # sparse products, and LSTMs in float32, refuse symbolic sizes
        return _Walk(plan, state, None).run()


class _Walk:
    """Goes from stage to stage, and keeps the values that cross between them."""

    def __init__(self, plan: Plan, state: Mapping[str, Tensor], batch: int | None) -> None:
        self.plan = plan
        self.mode = mode = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False))
        used = {a.target for s in plan.stages for a in (*s.parameters, *s.buffers)}
        self.state = {
            name: mode.from_tensor(state[name].detach(), static_shapes=True).requires_grad_(
                state[name].requires_grad
            )
            for name in used
        }
        self.values: dict[str, Any] = {}
        for edge in plan.edges:
            if edge.source == HOST and edge.value in plan.specs:
                spec = plan.specs[edge.value]
                self.values[edge.value] = _input(mode, edge.value, spec, batch)

    def run(self) -> tuple[Extent, ...]:
        with self.mode, torch.enable_grad():
            return tuple(map(self._extent, self.plan.stages))

    def _extent(self, stage: Stage) -> Extent:
        into = self.plan.edges_into(stage.index)
        away = self.plan.edges_from(stage.index)
        parameters = [self.state[a.target] for a in stage.parameters]
        inputs = [_cut(self.values[edge.value], edge.gradient) for edge in into]
        buffers = [self.state[a.target] for a in stage.buffers]
        owned = {memory(tensor) for tensor in (*parameters, *buffers)}
        saved: dict[int, sympy.Expr] = {}

        def keep(tensor: Tensor) -> Tensor:
            if memory(tensor) not in owned:
                saved[memory(tensor)] = _expression(_size(tensor))
            return tensor

        names = outputs_of(away)
        sides = StageSides(stage, into, names)
        with FlopCounterMode(display=False) as ahead, saved_tensors_hooks(keep, lambda x: x):
            result = sides.run(parameters, buffers, inputs)
        outputs = dict(zip(names, result.outputs, strict=True))
        with_gradient = {edge.value for edge in away if edge.gradient}
        roots = [x for name, x in outputs.items() if name in with_gradient and x.requires_grad]
        wanted = [x for x in (*inputs, *parameters) if isinstance(x, Tensor) and x.requires_grad]
        with FlopCounterMode(display=False) as back:
            if roots and wanted:
                ones = [torch.ones_like(root) for root in roots]
                torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        for name, value in outputs.items():
            self.values[name] = _cut(value, False)
        sent = [outputs[edge.value] for edge in away if edge.target != HOST]
        sizes = [x.numel() * x.element_size() for x in sent if isinstance(x, Tensor)]
        return Extent(
            _expression(ahead.get_total_flops()),
            _expression(back.get_total_flops()),
            sympy.Add(*saved.values()),
            sympy.Add(*map(_expression, sizes)),
        )


def _input(mode: FakeTensorMode, name: str, spec: ValueSpec, batch: int | None) -> Tensor:
    """A tensor without data; its first dimension is a symbol if it is the batch."""
    if spec.layout is not torch.strided:  # a sparse tensor is not split into micro-batches
        return mode.from_tensor(torch.zeros(spec.shape, dtype=spec.dtype, layout=spec.layout))
    sizes = [DimDynamic.STATIC] * len(spec.shape)
    if spec.shape and spec.shape[0] == batch:
        sizes[0] = DimDynamic.DUCK
    return mode.from_tensor(
        torch.empty(spec.shape, dtype=spec.dtype),
        source=ConstantSource(name),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes),
    )


def _cut(value: Any, gradient: bool) -> Any:
    return value.detach().requires_grad_(gradient) if isinstance(value, Tensor) else value


def _size(tensor: Tensor) -> Any:
    """Bytes of a tensor's storage, or of an input's elements, as its storage has a fixed size."""
    if tensor.layout is not torch.strided:
        return size_in_bytes(tensor)
    size = tensor.untyped_storage().nbytes()
    return size if isinstance(size, torch.SymInt) else size_in_bytes(tensor)


def _expression(size: Any) -> sympy.Expr:
    """A size in terms of BATCH; every symbol in it is the batch, as nothing else is dynamic."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
    return sympy.expand(expression.subs(dict.fromkeys(expression.free_symbols, BATCH)))
