"""A user's own task, whose function may change only what the task declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from fxpipe.errors import InputError
from fxpipe.ir.opcodes.base import Compute, Instruction, Wrong
from fxpipe.ir.task import KINDS, TaskContext

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


@dataclass(frozen=True, slots=True)
class Run(Instruction):
    """Run a user's own task. Roughly: KINDS[kind].run(stage, parameters, gradients).

    Attributes:
        kind: the letter of its kind.
        microbatch: the micro-batch, or None for a task once a step.
        version: the version of the weights that it may read, as in Compute.
        batch: 0 for this step's batch, −1 for the one before.
    """

    opcode = "run"
    counted = "version", "batch"
    form = f"{{kind:word}} {Compute.form[0]}", "N s0[0] v0"
    once = "{kind:word} s{stage}{batch:batch} v{version:signed}", "N s0 v0"
    kind: str
    stage: int
    microbatch: int | None = None
    version: int = 0
    batch: int = 0

    @property
    def letter(self) -> str:
        return self.kind

    def text_form(self) -> tuple[str, str]:
        return self.once if self.microbatch is None else self.form

    def wrong(self, program: Program, device: int) -> Wrong | None:
        if self.kind in KINDS and KINDS[self.kind].run is not None:
            return None
        return f"there is no task of your own {self.kind!r}", "define it with define_task"

    def run(self, machine: Machine) -> None:
        """Call the task's function with the stage's tensors, and copies of what it may not change.

        It gets the parameters, and the gradients summed so far, by their names in the model.

        Raises:
            InputError: it changed a tensor in place that the task does not declare to write.
        """
        kind, stage = KINDS[self.kind], self.stage
        assert kind.run is not None
        names = [argument.target for argument in machine.stages[stage].parameters]
        parameters = machine.weights.parameters(stage, machine.step + self.version)
        sums = machine.store.gradients.get((stage, self.batch)) or [None] * len(names)
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
        kind.run(TaskContext(stage, self.microbatch, **read_only))
        changed = [
            text
            for text, tensor, version, copy in protected
            if tensor._version != version or _differ(tensor, copy)
        ]
        if changed:
            raise InputError(
                f"task {kind.name!r} changed {', '.join(changed)} in place and does not say so; "
                'let it leave them, or define it with writes=("gradients",)'
            )


def _differ(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a copy was changed, also by ``.data`` or NumPy, which do not count ``_version``."""
    if copy is tensor:
        return False
    if copy._version or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
        return True
    both_nan = (copy != copy) & (tensor != tensor)
    return bool(((copy != tensor) & ~both_nan).any())
