"""What a user gives as ``optimizer=``, and the optimizers that are made of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import InputError, told
from fxpipe.runtime.weights.live import settings
from fxpipe.runtime.weights.optimizer_state import placed
from fxpipe.runtime.weights.own_attributes import note_made
from fxpipe.torchtools.optimizers import alone

OptimizerLike = (
    Optimizer
    | Callable[[list[nn.Parameter]], Optimizer]
    | Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
)

NAMED = "named_parameters"
"""The argument of a function that is given names as well."""

_CURE = "such as lambda parameters: torch.optim.AdamW(parameters)"


class GivenOptimizer:
    """Makes the optimizers of stages of what ``compile`` was given.

    A function of parameters is called for each stage. An optimizer, or what a function of named
    parameters returns, has the parameters of the whole model; a stage's is then a copy of it with
    those that are the stage's own, in the same groups.

    Attributes:
        whole: the optimizer over the parameters of the whole model, where there is one yet.
    """

    def __init__(self, given: OptimizerLike, model: nn.Module) -> None:
        """Check what was given.

        Raises:
            InputError: it is neither an optimizer nor a function, or makes none that fits.
        """
        self.whole: Optimizer | None = None
        self._given: Any = given
        self._model = model
        self._known = dict(model.named_parameters(remove_duplicate=False))
        if isinstance(given, Optimizer):
            self.whole = self._checked(_optimizer(given), "the optimizer")
        elif not callable(given):
            text, kind = repr(given), type(given).__name__
            text = f"one {kind} object" if len(text) >= 60 or "\n" in text else text
            raise InputError(
                f"optimizer is {text}; give a function from parameters to a torch optimizer, "
                f"{_CURE}, or such an optimizer over model.parameters()"
            )
        elif _first_argument(given) == NAMED:
            made = _optimizer(_called(given, [*model.named_parameters()]))
            self.whole = self._checked(made, "what optimizer returns")

    def of_all(self) -> Optimizer:
        """The optimizer over the parameters of the whole model; a function of parameters is called
        once more for that."""
        return self.whole or self._made([*self._model.parameters()])

    def of(self, parameters: Mapping[str, Tensor]) -> Optimizer:
        """The optimizer of a stage, whose parameters, or what stands for them, are given by name.

        Raises:
            InputError: the function raises, returns no optimizer, one over other parameters, or one
                whose step needs a closure.
        """
        if self.whole is None:
            return self._made([*parameters.values()])
        own = {id(self._known[name]): parameter for name, parameter in parameters.items()}
        groups, state = [], {}
        for group in self.whole.param_groups:
            held = [parameter for parameter in group["params"] if id(parameter) in own]
            groups.append({**settings(group), "params": [own[id(p)] for p in held]})
            for parameter in held:
                kept, other = self.whole.state.get(parameter), own[id(parameter)]
                if kept and not other.is_meta:
                    _refuse_without_data(self.whole, kept)
                    state[other] = placed(kept, other, group)
        made: Optimizer = alone(self.whole, groups)
        made.state.update(state)
        note_made(made, self.whole)
        return made

    def of_one(self, parameter: nn.Parameter) -> Any:
        """An optimizer like a stage's over a parameter of no model, for a trial."""
        if self.whole is None:
            return self._made([parameter])
        return alone(self.whole, [{**settings(self.whole.param_groups[0]), "params": [parameter]}])

    def _made(self, parameters: list[Any]) -> Optimizer:
        """What the function makes of parameters. Raises InputError, see ``of``."""
        made = _optimizer(_called(self._given, [*parameters]))
        own = {id(parameter) for parameter in parameters}
        if any(id(parameter) not in own for parameter in _parameters(made)):
            raise InputError(
                "optimizer is built over other parameters than those of the stage that it was "
                f"called with, once a stage; let it use its argument, {_CURE}, or give the "
                "optimizer itself: optimizer=torch.optim.AdamW(model.parameters())"
            )
        note_made(made)
        return made

    def _checked(self, made: Optimizer, what: str) -> Optimizer:
        """Raises InputError where it has hooks on its step, or other parameters than the model."""
        refuse_hooks(made, what)
        note_made(made)
        known = {id(parameter) for parameter in self._known.values()}
        for parameter in _parameters(made):
            if id(parameter) not in known:
                raise InputError(
                    f"{what} has a parameter of shape {tuple(parameter.shape)} that is none of the "
                    f"{type(self._model).__name__}'s; make it of the parameters of the model that "
                    "is compiled"
                )
        return made


def refuse_hooks(whole: Optimizer, what: str) -> None:
    """Raises InputError where an optimizer whose copies update the stages has hooks on its step, or
    another step than its class."""
    if hooks_of(whole):
        refuse_step(what, "a hook on its step")
    if step_of(whole) is not None:
        refuse_step(what, "a step of its own in place of its class's")


def refuse_step(what: str, has: str) -> NoReturn:
    """Raises InputError about an optimizer that has what no step of a pipe would call."""
    cure = "the handle that register_step_post_hook gave has .remove()"
    if "hook" not in has:
        cure = "del optimizer.step"
    raise InputError(
        f"{what} has {has}, which no step of a pipe would call, as each stage updates on its own; "
        f"remove it ({cure}), and do after pipe.step() what it did"
    )


def hooks_of(optimizer: Optimizer) -> int:
    """How many hooks an optimizer has on its step."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def step_of(optimizer: Optimizer) -> Any:
    """The step that was set in an optimizer in place of its class's; None where it is the same, or
    the wrapper in which a learning-rate scheduler notes that it is called."""
    own = vars(optimizer).get("step")
    same = getattr(own, "__func__", None) is type(optimizer).step
    return None if same or hasattr(own, "_wrapped_by_lr_sched") else own


def state_size(given: GivenOptimizer | None) -> float:
    """The size of an optimizer's state, in multiples of the size of its parameters.

    It is found by a step on a small parameter made for that. Where there is no optimizer, or it
    does not take that parameter, it is Adam's.
    """
    if given is None:
        return 2.0
    parameter = nn.Parameter(torch.zeros(4096))
    parameter.grad = torch.zeros(4096)
    try:
        optimizer = given.of_one(parameter)
        type(optimizer).step(optimizer)
        held = [x for each in optimizer.state.values() for x in each.values()]
    except Exception:
        return 2.0
    sizes = [x.numel() for x in held if isinstance(x, Tensor) and x.numel() > 1]
    return sum(sizes) / parameter.numel()


def _called(factory: Callable[[Any], object], given: list[Any]) -> object:
    try:
        return factory(given)
    except Exception as error:
        raise InputError(
            f"optimizer fails ({told(error).splitlines()[0]}); give a "
            f"function from a stage's parameters to a torch optimizer, {_CURE}"
        ) from error


def _optimizer(made: object) -> Optimizer:
    """Raises InputError where it is none, steps another one, or its step needs a closure."""
    if not isinstance(made, Optimizer):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        raise InputError(
            f"optimizer returns {what}; give a function from a stage's parameters to a torch "
            f"optimizer, {_CURE}"
        )
    inner = next((name for name, it in vars(made).items() if isinstance(it, Optimizer)), None)
    if inner is not None:
        raise InputError(
            f"{type(made).__name__} steps another optimizer, its .{inner}, which knows no stages "
            "and whose state no checkpoint would have; give that one, and do after pipe.step() "
            "what the outer one adds, or write both as one optimizer"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"{type(made).__name__} evaluates the loss anew inside of its step, which a pipeline "
            "cannot do; give one that needs the gradients alone, such as torch.optim.AdamW"
        )
    return made


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _first_argument(function: Any) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):  # as of a function written in C
        return None


def _refuse_without_data(optimizer: Optimizer, kept: Mapping[Any, Any]) -> None:
    if any(isinstance(value, Tensor) and value.is_meta for value in kept.values()):
        raise InputError(
            f"{type(optimizer).__name__} makes its state when it is made, and did so while the "
            "model had no data; give a function of parameters, and look at pipe.optimizer only "
            "after the first step"
        )
