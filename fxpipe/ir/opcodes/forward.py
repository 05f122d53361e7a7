"""A stage's forward, and the same once more for its backward."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from fxpipe.ir.opcodes.base import Compute, Wrong
from fxpipe.ir.task import Key
from fxpipe.ir.value import Buffer, BufferKind

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


@dataclass(frozen=True, slots=True)
class Forward(Compute):
    """Run a stage's forward graph. Roughly: outputs, saved = forward(weights[version], inputs).

    Attributes:
        keeps: whether it keeps what its backward needs.
        again: whether it will be recomputed, for which it keeps the buffers that it reads.
    """

    opcode = "forward"
    flags: ClassVar = {"keep": "keeps", "again": "again"}
    task = "F"
    keeps: bool = True
    again: bool = False

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return (*program.weights_of(self), *program.operands_of(self).inputs)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        operands = program.operands_of(self)
        saved = (operands.saved,) if self.keeps else ()
        state = (self.own("state"),) if self.again else ()
        return (*chain(*operands.outputs), *saved, *state)

    def misfits(self, tasks: Container[Key], trains: bool) -> Iterator[Wrong]:
        again = ("R", self.microbatch, self.stage) in tasks
        keeps = trains and not again
        if again and not self.again:
            yield "it keeps no buffers for its recompute", "write 'again'"
        if self.again and not again:
            yield "it keeps buffers and is never recomputed", "remove 'again'"
        if self.keeps and not keeps:
            yield "it keeps what no backward uses up", "remove 'keep'"
        if keeps and not self.keeps:
            yield "it keeps nothing for its backward", "write 'keep'"

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        store, (weights, before) = machine.store, machine.held(stage, self.version)
        arguments = zip(machine.stages[stage].buffers, before, strict=True)
        # what earlier micro-batches of this run wrote, else the model's
        buffers = [store.state.get(argument.target, buffer) for argument, buffer in arguments]
        if self.again:
            store.values[self.own("state")] = list(buffers)
        operands = machine.program.operands[stage, i, batch]
        inputs = [store.values[buffer] for buffer in operands.inputs]
        result = machine.kernel(stage, i, batch).forward(weights, buffers, inputs)
        store.hand_out(operands.outputs, result.outputs)
        for write, value in zip(machine.stages[stage].writes, result.writes, strict=True):
            store.state[write.target] = value
        if self.keeps:
            store.keep(operands.saved, result.saved)


@dataclass(frozen=True, slots=True)
class Recompute(Compute):
    """Run a stage's forward graph once more, for what its backward needs.

    Roughly: _, saved = forward(weights[version], inputs), with the buffers of the first time.
    """

    opcode = "recompute"
    task = "R"

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        weights, ends = program.weights_of(self), self.ends(program)
        inputs = () if self._away(program) else program.operands_of(self).inputs
        return (*weights, *ends, *inputs)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return (self.own("saved"),)

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        away = self._away(program)  # with buffers and inputs
        return (self.own(away[0] if away else "state"),)

    def _away(self, program: Program) -> tuple[BufferKind, Forward] | None:
        return program.away.get((self.stage, self.microbatch))

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        values, operands = machine.store.values, machine.program.operands[stage, i, batch]
        kept = values.pop(*self.ends(machine.program))
        count = len(machine.stages[stage].buffers)
        weights, _ = machine.held(stage, self.version)
        inputs = kept[count:] or [values[buffer] for buffer in operands.inputs]
        result = machine.kernel(stage, i, batch).forward(weights, kept[:count], inputs)
        machine.store.keep(operands.saved, result.saved)
