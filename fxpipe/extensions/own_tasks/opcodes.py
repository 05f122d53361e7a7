"""The instructions that run a user's own tasks, whose functions may change only what the tasks
declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.ir.effects import WEIGHTS
from fxpipe.ir.opcodes.base import Compute, Instruction, Wrong
from fxpipe.ir.task import KINDS, TaskKind

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


@dataclass(frozen=True)
class TaskContext:
    """The argument of ``run`` of a task of a user's own.

    Tensors that its kind reads but does not write are copies, and changing one is an error.
    Gradients are changed in place: replacing a tensor by another is an error, too.

    Attributes:
        stage: the task's stage.
        microbatch: its micro-batch, or None for a task once a step.
        parameters: name in the model → the stage's parameter, if the kind reads them.
        gradients: name in the model → the sum of its gradient so far in this batch, if the kind
            reads or writes them; parameters without a gradient are left out. With ``scaler=`` they
            are scaled until the stage clips.
    """

    stage: int
    microbatch: int | None
    parameters: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKind(TaskKind):
    """A user's own kind of task.

    Attributes:
        writes: what it changes of its stage: "gradients", or nothing.
        run: the function that it runs.
    """

    writes: tuple[str, ...]
    run: Callable[[TaskContext], None]


class _Own(Instruction):
    """Run a user's own task. Roughly: KINDS[kind].run(stage, parameters, gradients).

    Attributes:
        kind: the letter of its kind.
        version: the version of the weights that it may read, as in Compute.
        batch: 0 for this step's batch, −1 for the one before.
    """

    __slots__ = ()
    counted = "version", "batch"
    kind: str
    version: int

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
        return "gradients" in KINDS[self.kind].reads

    def wrong(self, program: Program, device: int) -> Wrong | None:
        if isinstance(KINDS.get(self.kind), OwnKind):
            return None
        return f"there is no task of your own {self.kind!r}", "define it with define_task"

    def run(self, machine: Machine) -> None:
        """Call the task's function with the stage's tensors, and copies of what it may not change.

        It gets the parameters, and the gradients summed so far, by their names in the model.

        Raises:
            InputError: it changed a tensor in place that the task does not declare to write.
        """
        kind, stage = KINDS[self.kind], self.stage
        assert isinstance(kind, OwnKind)
        names = [argument.target for argument in machine.stages[stage].parameters]
        parameters = machine.weights.parameters(stage, machine.step + self.version)
        sums = machine.store.gradients.get((stage, self.batch)) or [None] * len(names)
        given: dict[str, Mapping[str, Tensor]] = {}
        copies: dict[str, Tensor] = {}
        for word, phrase, values in (
            ("parameters", "the parameter", parameters),
            ("gradients", "the gradient of", sums),
        ):
            tensors = {n: x for n, x in zip(names, values, strict=True) if x is not None}
            if word not in kind.reads:
                tensors = {}
            elif word not in kind.writes:
                tensors = {name: x.detach().clone() for name, x in tensors.items()}
                copies |= {f"{phrase} {name!r}": x for name, x in tensors.items()}
            # read-only: assigning a tensor to a name would have no effect
            given[word] = MappingProxyType(tensors)
        kind.run(TaskContext(stage, getattr(self, "microbatch", None), **given))
        if changed := [text for text, copy in copies.items() if copy._version]:
            raise InputError(
                f"task {kind.name!r} changed {', '.join(changed)} in place and does not say so; "
                'let it leave them, or define it with writes=("gradients",)'
            )


@dataclass(frozen=True, slots=True)
class Run(_Own):
    """Run a user's own task once a step."""

    opcode = "run"
    form = "{kind:word} s{stage}{batch:batch} v{version:signed}", "N s0 v0"
    kind: str
    stage: int
    version: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class RunEach(_Own):
    """Run a user's own task for a micro-batch."""

    opcode = "run_each"
    form = f"{{kind:word}} {Compute.form[0]}", "N s0[0] v0"
    kind: str
    stage: int
    microbatch: int
    version: int = 0
    batch: int = 0


def made(kind: str, stage: int, microbatch: int | None, version: int, batch: int) -> Instruction:
    """The instruction of a task."""
    if microbatch is None:
        return Run(kind, stage, version, batch)
    return RunEach(kind, stage, microbatch, version, batch)
