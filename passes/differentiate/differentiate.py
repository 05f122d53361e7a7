"""Make a graph for every stage's forward, and one for its backward.

before:  stage:    conv = conv2d(x, w);  relu = relu(conv);  return (relu,)
after:   forward:  conv = convolution(x, w);  relu = relu(conv);  return (relu, x, w, relu)
         backward: t = threshold_backward(g, relu);  c = convolution_backward(t, x, w);
                   return (c[0], c[1])

Autograd runs once, here, under a tracer and on tensors without data; the tracer records what it
would do in every step. Backwards are traced from the last stage to the first, because the layout
of a gradient is known only when the stage that computes it is traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import set_detect_anomaly
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.ir.plan import Plan, Stage, ValueSpec
from fxpipe.ir.value import HOST, Edge, gradient_groups, outputs_of
from fxpipe.kernels.kernel import Kernel
from fxpipe.passes.differentiate.joint import JointTrace, StageSides
from fxpipe.torchtools.pytrees import memory, size_in_bytes
from fxpipe.torchtools.state import under

aten = torch.ops.aten


class _NothingEqual(TorchDispatchMode):
    """Inside, tensors without data are not equal: istft looks for gaps in its windows by ``equal``,
    and there was none in the model's own run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper would take longer than the dispatch of most calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is aten.equal.default:
            return False
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Wanted:
    """The gradients that a step needs.

    Attributes:
        outputs: the returned values whose gradients the caller gives: the loss, or all outputs of a
            differentiable call.
        inputs: whether the gradients of inputs that require them are returned to the caller.
    """

    outputs: frozenset[str] = frozenset()
    inputs: bool = False


def differentiate(
    plan: Plan,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    wanted: Wanted,
    functional: bool = True,
) -> Plan:
    """Plan → Plan: give it ``gradients`` and specs, and its stages their kernels.

    Args:
        plan: as it was cut.
        values: input → an example of the size of one micro-batch, or of ``Symbols``.
        state: name in the model → parameter, buffer or constant.
        wanted: the gradients to compute; without any, the kernels are for inference.
        functional: whether kernels keep their functional backward, for passes that split it.
    """
    # anomaly detection looks for NaN, which needs data
    with torch.autograd.set_multithreading_enabled(False), set_detect_anomaly(False):
        return OnFakes(plan, values, state, wanted, functional).run()


def _specs(values: Mapping[str, Any]) -> dict[str, ValueSpec]:
    """Value → its spec, for the tensors among some values."""
    return {
        name: ValueSpec(tuple(x.shape), x.dtype, x.stride(), x.device.type)
        for name, x in values.items()
        if isinstance(x, Tensor)
    }


def _cut(value: Tensor, requires_grad: bool) -> Tensor:
    """The same tensor, without what it was computed from."""
    return value.detach().requires_grad_(requires_grad)


class Differentiator:
    """Goes through the stages forward for the values, then backward for the gradients, and gives
    stages their kernels."""

    def __init__(
        self, plan: Plan, values: Mapping[str, Any], state: Mapping[str, Tensor], wanted: Wanted
    ) -> None:
        self.plan = plan
        self.state = state
        self.wanted = wanted
        self.values = dict(values)
        self.gradients: dict[tuple[str, int], Tensor] = {}
        self.kernels: dict[int, Kernel] = {}
        self.specs = _specs(self.values)
        self.forwards: dict[int, Any] = {}  # stage → what ``backward`` needs of its forward

    def run(self) -> Plan:
        for stage in self.plan.stages:
            self.forward(stage)
        for stage in reversed(self.plan.stages):
            for edge in self.plan.edges_from(stage.index):
                if edge.target == HOST and edge.value in self.wanted.outputs:
                    value = self.values[edge.value]
                    if isinstance(value, Tensor) and value.requires_grad:
                        self.gradients[edge.value, HOST] = torch.ones_like(value)
            self.backward(stage)
        gradients = tuple(
            edge.back for edge in self.plan.edges if (edge.value, edge.target) in self.gradients
        )
        stages = tuple(
            replace(stage, kernel=self.kernels[stage.index]) for stage in self.plan.stages
        )
        specs = {**_specs(self.values), **self.specs}
        return replace(self.plan, stages=stages, gradients=gradients, specs=specs)

    def forward(self, stage: Stage) -> None:
        """Compute the stage's outputs, with their ``requires_grad``."""
        raise NotImplementedError

    def backward(self, stage: Stage) -> None:
        """Make the stage's kernel, and note the gradients of its inputs."""
        raise NotImplementedError

    def note(self, stage: Stage, outputs: Sequence[Any]) -> None:
        """Note the outputs of a stage, detached from its autograd graph."""
        for name, value in zip(self.returned(stage), outputs, strict=True):
            if isinstance(value, Tensor):
                value = _cut(value, value.requires_grad)
            self.values[name] = value

    def returned(self, stage: Stage) -> tuple[str, ...]:
        """The values that a stage's kernel returns, in order."""
        return outputs_of(self.plan.edges_from(stage.index))

    def incoming(self, stage: Stage) -> tuple[Edge, ...]:
        return self.plan.edges_into(stage.index)

    def needs_gradient(self, edge: Edge) -> bool:
        value = self.values[edge.value]
        if edge.source == HOST and not self.wanted.inputs:
            return False
        return isinstance(value, Tensor) and value.requires_grad

    def total_gradient(self, value: str) -> Tensor | None:
        """The sum of a value's gradients from its readers, in the order of the interpreter."""
        edges = [
            edge.back
            for edge in self.plan.edges
            if edge.value == value and (value, edge.target) in self.gradients
        ]
        for group in gradient_groups(edges):
            return reduce(add, [self.gradients[value, edge.source] for edge in group])
        return None

    def arguments(self, stage: Stage) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """The stage's parameters, buffers and inputs, with their ``requires_grad``."""
        return (
            [self.state[a.target] for a in stage.parameters],
            [self.state[a.target] for a in stage.buffers],
            [
                _cut(value, self.needs_gradient(edge))
                if isinstance(value := self.values[edge.value], Tensor)
                else value
                for edge in self.incoming(stage)
            ],
        )


class OnFakes(Differentiator):
    """Traces autograd on fake tensors, into two graphs."""

    def __init__(
        self,
        plan: Plan,
        values: Mapping[str, Any],
        state: Mapping[str, Tensor],
        wanted: Wanted,
        functional: bool,
    ) -> None:
        super().__init__(plan, values, state, wanted)
        self.functional = functional
        symbolic = [x.fake_mode for x in self.values.values() if isinstance(x, FakeTensor)]
        self.mode = symbolic[0] if symbolic else FakeTensorMode()
        used = {a.target for s in self.plan.stages for a in (*s.parameters, *s.buffers)}
        tensors = {name: self.state[name] for name in used}
        given = [value for value in self.values.values() if isinstance(value, Tensor)]
        sharing = Counter(map(memory, (*tensors.values(), *given)))

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
                return value
            return self._fake(value, alone=sharing[memory(value)] == 1)

        self.state = {name: fake(tensor) for name, tensor in tensors.items()}
        self.values = {name: fake(value) for name, value in self.values.items()}

    def _fake(self, tensor: Tensor, *, alone: bool) -> Tensor:
        """The same tensor without data; ``alone`` if no other tensor shares its memory."""
        fake: Tensor
        if alone and _is_plain(tensor):  # ``from_tensor`` takes longer
            shape, strides = tensor.shape, tensor.stride()
            meta = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
            fake = FakeTensor(self.mode, meta, tensor.device)
        else:
            fake = self.mode.from_tensor(tensor.detach(), static_shapes=True)
        return fake.requires_grad_(tensor.requires_grad)

    def run(self) -> Plan:
        with self.mode, _NothingEqual():  # type: ignore[no-untyped-call]
            return super().run()

    def forward(self, stage: Stage) -> None:
        sides = StageSides(stage, self.incoming(stage), self.returned(stage))
        trace = self.forwards[stage.index] = JointTrace(sides, *self.arguments(stage))
        self.note(stage, trace.outputs)

    def backward(self, stage: Stage) -> None:
        gradients = [self.total_gradient(name) for name in self.returned(stage)]
        with under(()):  # autocast does not apply to backwards
            trace = self.forwards.pop(stage.index)
            self.kernels[stage.index], of_inputs = trace.kernel(gradients, self.functional)
        for edge, gradient in zip(self.incoming(stage), of_inputs, strict=True):
            if gradient is not None:
                self.gradients[edge.value, stage.index] = gradient


def _is_plain(tensor: Tensor) -> bool:
    """Whether shape, strides, dtype and device describe a tensor completely."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    whole = tensor.untyped_storage().nbytes() == size_in_bytes(tensor)
    marked = tensor.is_meta or tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
    return whole and not marked and not tensor.is_quantized
