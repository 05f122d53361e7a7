"""What a user changes by hand in the one optimizer that stands for those of the stages."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fxpipe.errors import InputError
from fxpipe.runtime.weights.live import Mark, differs, mark, settings, shown
from fxpipe.runtime.weights.optimizer import hooks_of, refuse_step, step_of
from fxpipe.runtime.weights.own_attributes import attributes
from fxpipe.torchtools.optimizers import unshared_items

State = dict[Tensor, Any]
"""Parameter → what an optimizer keeps for it."""


class ByHand:
    """Compares an optimizer with what it was like when it was last made like those of the stages.

    Settings of groups go to the stages elsewhere, see ``Optimizers.submit``.
    """

    def __init__(self, optimizer: Optimizer, *, given: bool) -> None:
        """Of an optimizer whose hooks are those of the pipe, or of the function that made it.
        ``given`` says whether every process of a pipe has one, whose settings its user chose."""
        self._one = optimizer
        # group and setting → a line with what the user has made it
        self._chosen: dict[tuple[int, str], str] = {}
        self._known: dict[tuple[int, str], Mark] = {}
        if not given:
            self._known = self._settings()
        self._hooks = hooks_of(optimizer)
        self._step = step_of(optimizer)
        self.note()
        self.note_groups()

    def note(self) -> None:
        """It is like the stages' now."""
        self.note_state()
        self._attributes = {name: mark(value) for name, value in attributes(self._one).items()}

    def note_state(self) -> None:
        """Its state is what the stages keep now."""
        self._state = self._one.state
        self._kept: State = dict(self._state)

    def note_groups(self) -> None:
        """The stages have its groups now."""
        self._groups = [[*group["params"]] for group in self._one.param_groups]

    def chosen(self) -> list[str]:
        """The settings that the user has made, a line each. What steps make of settings is not
        among them: it may differ between processes, which step other stages."""
        now = self._settings()
        for (group, key), (value, _) in now.items():
            known = self._known.get((group, key))
            if known is None or differs(known, value):
                self._chosen[group, key] = f"{key} of optimizer group {group}: {shown(value)}"
        self._known = now
        return [line for _, line in sorted(self._chosen.items())]

    def took(self, group: int, key: str) -> None:
        """A setting is now what a step has made it."""
        self._known[group, key] = mark(self._one.param_groups[group][key])

    def forget_chosen(self) -> None:
        """The settings are those of a checkpoint now, on all processes."""
        self._chosen, self._known = {}, self._settings()

    def _settings(self) -> dict[tuple[int, str], Mark]:
        groups = enumerate(self._one.param_groups)
        return {(i, key): mark(v) for i, group in groups for key, v in settings(group).items()}

    @property
    def changed(self) -> bool:
        """Whether its state or an attribute of its own was changed."""
        state = self._one.state
        same = state is self._state and len(state) == len(self._kept)
        if not (same and all(map(is_, state.values(), self._kept.values()))):
            return True
        return bool(self._changed_attributes())

    def hand_to(self, part: Optimizer) -> None:
        """Change a stage's optimizer in the same way, which no step may use meanwhile."""
        replaced, state = self._one.state is not self._state, dict(self._one.state)
        for parameter in (p for group in part.param_groups for p in group["params"]):
            now, before = state.get(parameter), self._kept.get(parameter)
            if now is before and not replaced:
                continue
            if now:
                part.state[parameter] = now
            elif before is not None or replaced:  # else looking at it has made an empty dict
                part.state.pop(parameter, None)
        vars(part).update(unshared_items(self._changed_attributes()))

    def refuse(self) -> None:
        """Raises InputError where it has a hook on its step or another step, which no stage would
        call, or other parameters in its groups."""
        if hooks_of(self._one) > self._hooks:
            refuse_step("the optimizer", "a hook on its step")
        if step_of(self._one) is not self._step:
            refuse_step("the optimizer", "a step of its own in place of its class's")
        groups = [group["params"] for group in self._one.param_groups]
        for index, (now, before) in enumerate(zip(groups, self._groups, strict=False)):
            if len(now) != len(before) or not all(map(is_, now, before)):
                raise InputError(
                    f"parameter group {index} of the optimizer has other parameters than when the "
                    "stages' optimizers were made of it; let it have those that it had, or close() "
                    "the pipe, change the group, and compile again with this optimizer"
                )

    def _changed_attributes(self) -> dict[str, Any]:
        known = self._attributes
        return {
            name: value
            for name, value in attributes(self._one).items()
            if name not in known or differs(known[name], value)
        }
