"""The state of the whole optimizer, by parameter names, so that any partition can load it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import CheckpointError
from fxpipe.extensions.checkpoint.content import OptimizerState, ParameterState
from fxpipe.runtime.weights.live import settings
from fxpipe.runtime.weights.optimizer import placed
from fxpipe.runtime.weights.optimizers import Optimizers
from fxpipe.torchtools.optimizers import class_of

Names = Mapping[nn.Parameter, str]
"""Parameter → its name in the model."""


def state_of(stages: Optimizers, names: Names) -> OptimizerState:
    """The current state of the optimizer, while no batch is in flight; its tensors are not copied.

    Raises:
        CheckpointError: it keeps state that belongs to no parameter.
    """
    optimizer = stages.one()
    kind = class_of(optimizer)
    strange = [key for key in optimizer.state if key not in names]
    if strange:
        raise CheckpointError(
            f"{kind} keeps state under {strange[0]!r}, which is no parameter of the model"
        )
    parameters = {
        names[parameter]: ParameterState(index, dict(optimizer.state.get(parameter, {})))
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return OptimizerState(kind, [settings(group) for group in optimizer.param_groups], parameters)


def loading(
    stages: Optimizers | None, saved: OptimizerState | None, names: Names, own: Container[str]
) -> Callable[[], None]:
    """Check that the optimizers of a pipe can go on from a state. Returns a function that loads it.
    Parameters that other processes update are left as they are.

    Args:
        stages: the optimizers, if the pipe has some.
        saved: the state, if the checkpoint has one.
        names: parameter → its name in the model.
        own: the names of the parameters whose values this process has restored.

    Raises:
        CheckpointError: the state is of other optimizers.
        InputError: the user's function returns no optimizer.
    """
    if stages is None and saved is None:
        return lambda: None
    if stages is None:
        assert saved is not None
        raise CheckpointError(
            f"the checkpoint holds the state of {saved.kind}, and the pipe has no optimizer; "
            "give compile(..., optimizer=...)"
        )
    if saved is None:
        raise CheckpointError(
            "the checkpoint was made by a pipe without an optimizer, and this one has one; "
            "leave optimizer= out of compile()"
        )
    kept = {n: s for n, s in saved.parameters.items() if n in own and n not in stages.others}
    saved = replace(saved, parameters=kept)
    names = {p: n for p, n in names.items() if n in own and n not in stages.others}
    _check(saved, stages, names)
    optimizer = stages.one()

    def load() -> None:
        optimizer.state.clear()  # before it is loaded: a device may have no memory for both
        for group, values in zip(optimizer.param_groups, saved.groups, strict=True):
            group.update({key: _copied(value) for key, value in values.items()})
            for parameter in group["params"]:
                state = saved.parameters.get(names.get(parameter, ""))
                if state is not None and state.state:
                    optimizer.state[parameter] = placed(state.state, parameter, group)
        stages.resend()

    return load


def _check(saved: OptimizerState, stages: Optimizers, names: Names) -> None:
    """Raises CheckpointError if the optimizer is of another class than the saved one, or has other
    groups."""
    optimizer = stages.one()
    kind, groups = class_of(optimizer), optimizer.param_groups
    cure = "give compile() the optimizer that the checkpoint was made with"
    if kind != saved.kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved.kind}, and the pipe trains with {kind}; "
            f"{cure}"
        )
    if len(groups) != len(saved.groups):
        raise CheckpointError(
            f"the optimizer has {len(groups)} parameter groups, and the checkpoint's had "
            f"{len(saved.groups)}; {cure}"
        )
    trained = {names[p]: index for index, g in enumerate(groups) for p in g["params"] if p in names}
    before = {name: state.group for name, state in saved.parameters.items()}
    for name in (*trained, *before):
        if trained.get(name) != before.get(name):
            raise CheckpointError(
                f"{name!r} is in parameter group {trained.get(name)} of the optimizer, and was in "
                f"group {before.get(name)} of the checkpoint's (None: not trained); {cure}"
            )


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
