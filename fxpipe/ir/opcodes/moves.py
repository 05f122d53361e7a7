"""Values that go from device to device, from the caller and to it, and their end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.ir.opcodes.base import Move
from fxpipe.ir.value import HOST, Buffer

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


class _Reading(Move):
    __slots__ = ()

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return (self.buffer,)


class _Writing(Move):
    __slots__ = ()

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return (self.buffer,)


@dataclass(frozen=True, slots=True)
class Load(_Writing):
    """Take a value from the caller. Roughly: buffers[b] = host.give(b)."""

    opcode = "load"

    def route(self, device: int, made: int, used: int) -> str:
        right = made == HOST and used == device
        return "" if right else "load what the caller gives, on the device that uses it"

    def run(self, machine: Machine) -> None:
        host = machine.jobs[machine.step + self.buffer.batch].host
        machine.store.values[self.buffer] = host.give(self.buffer)


@dataclass(frozen=True, slots=True)
class Output(_Reading):
    """Hand a value to the caller. Roughly: host.take(b, buffers[b])."""

    opcode = "output"

    def route(self, device: int, made: int, used: int) -> str:
        right = used == HOST and made == device
        return "" if right else "hand over what goes to the caller, on the device that makes it"

    def run(self, machine: Machine) -> None:
        buffer = self.buffer
        host, value = machine.jobs[machine.step + buffer.batch].host, machine.store.values[buffer]
        if host.take(buffer, value):
            machine.channels.publish(machine.named(buffer), value)


@dataclass(frozen=True, slots=True)
class Send(_Reading):
    """Send a value straight to the stage that uses it. Roughly: peer.put(b, buffers[b])."""

    opcode = "send"

    def route(self, device: int, made: int, used: int) -> str:
        right = made == device != used and used != HOST
        return "" if right else "send what another device uses, on the device that makes it"

    def run(self, machine: Machine) -> None:
        value = machine.store.values[self.buffer]
        target = machine.program.targets[self.buffer]
        machine.channels.put(target, machine.named(self.buffer), value)


@dataclass(frozen=True, slots=True)
class Stash(Send):
    """Send a value that skips stages straight to the stage that pops it; else like ``send``."""

    opcode = "stash"


@dataclass(frozen=True, slots=True)
class Receive(_Writing):
    """Wait for a value that another device sends. Roughly: buffers[b] = self.get(b)."""

    opcode = "recv"

    def route(self, device: int, made: int, used: int) -> str:
        right = used == device != made and made != HOST
        return "" if right else "receive what another device makes, on the device that uses it"

    def run(self, machine: Machine) -> None:
        value = machine.channels.arrive(machine, machine.named(self.buffer))
        machine.store.values[self.buffer] = value


@dataclass(frozen=True, slots=True)
class Pop(Receive):
    """Wait for a value that another stage stashes; else like ``recv``."""

    opcode = "pop"


@dataclass(frozen=True, slots=True)
class Free(Move):
    """Drop a buffer. Roughly: del buffers[b]."""

    opcode = "free"
    takes = False

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return (self.buffer,)

    def route(self, device: int, made: int, used: int) -> str:
        return "" if device in (made, used) else "free it on a device that holds it"

    def run(self, machine: Machine) -> None:
        machine.store.drop(self.buffer)
