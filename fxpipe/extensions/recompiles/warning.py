"""Warn, once, where steps compile again and again."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.compiler.compiler import CallKey, Change
from fxpipe.log import LOGGER

LAST = 10
"""How many steps are looked at."""
MOST = 2
"""How many of them may compile: the first, and one for all that changes."""


class Recompiles:
    """Counts the steps of a pipe that compile: those of ``numbers``, from 1, have."""

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self._numbers = [*numbers]
        self._told = False

    def note(self, model: str, number: int, change: Change) -> None:
        """Note that the step of this number compiled a model, and what had changed."""
        self._numbers = [*(each for each in self._numbers if each > number - LAST), number]
        if not self._told and len(self._numbers) > MOST:
            self._told = True
            LOGGER.warning(
                "%d of the last %d steps compiled %s, which takes many times as long as a step; "
                "the last time %s",
                len(self._numbers),
                min(number, LAST),
                model,
                why_compiled(*change),
            )


def why_compiled(old: CallKey, new: CallKey, names: Sequence[str], changed: str) -> str:
    """What differs between two calls, see ``Change``, and what to do about it."""
    if old.state[0] != new.state[0]:
        return (
            f"as {changed} had changed, which graphs hold as it was. If it is a number, keep it in "
            "a buffer, self.register_buffer(name, torch.tensor(0.0)), and write it in place, "
            "self.name.fill_(value)"
        )
    if old.state != new.state:
        return (
            "as the mode of a module, requires_grad, a type, or autocast had changed; change it "
            "seldom, or train each state by a pipe of its own"
        )
    (*was, sizes), answered = old.batch
    (*now, new_sizes), answers = new.batch
    if was[:-1] != now[:-1]:
        return "as the batch had other entries; give each batch the same ones"
    for name, one, other in zip(names, was[-1], now[-1], strict=True):
        if one != other:
            return (
                f"as {name} was another; if it is a number, give it as a tensor, "
                "torch.tensor(value), which the model computes with, and if nothing depends on "
                "it, leave it out of the batch"
            )
    if sizes != new_sizes:
        index = next(
            i for i, pair in enumerate(zip(sizes, new_sizes, strict=True)) if pair[0] != pair[1]
        )
        return f"as {names[index]} had another shape; pad to a few shapes"
    if old.size != new.size:
        return (
            f"as the batch had {new.size} samples, not {old.size}; leave out a smaller last one "
            "(drop_last=True of the DataLoader), or keep to few sizes"
        )
    if answered != answers:
        return "as a branch on a number went another way; use torch.where, or keep to few branches"
    return "as it was for something else; call the pipe in one way"
