"""Capture a model with its loss, differentiated, as one graph.

before:  class Net(nn.Module): forward(x) = relu_(bn(conv(x)));  loss(y, target) = mse(y, target)
after:   forward:  convolution = …;  relu = …;  mse_loss = …
         backward: mse_loss_backward = …(gradient_mse_loss, …);  …;  gradients of the parameters

The model runs once under PyTorch's joint export, and autograd runs over it, both on tensors without
data. So whatever autograd does is in the graph: functions with a backward of their own, hooks,
gradients of gradients, checkpoints. The graph is cut afterwards.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from fxpipe.errors import FxpipeError, told
from fxpipe.ir.traced import NUMBERS, Traced
from fxpipe.passes.tracing.capturing import capturing
from fxpipe.passes.tracing.explain import BackwardError
from fxpipe.passes.tracing.halves import Halves
from fxpipe.passes.tracing.loss_module import LossModule, own_loss
from fxpipe.torchtools.pytrees import taken_apart, together
from fxpipe.torchtools.state import assigned_in_place, on_fakes, reparametrized


class UntracedCalls(Protocol):
    """The calls, in a run of a model, of submodules that its graph is to call as they are."""

    def opaque(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, each of these calls is one operation, for the model to be traced."""


def capture(
    model: nn.Module,
    loss_module: LossModule | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: Sequence[Any],
    numbers: Sequence[Tensor],
    names: Sequence[str],
    wants: Sequence[bool],
    step: bool,
    calls: UntracedCalls | None = None,
) -> Traced:
    """The graph of a model and its loss on one micro-batch, with its backward.

    Args:
        model: the model, in its present mode. Its state is not changed.
        loss_module: the loss, or None if the model returns it, or for a call without a loss.
        args: positional inputs.
        kwargs: keyword inputs.
        targets: what the loss gets besides the output.
        numbers: numbers that are inputs of the graph, which the loss gets, too.
        names: the name of each flat input and target.
        wants: for each of these whether a call returns a gradient for it.
        step: whether the backward starts from the loss. Else it starts from all outputs, and
            inputs get gradients if they require them.
        calls: the calls of submodules, each of which is one operation of the graph.

    Raises:
        TraceError: it cannot be captured.
    """
    given = args, dict(kwargs), tuple(targets)
    whole = Whole(model, loss_module, given, tuple(numbers), wants, step)
    errors: list[Exception] = []
    for as_export in (False, True):
        try:
            opaque = nullcontext() if calls is None else calls.opaque(model)
            with on_fakes(model), opaque:
                return _captured(whole, names, as_export)
        except FxpipeError:
            raise
        except Exception as error:
            errors.append(error)
    if not step and calls is None:
        with suppress(Exception), on_fakes(model), torch.no_grad():
            traced = _captured(whole, names, as_export=False)
            assert traced.backward is not None
            lacks = told(errors[0]).splitlines()[0]
            return replace(traced, backward=replace(traced.backward, lacks=lacks))
    raise errors[-1] from errors[0]


def _captured(whole: Whole, names: Sequence[str], as_export: bool) -> Traced:
    """Capture a model, which behaves as under ``torch.compile`` or, if ``as_export``, as under
    ``torch.export``."""
    with ExitStack() as stack:
        try:
            with capturing(as_export, whole.symbolic), whole.named():
                from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

                of_leaves = (x.fake_mode for x in whole.tensors if isinstance(x, FakeTensor))
                mode = next(of_leaves, None) or FakeTensorMode(allow_non_fake_inputs=True)
                fakes = [
                    x if isinstance(x, FakeTensor) else mode.from_tensor(x, static_shapes=True)
                    for x in whole.tensors
                ]
                try:
                    joint = aot_export_joint_with_descriptors(stack, whole, tuple(fakes))
                except Exception as error:
                    if around := whole.differentiated(error):
                        raise BackwardError(error, around) from error
                    raise
        except AssertionError as error:
            words = str(error) or "an assertion of PyTorch's"
            raise RuntimeError(words).with_traceback(error.__traceback__) from error
    return Halves(joint.graph_module, whole, names).traced()


def _sequence_number() -> int:
    """The number that autograd gives to the next operation of this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


class Whole(nn.Module):
    """A model with its loss as a module of flat tensors, whose parameters occur once each.

    Attributes:
        leaves: the flat inputs, targets and numbers.
        tensors: the tensors among these.
        places: for each of these its place among the leaves.
        state: name of a parameter or buffer of this module → its name in the model.
        outputs: the flat outputs of the model in its last run.
        spec: how these nest.
        copied: which of its own tensors are copies of what the model or the loss returns, each of
            which so gets a gradient of its own, even if it is a view of another.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossModule | None,
        given: Any,
        numbers: tuple[Tensor, ...],
        wants: Sequence[bool],
        step: bool,
    ) -> None:
        super().__init__()
        leaves, spec = pytree.tree_flatten(given)
        self.leaves, self._given = [*leaves, *numbers], spec
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors = [
            leaf.detach().requires_grad_(i < len(wants) and wants[i] and not step)
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor)
        ]
        self._step = step
        self._held = model, loss  # in a tuple, so that they are no submodules
        self.state: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            self._hold(f"p_{name}", name, parameter)
        for name, buffer in model.named_buffers():
            self._hold(f"b_{name}", name, buffer)
        for name, buffer in [] if loss is None else loss.named_buffers():
            self._hold(f"b_loss_{name}", f"loss:{name}", buffer)
        self.outputs: list[Any] = []
        self.copied = set[int]()
        self._calls: list[tuple[str, int, int]] = []
        self.spec = pytree.tree_structure(())

    def _hold(self, own: str, name: str, tensor: Tensor) -> None:
        own = re.sub(r"\W", "_", own)
        while own in self.state:
            own += "_"
        self.state[own] = name
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(own, tensor)
        else:
            self.register_buffer(own, tensor)

    @property
    def symbolic(self) -> bool:
        """Whether some size is a symbol."""
        return any(isinstance(tensor, FakeTensor) for tensor in self.tensors)

    @property
    def loss(self) -> LossModule | None:
        """The loss, if it is no part of the model."""
        return self._held[1]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        flat, numbers = leaves[: self._given.num_leaves], leaves[self._given.num_leaves :]
        args, kwargs, targets = pytree.tree_unflatten(flat, self._given)
        model, loss = self._held
        if numbers:
            kwargs = {**kwargs, NUMBERS: tuple(numbers)}
        own = {name: getattr(self, at) for at, name in self.state.items()}
        of_loss = {n.removeprefix("loss:"): x for n, x in own.items() if n.startswith("loss:")}
        of_model = {name: x for name, x in own.items() if not name.startswith("loss:")}
        loss_module = loss or nn.Module()
        with (
            reparametrized(model, of_model),
            reparametrized(loss_module, of_loss),
            assigned_in_place(model),
            assigned_in_place(loss_module),
        ):
            output = taken_apart(model(*args, **kwargs))
            self.outputs, self.spec = pytree.tree_flatten(output)
            found: tuple[Any, ...] = ()
            if loss is not None:
                made = loss(*self.outputs, *targets, *numbers)
                found = made if isinstance(made, tuple) else (made,)
        if self._step and loss is None:
            mine = own_loss(together(self.outputs, self.spec))
            found = (mine,)
        outputs = [x for x in self.outputs if isinstance(x, Tensor)]
        if self._step:
            self.copied = {*range(len(outputs), len(outputs) + len(found))}
            return (*(x.detach() for x in outputs), *(x.clone() for x in found))
        given = {*map(id, tensors)}  # which the caller gets as they are
        self.copied = {at for at, x in enumerate(outputs) if id(x) not in given}
        return tuple(x.clone() if at in self.copied else x for at, x in enumerate(outputs))

    def differentiated(self, error: BaseException) -> list[str]:
        """The submodules in the backward of whose own functions an exception was raised, outermost
        first."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = [x for frame in frames for x in frame.f_locals.values() if isinstance(x, FunctionCtx)]
        numbers = [int(x._sequence_nr()) for x in own if hasattr(x, "_sequence_nr")]
        calls = {name for name, first, end in self._calls for n in numbers if first <= n < end}
        return sorted(calls, key=len)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Inside, what the submodules of the model run is noted as theirs."""
        model = self._held[0]
        stack: dict[str, tuple[str, type]] = {}
        begun: dict[str, int] = {}
        hooks = []

        def entering(name: str) -> Callable[..., None]:
            def enter(module: nn.Module, *_: Any) -> None:
                begun[name] = _sequence_number()
                stack[name] = name, type(module)
                fx_traceback.current_meta["nn_module_stack"] = dict(stack)

            return enter

        def leaving(name: str) -> Callable[..., None]:
            def leave(*_: Any) -> None:
                end = _sequence_number()
                self._calls.append((name, begun.get(name, end), end))
                stack.pop(name, None)
                fx_traceback.current_meta["nn_module_stack"] = dict(stack)

            return leave

        for name, module in model.named_modules():
            if name:
                hooks.append(module.register_forward_pre_hook(entering(name)))
                hooks.append(module.register_forward_hook(leaving(name), always_call=True))
        try:
            with fx_traceback.preserve_node_meta():
                yield
        finally:
            fx_traceback.current_meta.pop("nn_module_stack", None)
            for hook in hooks:
                hook.remove()
