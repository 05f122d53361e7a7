"""A stage's copies on other devices: they get its weights and give back gradients, once a step.

The stage's home device owns the weights and buffers. A copy gets them at the begin of the step. At
the end it gives back the gradients that it has summed over its micro-batches, and the moments of
its BatchNorms. The home device adds them to its own sums, in the order of the copies, and updates.
So copies cannot diverge, and optimizers and checkpoints need not know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.ir.effects import DeviceMemory, Spaces
from fxpipe.ir.opcodes.base import Instruction, OncePerStep, Wrong
from fxpipe.ir.task import KINDS, TaskKind
from fxpipe.ir.value import Buffer, own_buffer
from fxpipe.parts import Parts

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


class _AtHome(OncePerStep):
    __slots__ = ()
    before_barrier = True

    def wrong(self, program: Program, device: int) -> Wrong | None:
        if program.copies_of(self.stage):
            return None
        return f"stage {self.stage} has no copies", "remove it, or give it some"


@dataclass(frozen=True, slots=True)
class Share(_AtHome):
    """Send a stage's weights to its copies. Roughly: copy.put(weights[stage]) for each copy."""

    opcode = "share"
    stands_for = TaskKind("share", "share", per_microbatch=False)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        copies = program.copies_of(self.stage)
        return tuple([own_buffer("weights", self.stage, copy, self.batch) for copy in copies])

    def run(self, machine: Machine) -> None:
        shared = machine.held(self.stage, self.batch)
        machine.store.values.update(dict.fromkeys(self.makes(machine.program), shared))


@dataclass(frozen=True, slots=True)
class Give(Instruction):
    """On a copy of a stage: send its gradients to the stage's own device, which adds them.

    Roughly: home.put(gradients.pop(stage)).

    Attributes:
        copy: the device of the copy.
        batch: 0 for this step's batch, −1 for the one before.
    """

    opcode = "give"
    form = "s{stage}[{copy}{batch:batch}]", "s0[1]"
    task = "A"
    counted = ("batch",)
    before_barrier = True
    stage: int
    copy: int
    batch: int = 0

    @property
    def needs(self) -> Sequence[str]:
        return KINDS["A"].follows

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return (own_buffer("sums", self.stage, self.copy, self.batch),)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        """The buffer holds the sums from now on."""
        return Spaces(over=(memory.sums(self.stage, self.batch),))

    def wrong(self, program: Program, device: int) -> Wrong | None:
        if device == self.copy in program.copies_of(self.stage):
            return None
        return f"device {device} has no such copy of stage {self.stage}", "remove it"

    def run(self, machine: Machine) -> None:
        gradients = machine.store.gradients.pop((self.stage, self.batch), [])
        names, state = [x.target for x in machine.stages[self.stage].writes], machine.store.state
        written = {name: state.pop(name) for name in names if name in state}
        sums = own_buffer("sums", self.stage, self.copy, self.batch)
        machine.store.values[sums] = gradients, written


@dataclass(frozen=True, slots=True)
class Add(_AtHome):
    """Add the gradients that the copies of a stage give, in the order of their devices.

    Roughly: gradients[stage] += sums for each copy.
    """

    opcode = "add"
    sums = True
    stands_for = TaskKind(
        "add",
        "add",
        per_microbatch=False,
        follows="BIW",
        lacking="let it add what its copies give",
    )

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        copies = program.copies_of(self.stage)
        return tuple([own_buffer("sums", self.stage, copy, self.batch) for copy in copies])

    def run(self, machine: Machine) -> None:
        from fxpipe.kernels.graph import onto

        totals, state = machine.totals(self), machine.store.state
        for buffer in self.uses(machine.program):
            gradients, written = machine.store.values[buffer]
            pairs = zip(totals or [None] * len(gradients), gradients, strict=True)
            totals = [onto(total, gradient) for total, gradient in pairs]
            for name, moments in written.items():  # only moments, see ``refuse_copied``
                if name in state:
                    merged = Parts.merged_moments.find("deferred BatchNorm with copies")
                    moments = merged([state[name], moments])
                state[name] = moments
        machine.store.gradients[self.stage, self.batch] = list(totals)
