"""Warn, once, where steps compile again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fxpipe.log import LOGGER

LAST = 10
"""How many steps are looked at."""
MOST = 2
"""How many of them may compile: the first, and one for all that changes."""


class CallKey(NamedTuple):
    """Everything that the result of compiling a call depends on.

    Attributes:
        state: of the model, see ``Guard.state``; how often Python state has changed comes first.
        batch: of its batch, see ``Reads.key``.
        size: the samples in the batch.
        others: what else is asked of the call.
    """

    state: tuple[Any, ...]
    batch: tuple[Any, ...]
    size: int
    others: tuple[Any, ...]


class Often:
    """Counts the steps that compile."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # of the steps that compiled
        self._told = False

    def compiled(self, model: str, number: int, why: str) -> None:
        """Note that the step of this number, from 1, compiled, and why."""
        self._numbers = [*(each for each in self._numbers if each > number - LAST), number]
        if not self._told and len(self._numbers) > MOST:
            self._told = True
            LOGGER.warning(
                "%d of the last %d steps compiled %s, which takes many times as long as a step; "
                "the last time %s",
                len(self._numbers),
                min(number, LAST),
                model,
                why,
            )


def why_compiled(old: CallKey | None, new: CallKey, names: Sequence[str], changed: str) -> str:
    """What differs between two calls, and what to do about it.

    Args:
        old: the call before; None if there was none.
        new: the call that compiles.
        names: the names of the leaves of its batch.
        changed: the Python state that has changed last.
    """
    if old is None:
        return "it was the first"
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
