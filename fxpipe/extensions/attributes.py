"""Puts the attributes of objects back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy


def restoring(parts: Sequence[object]) -> Callable[[], None]:
    """Remember the attributes of these objects; returns a function that restores them."""
    before = [(part, {**vars(part)}) for part in parts]
    for part, values in before:
        vars(part).update({k: copy(v) for k, v in values.items() if type(v) in (dict, set)})

    def restore() -> None:
        for part, values in before:
            vars(part).clear()
            vars(part).update(values)

    return restore
