"""A user's own task, whose function may change only what the task declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from fxpipe.errors import InputError
from fxpipe.ir.effects import WEIGHTS
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

    @property
    def needs(self) -> Sequence[str]:
        return KINDS[self.kind].follows

    @property
    def requires(self) -> Sequence[str]:
        kind = KINDS.get(self.kind)  # ``wrong`` tells of one that is not there
        return (WEIGHTS,) if kind is not None and "parameters" in kind.reads else ()

    @property
    def reads_gradients(self) -> bool:
        return "gradients" in (*KINDS[self.kind].reads, *KINDS[self.kind].writes)

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
        given: dict[str, Mapping[str, Tensor]] = {}
        copies: dict[str, Tensor] = {}
        for word, phrase, values in (
            ("parameters", "the parameter", parameters),
            ("gradients", "the gradient of", sums),
        ):
            known = word in (*kind.reads, *kind.writes)
            tensors = {n: x for n, x in zip(names, values, strict=True) if known and x is not None}
            if word not in kind.writes:
                tensors = {name: x.detach().clone() for name, x in tensors.items()}
                copies |= {f"{phrase} {name!r}": x for name, x in tensors.items()}
            # read-only: assigning a tensor to a name would have no effect
            given[word] = MappingProxyType(tensors)
        kind.run(TaskContext(stage, self.microbatch, **given))
        if changed := [text for text, copy in copies.items() if copy._version]:
            raise InputError(
                f"task {kind.name!r} changed {', '.join(changed)} in place and does not say so; "
                'let it leave them, or define it with writes=("gradients",)'
            )
