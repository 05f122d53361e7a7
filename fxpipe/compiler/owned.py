"""What a process has of a model whose stages run in several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxpipe.compiler.compiled import Compiled


@dataclass(frozen=True)
class Owned:
    """What one process has of a model. Names are those that the model lists first.

    Attributes:
        names: id of a parameter or buffer → its name.
        kept: those that this process has the newest values of, and no other process keeps.
        used: those that this process needs the values of.
        rest: whether this process also keeps what is neither a parameter nor a buffer.
    """

    names: Mapping[int, str]
    kept: frozenset[str]
    used: frozenset[str]
    rest: bool

    def keeps(self, value: Any) -> bool:
        """Whether this process keeps a value of the model's state dict."""
        return self.names[id(value)] in self.kept if id(value) in self.names else self.rest


def owned(model: nn.Module, compiled: Compiled | None, owns: Callable[[int], bool]) -> Owned:
    """What this process has of a model.

    What belongs to no stage is kept with the first stage. Before anything is compiled, everything
    is, and all processes use everything.
    """
    names: dict[int, str] = {}
    first: dict[str, str] = {}
    for listed in (model.named_parameters, model.named_buffers):
        for name, tensor in listed(remove_duplicate=False):
            first[name] = names.setdefault(id(tensor), name)
    keeper: dict[str, int] = {}
    used: set[str] = set()
    for stage in () if compiled is None else compiled.plan.stages:
        assert compiled is not None
        found = {first[name] for name in compiled.names(stage.index) if name in first}
        written = {first[write.target] for write in stage.writes if write.target in first}
        keeper |= {name: stage.index for name in found if name in written or name not in keeper}
        if owns(stage.index):
            used |= found
    common = set(names.values()) - keeper.keys()
    rest = owns(0)
    kept = {name for name, stage in keeper.items() if owns(stage)} | (common if rest else set())
    if rest or compiled is None:
        used |= common
    return Owned(names, frozenset(kept), frozenset(used), rest)
