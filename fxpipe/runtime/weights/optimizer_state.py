"""The state of all stages' optimizers by names in the model, to save it and load it anywhere."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import CheckpointError, told
from fxpipe.runtime.weights import own_attributes
from fxpipe.runtime.weights.live import copied, settings, unshared
from fxpipe.torchtools.optimizers import alone
from fxpipe.torchtools.pytrees import pieces


@dataclass(frozen=True)
class GroupState:
    """A parameter group of one stage's optimizer.

    Attributes:
        kind: the optimizer's class.
        index: the group's index among the optimizer's groups.
        settings: the group without its parameters.
        attributes: what the optimizer keeps outside of groups and states, see ``own_attributes``.
    """

    kind: str
    index: int
    settings: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParameterState:
    """The optimizer state of one parameter.

    Attributes:
        group: the index of its group in ``OptimizerState.groups``.
        state: what the optimizer keeps for it.
    """

    group: int
    state: Mapping[Any, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The state of the optimizers of all stages.

    Attributes:
        groups: the parameter groups of all optimizers; equal ones only once.
        parameters: name in the model → the state of that parameter.
    """

    groups: Sequence[GroupState]
    parameters: Mapping[str, ParameterState]


@dataclass(frozen=True)
class Parts:
    """What sharded optimizers keep of one kind for a parameter, as far as it is known here.

    Attributes:
        shape: of the whole.
        tensors: index of an element in the flat whole → the part of a replica that begins there.
    """

    shape: Sequence[int]
    tensors: Mapping[int, Tensor]

    def whole(self) -> Tensor:
        """All of it. Raises RuntimeError where a part is missing."""
        return torch.cat([part for _, part in sorted(self.tensors.items())]).view(self.shape)


def frozen(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings, none of which anybody else changes in place."""
    return {key: unshared(value) for key, value in settings(group).items()}


def trial(
    optimizer: Optimizer,
    index: int,
    states: Mapping[nn.Parameter, Mapping[Any, Any]],
    values: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A copy of an optimizer over the parameters of these states, which are in one of its groups,
    with these settings in place of that group's."""
    groups = [{**frozen(group), "params": []} for group in optimizer.param_groups]
    groups[index] |= {**values, "params": [*states]}
    made = alone(optimizer, groups)
    made.state.update({parameter: state for parameter, state in states.items() if state})
    return made


Optimizers = Sequence[Optimizer | None]
Names = Mapping[nn.Parameter, str]
"""Parameter → its name in the model."""


def take(optimizers: Optimizers, names: Names) -> OptimizerState:
    """The current state of the optimizers. The tensors are the optimizers' own, not copies.

    Raises:
        CheckpointError: an optimizer keeps something that belongs to no parameter.
    """
    groups: list[GroupState] = []
    parameters: dict[str, ParameterState] = {}
    for optimizer, index, group in _groups(optimizers):
        kind = type(optimizer).__qualname__
        strange = [key for key in optimizer.state if key not in names]
        if strange:
            raise CheckpointError(
                f"{kind} keeps state under {strange[0]!r}, which is no parameter of the model"
            )
        made = GroupState(kind, index, settings(group), own_attributes.changed(optimizer))
        place = next((i for i, other in enumerate(groups) if _same(made, other)), len(groups))
        groups[place:] = groups[place:] or [made]
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            parameters[names[parameter]] = ParameterState(place, state)
    return OptimizerState(groups, parameters)


def loading(saved: OptimizerState, optimizers: Optimizers, names: Names) -> Callable[[], None]:
    """Check that these optimizers could have made a state, and that they can step with it. Returns
    a function that loads it.

    Raises:
        CheckpointError: an optimizer is of another class or has other parameters, parameters of one
            group had different settings, or the optimizer cannot step with the state.
    """
    for name, each in saved.parameters.items():
        if not 0 <= each.group < len(saved.groups):
            raise CheckpointError(
                f"the checkpoint is damaged: {name!r} is in parameter group {each.group} of "
                f"{len(saved.groups)}"
            )
    groups: list[tuple[Optimizer, dict[str, Any], dict[str, Any]]] = []
    held: set[str] = set()
    with torch.random.fork_rng(_cuda(names)):
        for optimizer, index, group in _groups(optimizers):
            held |= {names[parameter] for parameter in group["params"]}
            for parameter in group["params"]:
                _check_kind(saved, optimizer, names[parameter])
                own = saved.parameters[names[parameter]]
                tried = saved.groups[own.group].settings
                _check_step(optimizer, index, parameter, names[parameter], tried, own.state)
            kind = type(optimizer).__qualname__
            groups.append((optimizer, group, _settings(saved, kind, index, group, names)))
    missing = next((name for name in saved.parameters if name not in held), None)
    if missing is not None:
        raise CheckpointError(
            f"the checkpoint holds the state of an optimizer for {missing!r}, and none of the "
            "pipe's trains it; give compile() the optimizer that it was made with"
        )
    states = [
        (optimizer, parameter, placed(saved.parameters[names[parameter]].state, parameter, values))
        for optimizer, group, values in groups
        for parameter in group["params"]
    ]

    put = [
        own_attributes.setting(optimizer, _attributes(saved, optimizer, names))
        for optimizer in filter(None, optimizers)
    ]

    def load() -> None:
        for optimizer, group, values in groups:
            optimizer.state.clear()
            group.update(values)
        for set_attributes in put:
            set_attributes()
        for optimizer, parameter, state in states:
            if state:
                optimizer.state[parameter] = state

    return load


def _check_kind(saved: OptimizerState, optimizer: Optimizer, name: str) -> None:
    kind = type(optimizer).__qualname__
    if name not in saved.parameters:
        raise CheckpointError(
            f"the optimizer trains {name!r}, and the one of the checkpoint did not; give "
            "compile() the optimizer that the checkpoint was made with"
        )
    other = saved.groups[saved.parameters[name].group].kind
    if kind != other:
        raise CheckpointError(
            f"the checkpoint holds the state of {other} for {name!r}, and the pipe trains "
            f"it with {kind}; give compile() the optimizer that it was made with"
        )


def _check_step(
    optimizer: Optimizer,
    index: int,
    parameter: Tensor,
    name: str,
    saved: Mapping[str, Any],
    state: Mapping[Any, Any],
) -> None:
    """Check that an optimizer can step over a parameter of one of its groups with saved settings
    and a saved state. It is tried on a copy, with a gradient of zeros."""
    kind, group = type(optimizer).__qualname__, optimizer.param_groups[index]

    def step(values: Mapping[str, Any], state: Any) -> tuple[dict[Any, Any], Exception | None]:
        """The optimizer state after a step, and the exception of the step, if any."""
        tried = nn.Parameter(torch.zeros_like(parameter))
        tried.grad = torch.zeros_like(tried)
        stepped = trial(optimizer, index, {tried: state}, copied(values))
        try:
            type(optimizer).step(stepped)
        except Exception as error:
            return {}, error
        return dict(stepped.state[tried]), None

    for key, value in saved.items():
        if key == "params" or not _alike(group.get(key), value):
            raise CheckpointError(
                f"the checkpoint's {key!r} for {name!r} is {reprlib.repr(value)}, which {kind} "
                "does not take"
            )
    if not parameter.requires_grad:
        return
    made, error = step(saved, {})
    if error is not None:  # some optimizers make their state in their constructor
        first = optimizer.state.get(parameter, {})
        made, error = step(saved, copied(first))
        if error is not None and step(settings(group), copied(first))[1] is not None:
            return  # it cannot step over one parameter alone, so nothing can be checked
    for key, value in made.items() if state else ():
        if key not in state or not _alike(value, state[key], exactly=True):
            found = described(state[key]) if key in state else "missing"
            raise CheckpointError(
                f"{key!r}, which {kind} keeps for {name!r}, is {found} in the checkpoint, and "
                f"{described(value)} here"
            )
    if error is None and state:
        error = step(saved, placed(state, parameter, saved))[1]
    if error is not None:
        raise CheckpointError(
            f"{kind} cannot go on with what the checkpoint has for {name!r} ({told(error)})"
        ) from error


def _cuda(names: Names) -> list[torch.device]:
    """The CUDA devices of parameters."""
    return list({parameter.device for parameter in names if parameter.is_cuda})


_KINDS = (Tensor, int | float, str, list | tuple, dict)


def _alike(own: Any, other: Any, *, exactly: bool = False) -> bool:
    """Whether a value that was read can replace an optimizer's own value. None matches anything,
    and a number matches a tensor of one number. ``exactly``: tensors must have the same shape and
    dtype."""
    if own is None or other is None:
        return True
    if _is_number(own):
        return _is_number(other)
    if exactly and isinstance(own, Tensor) and isinstance(other, Tensor):
        return (own.shape, own.dtype) == (other.shape, other.dtype)
    return all(isinstance(own, kind) == isinstance(other, kind) for kind in _KINDS)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def described(value: Any) -> str:
    """``6×6 of float32``, and ``6×6 of float32, sparse_coo with 9 entries``; what is no tensor as
    it is."""
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    sizes = "×".join(map(str, value.shape)) or "a scalar"
    text = f"{sizes} of {value.dtype}".replace("torch.", "")
    if value.layout is torch.strided:
        return text
    layout = str(value.layout).removeprefix("torch.")
    return f"{text}, {layout} with {len(pieces(value)[-1])} entries"


def _groups(optimizers: Optimizers) -> Iterator[tuple[Optimizer, int, dict[str, Any]]]:
    for optimizer in optimizers:
        if optimizer is not None:
            for index, group in enumerate(optimizer.param_groups):
                yield optimizer, index, group


def _settings(
    saved: OptimizerState, kind: str, index: int, group: Mapping[str, Any], names: Names
) -> dict[str, Any]:
    """The saved settings for a group: those of its parameters; if it has none, those of the saved
    group with the same class and index."""
    held = [names[parameter] for parameter in group["params"]]
    if not held:
        like = (g.settings for g in saved.groups if (g.kind, g.index) == (kind, index))
        return dict(copied(next(like, {})))
    first = saved.groups[saved.parameters[held[0]].group]
    for name in held[1:]:
        other = saved.groups[saved.parameters[name].group]
        key = differing(first.settings, other.settings)
        if key is not None:
            raise CheckpointError(
                f"{held[0]!r} and {name!r} are in one parameter group here, and had different "
                f"{key!r} in the checkpoint; let the optimizer function part them as then, or, if "
                "it goes by the stage, call prepare() before restore()"
            )
    return dict(copied(first.settings))


def _attributes(saved: OptimizerState, optimizer: Optimizer, names: Names) -> Mapping[str, Any]:
    """The saved attributes for an optimizer: those of the ones that had its parameters."""
    held = [names[p] for group in optimizer.param_groups for p in group["params"]]
    found = [saved.groups[saved.parameters[name].group].attributes for name in held]
    for name, attributes in zip(held[1:], found[1:], strict=True):
        if (key := differing(found[0], attributes)) is not None:
            raise CheckpointError(
                f"{held[0]!r} and {name!r} are on one stage here, and in the checkpoint their "
                f"{type(optimizer).__name__}s had different attributes {key!r}; go on with the "
                "stages that it was made with, or keep that in self.state[parameter]"
            )
    return found[0] if found else {}


def _same(one: GroupState, other: GroupState) -> bool:
    alike = (one.kind, one.index) == (other.kind, other.index)
    pairs = (one.settings, other.settings), (one.attributes, other.attributes)
    return alike and all(differing(*pair) is None for pair in pairs)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The name of the first setting that differs, or None."""
    for key in (*one, *other):
        if key not in one or key not in other:
            return key
        pair = (one[key], other[key])
        first, second = (x.tolist() if isinstance(x, Tensor) else x for x in pair)
        if first != second:
            return key
    return None


def placed(
    state: Mapping[str, Any], parameter: Tensor, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A parameter's state on the device and in the layout that its optimizer expects.

    Step counts stay on the CPU, as in torch's optimizers, unless a kernel on the device reads them.
    """
    on_device = settings.get("capturable") or settings.get("fused")

    def place(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or (key == "step" and not on_device):
            return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        if value.shape != parameter.shape:
            return value.to(parameter.device, copy=True)
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)

    return {key: place(key, value) for key, value in state.items()}
