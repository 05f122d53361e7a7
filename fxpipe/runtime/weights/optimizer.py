"""Makes the optimizer of a stage with the user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from fxpipe.errors import InputError, told

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


def make_optimizer(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer of a stage's parameters.

    Raises:
        InputError: the function raises, returns no optimizer, an optimizer over other parameters,
            or one whose step needs a closure.
    """
    cure = "such as lambda parameters: torch.optim.AdamW(parameters)"
    try:
        made: object = factory(list(parameters))
    except Exception as error:
        raise InputError(
            f"optimizer fails ({told(error).splitlines()[0]}); give a "
            f"function from a stage's parameters to a torch optimizer, {cure}"
        ) from error
    if not isinstance(made, Optimizer):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        raise InputError(
            f"optimizer returns {what}; give a function from a stage's parameters to a torch "
            f"optimizer, {cure}"
        )
    own = {id(parameter) for parameter in parameters}
    if any(id(p) not in own for group in made.param_groups for p in group["params"]):
        raise InputError(
            "optimizer is built over other parameters than those of the stage that it was called "
            f"with, once a stage; let it use its argument, {cure}"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"{type(made).__name__} evaluates the loss anew inside of its step, which a pipeline "
            "cannot do; give one that needs the gradients alone, such as torch.optim.AdamW"
        )
    return made


def state_size(factory: OptimizerFactory | None) -> float:
    """The size of an optimizer's state, in multiples of the size of its parameters.

    It is found by a step on a small parameter made for that. Where there is no optimizer, or it
    does not take that parameter, it is Adam's.
    """
    if factory is None:
        return 2.0
    size = 4096
    parameter = nn.Parameter(torch.zeros(size))
    parameter.grad = torch.zeros(size)
    try:
        optimizer = factory([parameter])
        optimizer.step()
        held = [x for each in optimizer.state.values() for x in each.values()]
    except Exception:
        return 2.0
    return sum(x.numel() for x in held if isinstance(x, torch.Tensor) and x.numel() > 1) / size
