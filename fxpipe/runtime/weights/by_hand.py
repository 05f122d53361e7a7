"""What a user changes by hand in the whole optimizer that stands for those of the stages."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fxpipe.errors import InputError
from fxpipe.runtime.weights.live import Mark, differs, mark, settings, shown
from fxpipe.runtime.weights.optimizer import hooks_of, refuse_hooks, step_of

State = dict[Tensor, Any]
"""Parameter → the state that an optimizer keeps for it."""


class ByHand:
    """Finds what the user changed in the whole optimizer since it was last like the stages'.

    Changed settings of groups are copied to the stages elsewhere, see ``Optimizers.submit``.

    Attributes:
        optimizer: the whole optimizer.
    """

    def __init__(self, optimizer: Optimizer, *, given: bool) -> None:
        """Compare with the optimizer as it is now. Its hooks are the pipe's, or were set by the
        user's function.

        Args:
            optimizer: the whole optimizer.
            given: whether the user gave it to ``compile``. Every process then has it, and all its
                settings count as chosen.
        """
        self.optimizer = optimizer
        # (group, setting) → a line that tells the value that the user chose
        self._chosen: dict[tuple[int, str], str] = {}
        self._known: dict[tuple[int, str], Mark] = {} if given else self._settings()
        self._first = self._shown()
        self._hooks = hooks_of(optimizer)
        self._step = step_of(optimizer)
        self.note_state()
        self.note_groups()

    def note_state(self) -> None:
        """Note that the state is the stages' now."""
        self._state = self.optimizer.state
        self._kept: State = dict(self._state)

    def note_groups(self) -> None:
        """Note that the stages have the parameters of these groups now."""
        self._groups = [[*group["params"]] for group in self.optimizer.param_groups]

    def chosen(self) -> list[str]:
        """The settings that the user chose and has not set back, a line each. Settings that steps
        have changed are not among them: processes step different stages, so these may differ
        between them."""
        now = self._settings()
        for (group, key), (value, _) in now.items():
            known = self._known.get((group, key))
            if known is None or differs(known, value):
                self._chosen[group, key] = _line(group, key, value)
        self._known = now
        return [line for at, line in sorted(self._chosen.items()) if line != self._first.get(at)]

    def took(self, group: int, key: str) -> None:
        """Note that a stage's step, not the user, changed a setting."""
        value = self.optimizer.param_groups[group][key]
        if self._first.get((group, key)) != _line(group, key, value):
            self._first.pop((group, key), None)
        self._known[group, key] = mark(value)

    def forget_chosen(self) -> None:
        """Note that all processes have the settings of a checkpoint now."""
        self._chosen, self._known = {}, self._settings()
        self._first = self._shown()

    def _settings(self) -> dict[tuple[int, str], Mark]:
        groups = enumerate(self.optimizer.param_groups)
        return {(i, key): mark(v) for i, group in groups for key, v in settings(group).items()}

    def _shown(self) -> dict[tuple[int, str], str]:
        """The lines of settings as they were made, none for an optimizer that the user gave; to
        set one back to it is no choice. A setting that a step changes is dropped from them."""
        return {(i, key): _line(i, key, value) for (i, key), (value, _) in self._known.items()}

    @property
    def changed(self) -> bool:
        """Whether the user changed the state."""
        state = self.optimizer.state
        same = state is self._state and len(state) == len(self._kept)
        return not (same and all(map(is_, state.values(), self._kept.values())))

    def hand_to(self, part: Optimizer) -> None:
        """Change a stage's state in the same way; no step may use it meanwhile."""
        state = self.optimizer.state
        replaced = state is not self._state
        for parameter in (p for group in part.param_groups for p in group["params"]):
            now, before = state.get(parameter), self._kept.get(parameter)
            if now is before and not replaced:
                continue
            if now:
                part.state[parameter] = now
            elif before is not None or replaced:  # else the empty dict is from looking it up
                part.state.pop(parameter, None)

    def refuse(self) -> None:
        """Raises InputError if the user added a hook to the step or replaced it, which no stage
        would call, or changed the parameters of a group."""
        refuse_hooks(self.optimizer, "the optimizer", self._hooks, self._step)
        groups = [group["params"] for group in self.optimizer.param_groups]
        for index, (now, before) in enumerate(zip(groups, self._groups, strict=False)):
            if len(now) != len(before) or not all(map(is_, now, before)):
                raise InputError(
                    f"parameter group {index} of the optimizer has other parameters than when the "
                    "stages' optimizers were made from it; put back those that it had, or close() "
                    "the pipe, change the group, and compile again with this optimizer"
                )


def _line(group: int, key: str, value: Any) -> str:
    return f"{key} of optimizer group {group}: {shown(value)}"
