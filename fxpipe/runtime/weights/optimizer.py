"""Makes the optimizers of stages from what a user gives as ``optimizer=``, and places state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import InputError, told
from fxpipe.runtime.weights.live import settings
from fxpipe.torchtools.optimizers import Several, copy_alone, with_given
from fxpipe.torchtools.source import bringing_to

OptimizerLike = (
    Optimizer
    | Sequence[Optimizer]
    | Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]]
    | Callable[[list[tuple[str, nn.Parameter]]], Optimizer | Sequence[Optimizer]]
)

NAMED = "named_parameters"
"""A function whose first argument has this name is called with (name, parameter) pairs."""

_RETURNED = "what optimizer returns"
_CURE = "such as lambda parameters: torch.optim.AdamW(parameters)"


class GivenOptimizer:
    """Makes the optimizer of each stage from the ``optimizer=`` that ``compile`` was given.

    That is an optimizer over the parameters of the whole model, or a list of optimizers over parts
    of them, which are one together; or a function of parameters, or of named ones, that returns
    one of these. Each stage gets a copy of it with the stage's parameters, in the
    same groups.

    Attributes:
        whole: the optimizer over the parameters of the whole model; None if there is none yet.
    """

    def __init__(self, given: OptimizerLike, model: nn.Module) -> None:
        """Check ``given``.

        Raises:
            InputError: it is neither an optimizer nor a function, or the optimizer does not fit.
        """
        self.whole: Optimizer | None = None
        self._given: Any = given
        self._model = model
        self._known = dict(model.named_parameters(remove_duplicate=False))
        if isinstance(given, Optimizer) or _are_optimizers(given):
            self.whole = self._checked(_optimizer(given), "the optimizer")
        elif not callable(given):
            text, kind = repr(given), type(given).__name__
            text = f"one {kind} object" if len(text) >= 60 or "\n" in text else text
            raise InputError(
                f"optimizer is {text}; give a function from parameters to a torch optimizer, "
                f"{_CURE}, or such an optimizer over model.parameters()"
            )
        elif _first_argument(given) == NAMED:
            returned = _optimizer(_called(given, [*model.named_parameters()]))
            self.whole = self._checked(returned, _RETURNED)

    def all(self) -> Optimizer:
        """The optimizer over the parameters of the whole model, made at the first call.

        Raises:
            InputError: the function raises, or returns no optimizer, one over other parameters, or
                one whose step needs a closure or has hooks.
        """
        if self.whole is None:
            self.whole = self._checked(self.over([*self._model.parameters()]), _RETURNED)
        return self.whole

    def of(self, parameters: Mapping[str, Tensor]) -> Optimizer:
        """The optimizer of a stage with these parameters, by name; tensors may stand in for them,
        for which state is copied. Otherwise the state is empty, to be shared with the whole one.

        Raises:
            InputError: as ``all``.
        """
        whole = self.all()
        # id of the model's parameter → the stage's, which may be a stand-in
        staged = {id(self._known[name]): parameter for name, parameter in parameters.items()}
        groups, state = [], {}
        for group in whole.param_groups:
            held = [parameter for parameter in group["params"] if id(parameter) in staged]
            groups.append({**settings(group), "params": [staged[id(p)] for p in held]})
            for parameter in held:
                kept, target = whole.state.get(parameter), staged[id(parameter)]
                if kept and not target.is_meta:
                    _refuse_without_data(whole, kept)
                    if target is not parameter:
                        state[target] = placed(kept, target, group)
        optimizer: Optimizer = copy_alone(whole, groups)
        optimizer.state.update(state)
        return optimizer

    def over(self, parameters: list[Any]) -> Optimizer:
        """What the user's function makes of parameters. Raises InputError, see ``all``."""
        return _optimizer(_called(self._given, parameters))

    def _checked(self, optimizer: Optimizer, what: str) -> Optimizer:
        """Return a whole-model optimizer. Raises InputError if it has hooks on its step, or
        parameters that the model has not."""
        refuse_step_hooks(optimizer, what)
        known = {id(parameter) for parameter in self._known.values()}
        for parameter in _parameters(optimizer):
            if id(parameter) not in known:
                raise InputError(
                    f"{what} has a parameter of shape {tuple(parameter.shape)} that is none of the "
                    f"{type(self._model).__name__}'s; make it over the parameters of the model "
                    "that is compiled"
                )
        return optimizer


def refuse_step_hooks(whole: Optimizer, what: str) -> None:
    """Raises InputError if the whole optimizer has hooks on its step, or another step than its
    class's: the stages' optimizers, copies of it, would call neither."""
    for each in with_given(whole):
        if each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks:
            has = "a hook on its step"
            cure = "the handle that register_step_post_hook gave has .remove()"
        elif step_of(each) is not None:
            has, cure = "a step of its own in place of its class's", "del optimizer.step"
        else:
            continue
        raise InputError(
            f"{what} has {has}, which no step of a pipe would call, as each stage updates on its "
            f"own; remove it ({cure}), and do after pipe.step() what it did"
        )


def step_of(optimizer: Optimizer) -> Any:
    """The ``step`` that was set on an optimizer object in place of its class's; None if it still
    is the class's, or a learning-rate scheduler's wrapper of it."""
    step = vars(optimizer).get("step")
    same = getattr(step, "__func__", None) is type(optimizer).step
    return None if same or hasattr(step, "_wrapped_by_lr_sched") else step


def _called(factory: Callable[[Any], object], given: list[Any]) -> object:
    try:
        return factory(given)
    except Exception as error:
        raise InputError(
            f"optimizer fails ({told(error).splitlines()[0]}); give a function from parameters to "
            f"a torch optimizer, {_CURE}"
        ) from error


def _are_optimizers(value: object) -> TypeGuard[Sequence[Optimizer]]:
    if not isinstance(value, list | tuple):
        return False
    return bool(value) and all(isinstance(each, Optimizer) for each in value)


def _optimizer(value: object) -> Optimizer:
    """Return an optimizer, or several as one. Raises InputError if it is none, wraps another
    optimizer, or has a step that needs a closure, or if two of several have the same parameter."""
    if _are_optimizers(value):
        optimizers = [*map(_optimizer, value)]
        seen: set[int] = set()
        for optimizer in optimizers:
            own = {*map(id, _parameters(optimizer))}
            if own & seen:
                raise InputError(
                    f"{type(optimizer).__name__} has a parameter that an optimizer before it in "
                    "the list has, too; give each parameter to one of them"
                )
            seen |= own
        return optimizers[0] if len(optimizers) == 1 else Several(optimizers)
    if not isinstance(value, Optimizer):
        what = "nothing" if value is None else f"a {type(value).__name__}"
        raise InputError(
            f"optimizer returns {what}; give a function from parameters to a torch optimizer, "
            f"{_CURE}"
        )
    inner = next((name for name, it in vars(value).items() if isinstance(it, Optimizer)), None)
    if inner is not None:
        raise InputError(
            f"{type(value).__name__} steps another optimizer, its .{inner}, which knows no stages "
            "and whose state no checkpoint would have; give that one, and do after pipe.step() "
            "what the outer one adds, or write both as one optimizer"
        )
    closure = inspect.signature(value.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"{type(value).__name__} evaluates the loss anew inside of its step, which a pipeline "
            "cannot do; give one that needs the gradients alone, such as torch.optim.AdamW"
        )
    return value


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _first_argument(function: Any) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return None


def _refuse_without_data(optimizer: Optimizer, kept: Mapping[Any, Any]) -> None:
    if any(isinstance(value, Tensor) and value.is_meta for value in kept.values()):
        raise InputError(
            f"{type(optimizer).__name__} makes its state when it is made, and did so while the "
            "model had no data; give a function of parameters, and look at pipe.optimizer only "
            "after the first step"
        )


def bring(optimizer: Optimizer) -> None:
    """Bring state that was loaded before its parameters came to their devices there, too."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            values = [x for x in kept.values() if isinstance(x, Tensor) and x.dim()]
            if any(not x.is_meta and x.device != parameter.device for x in values):
                optimizer.state[parameter] = placed(kept, parameter, group)


def placed(
    state: Mapping[str, Any], parameter: Tensor, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of a parameter's state on the device and in the layout of the parameter. Step counts
    stay on the CPU, as in torch's optimizers, unless a kernel on the device reads them."""
    on_device = settings.get("capturable") or settings.get("fused")

    def place(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or (key == "step" and not on_device):
            return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        if value.shape != parameter.shape:
            return value.to(parameter.device, copy=True)
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)

    with bringing_to(parameter.device):
        return {key: place(key, value) for key, value in state.items()}
