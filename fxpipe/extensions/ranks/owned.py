"""Which parameters and buffers of a model a rank has, and what of a state dict is its part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.errors import InputError
from fxpipe.torchtools.meta import state_like
from fxpipe.torchtools.part import state_in_part


@dataclass(frozen=True)
class Owned:
    """Which parameters and buffers of a model one process has, by the first name of each.

    Attributes:
        names: id of a parameter or buffer → its name.
        kept: the names whose newest values this process keeps, and no other process.
        used: the names whose values this process needs.
        rest: whether this process also keeps what is neither a parameter nor a buffer.
        compiled: whether the stages are known.
        shared: whether each replica keeps other parameters, so that all hand over theirs.
    """

    names: Mapping[int, str]
    kept: frozenset[str]
    used: frozenset[str]
    rest: bool
    compiled: bool
    shared: bool = False

    def part(
        self, model: nn.Module, state: Mapping[str, Any], prefix: str = ""
    ) -> OrderedDict[str, Any]:
        """The entries of the model's state dict that this process keeps."""
        with state_in_part():
            real = model.state_dict(keep_vars=True, prefix=prefix)
        first = {name: self.names.get(id(real.get(name))) for name in state}
        kept = [n for n in state if (self.rest if first[n] is None else first[n] in self.kept)]
        return state_like(state, {name: state[name] for name in kept})

    def needed(self, model: nn.Module) -> dict[int, Tensor]:
        """Id → parameter or buffer, for those whose values this process needs.

        Raises:
            InputError: nothing is compiled yet, so that the stages are not known.
        """
        if not self.compiled:
            raise InputError(
                "nothing is compiled yet, so that it is not known which stages this rank has; give "
                "compile(..., example=inputs), or call prepare(inputs) first"
            )
        tensors = (*model.parameters(), *model.buffers())
        return {id(x): x for x in tensors if self.names[id(x)] in self.used}

    @staticmethod
    def joined(
        state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
    ) -> OrderedDict[str, Any]:
        """The parts of all processes as one state dict, in the order of ``state``."""
        whole = {name: value for part in parts for name, value in part.items()}
        return state_like(state, {name: whole[name] for name in state})


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
    return Owned(names, frozenset(kept), frozenset(used), rest, compiled is not None)
