"""Run a user-defined task, whose function may change only what the task declares."""

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
    """Call a task's function with the stage's tensors, and copies of what it may not change.

    It gets the parameters, and the gradients summed so far, by their names in the model.

    Raises:
        InputError: the function changed a tensor in place that the task does not declare to write.
    """
    kind, stage = KINDS[instruction.kind], instruction.stage
    assert kind.run is not None
    names = [argument.target for argument in machine.stages[stage].parameters]
    parameters = machine.weights.parameters(stage, machine.step + instruction.version)
    sums = machine.store.gradients.get((stage, instruction.batch)) or [None] * len(names)
    passed: dict[str, Mapping[str, Tensor]] = {}
    protected: list[tuple[str, Tensor, int, Tensor]] = []  # message, tensor, version, copy
    for word, phrase, values in (
        ("parameters", "the parameter", parameters),
        ("gradients", "the gradient of", sums),
    ):
        tensors = {name: x for name, x in zip(names, values, strict=True) if x is not None}
        passed[word] = tensors if word in (*kind.reads, *kind.writes) else {}
        if word not in kind.writes:
            passed[word] = {name: t.detach().clone() for name, t in passed[word].items()}
            protected += [
                (f"{phrase} {name!r}", tensor, tensor._version, passed[word].get(name, tensor))
                for name, tensor in tensors.items()
            ]
    # read-only dictionaries: assigning a tensor to a name would have no effect
    read_only = {word: MappingProxyType(tensors) for word, tensors in passed.items()}
    kind.run(TaskContext(stage, instruction.microbatch, **read_only))
    changed = [
        text
        for text, tensor, version, copy in protected
        if tensor._version != version or _differ(tensor, copy)
    ]
    if changed:
        raise InputError(
            f"task {kind.name!r} changed {', '.join(changed)} in place and does not say so; let it "
            'leave them, or define it with writes=("gradients",)'
        )


def _differ(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a copy was changed, also by ``.data`` or NumPy, which do not count ``_version``."""
    if copy is tensor:
        return False
    if copy._version or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
        return True
    both_nan = (copy != copy) & (tensor != tensor)
    return bool(((copy != tensor) & ~both_nan).any())
