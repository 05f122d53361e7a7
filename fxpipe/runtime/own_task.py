"""Runs a user-defined task, whose function may change only what the task declares."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.ir import instruction as ins
from fxpipe.ir.task import KINDS, TaskContext

if TYPE_CHECKING:
    from fxpipe.runtime.interpreter import Machine


def run(machine: Machine, instruction: ins.Run) -> None:
    """Call a task's function, with copies of what it may not change.

    Parameters, and the sums of gradients where there are some yet, are those of the stage, by their
    names in the model.

    Raises:
        InputError: the function changed a tensor in place that it does not declare to write.
    """
    kind, stage = KINDS[instruction.kind], instruction.stage
    assert kind.run is not None
    names = [argument.target for argument in machine.stages[stage].parameters]
    parameters = machine.weights.parameters(stage, machine.step + instruction.version)
    sums = machine.store.gradients.get((stage, instruction.batch)) or [None] * len(names)
    given: dict[str, Mapping[str, Tensor]] = {}
    kept: list[tuple[str, Tensor, int, Tensor]] = []
    for word, told, values in (
        ("parameters", "the parameter", parameters),
        ("gradients", "the gradient of", sums),
    ):
        tensors = {name: x for name, x in zip(names, values, strict=True) if x is not None}
        given[word] = tensors if word in (*kind.reads, *kind.writes) else {}
        if word not in kind.writes:
            given[word] = {name: t.detach().clone() for name, t in given[word].items()}
            kept += [
                (f"{told} {name!r}", tensor, tensor._version, given[word].get(name, tensor))
                for name, tensor in tensors.items()
            ]
    # A tensor put in place of another would be lost, so that these dictionaries are read-only.
    shown = {word: MappingProxyType(tensors) for word, tensors in given.items()}
    kind.run(TaskContext(stage, instruction.microbatch, **shown))
    changed = [
        name
        for name, tensor, version, copy in kept
        if tensor._version != version or _differ(tensor, copy)
    ]
    if changed:
        raise InputError(
            f"task {kind.name!r} changed {', '.join(changed)} in place and does not say so; let it "
            'leave them, or define it with writes=("gradients",)'
        )


def _differ(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a copy was changed, also by ``.data`` or NumPy, which do not raise ``_version``."""
    if copy is tensor:
        return False
    if copy._version or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
        return True
    both_nan = (copy != copy) & (tensor != tensor)
    return bool(((copy != tensor) & ~both_nan).any())
