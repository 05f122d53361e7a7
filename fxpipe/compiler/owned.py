"""Which parameters and buffers of a model a process has, and what of a state dict is its part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.errors import InputError
from fxpipe.torchtools.meta import allocated


@dataclass(frozen=True)
class Owned:
    """Which parameters and buffers of a model one process has, by the first name of each.

    Attributes:
        names: id of a parameter or buffer → its name.
        kept: the names whose newest values this process keeps, and no other process.
        used: the names whose values this process needs.
        rest: whether this process also keeps what is neither a parameter nor a buffer.
    """

    names: Mapping[int, str]
    kept: frozenset[str]
    used: frozenset[str]
    rest: bool

    def keeps(self, value: Any) -> bool:
        """Whether this process keeps a value of the model's state dict."""
        return self.names[id(value)] in self.kept if id(value) in self.names else self.rest

    def part(self, model: nn.Module, state: Mapping[str, Any], prefix: str = "") -> StateDict:
        """The entries of the model's state dict that this process keeps."""
        real = model.state_dict(keep_vars=True, prefix=prefix)
        part = {name: value for name, value in state.items() if self.keeps(real.get(name))}
        return _like(state, part)


def owned(model: nn.Module, compiled: Compiled | None, owns: Callable[[int], bool]) -> Owned:
    """Find what this process has of a model; ``owns`` tells which stages are its own.

    Tensors of no stage are kept with the first stage. Before anything is compiled these are all
    tensors, and all processes use all of them.
    """
    names: dict[int, str] = {}
    first_names: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            first_names[name] = names.setdefault(id(tensor), name)
    keeper: dict[str, int] = {}
    used: set[str] = set()
    for stage in () if compiled is None else compiled.plan.stages:
        assert compiled is not None
        touched = {
            first_names[name] for name in compiled.traced.touched(stage) if name in first_names
        }
        written = {first_names.get(write.target) for write in stage.writes}
        keeper |= {name: stage.index for name in touched if name in written or name not in keeper}
        if owns(stage.index):
            used |= touched
    common = set(names.values()) - keeper.keys()
    rest = owns(0)
    kept = {name for name, stage in keeper.items() if owns(stage)} | (common if rest else set())
    if rest or compiled is None:
        used |= common
    return Owned(names, frozenset(kept), frozenset(used), rest)


StateDict = OrderedDict[str, Any]


def joined(state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> StateDict:
    """The parts of all processes as one state dict, in the order of ``state``."""
    whole = {name: value for part in parts for name, value in part.items()}
    return _like(state, {name: whole[name] for name in state})


def used_tensors(
    model: nn.Module, compiled: Compiled | None, owns: Callable[[int], bool], *, alone: bool
) -> dict[int, Tensor]:
    """Id → parameter or buffer, for those whose values this process needs: all if it is alone.

    Raises:
        InputError: nothing is compiled yet, so that the stages are not known.
    """
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    if alone:
        return tensors
    if compiled is None:
        raise InputError(
            "nothing is compiled yet, so that it is not known which stages this rank has; give "
            "compile(..., example=inputs), or call prepare(inputs) first"
        )
    own = owned(model, compiled, owns)
    return {key: tensor for key, tensor in tensors.items() if own.names[key] in own.used}


def load_part(
    model: nn.Module,
    used: Mapping[int, Tensor],
    homes: Mapping[Tensor, torch.device],
    state: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Load of a state dict the tensors that this process uses; all others keep their values. Those
    without data get memory on their devices, see ``allocated``."""
    kept = model.state_dict(keep_vars=True)
    others = {n: v for n, v in kept.items() if isinstance(v, Tensor) and id(v) not in used}
    loaded = [used[id(v)] for name, v in kept.items() if name in state and id(v) in used]
    with allocated(loaded, homes):
        return model.load_state_dict(_like(state, {**state, **others}), *args, **kwargs)


def _like(state: Mapping[str, Any], values: Mapping[str, Any]) -> StateDict:
    """A state dict of these values with the module versions of another one, which tell modules
    whether to convert older values."""
    result = OrderedDict(values)
    if hasattr(state, "_metadata"):
        vars(result)["_metadata"] = state._metadata
    return result
