"""The errors of a run, which name the device and the instruction that it was running."""

from __future__ import annotations

from typing import Any

from fxpipe.errors import DeviceMemoryError, ExecutionError, told
from fxpipe.ir import instruction as ins
from fxpipe.runtime.interpreter import Machine
from fxpipe.text.program import print_instruction
from fxpipe.torchtools import source

_LACK = "the device has no memory left; "
_CURE = (
    "pipe.simulate() predicts what each holds. Take more micro-batches or a smaller batch; "
    'recompute ("always", "except_last", or this stage alone); a schedule that keeps fewer '
    "micro-batches, such as 1f1b; or a partition that gives this stage less"
)
_CURE_OF_CALLS = (
    "nothing is kept here for a backward. Take a smaller batch, as all outputs are kept until "
    "the call ends, or more micro-batches; or a partition that gives this stage less"
)


def explained_failure(machine: Machine, cause: BaseException, consequence: str) -> ExecutionError:
    """Make the error to raise for an exception of the instruction that a machine is running.

    ``consequence`` says in one clause what it means for the weights; it is empty if that is not
    known yet.
    """
    if isinstance(cause, ExecutionError):
        return cause
    text = running(machine)
    stage, microbatch = _place(machine)
    line = source.of_failure(cause)
    which = text + _named(stage, microbatch)
    where = f"device {machine.device}, instruction {machine.position}: {which} failed"
    where += f" at {line}" if line else ""
    place: dict[str, Any] = {
        "device": machine.device,
        "instruction": text,
        "stage": stage,
        "microbatch": microbatch,
        "source": line,
    }
    meaning = f"; {consequence}" if consequence else ""
    error = ExecutionError(f"{where} ({told(cause)}){meaning}", **place)
    if source.lacks_memory(cause):
        keeps = any(getattr(x, "keeps", False) for x in machine.program.lists[machine.device])
        cure = _LACK + (_CURE if keeps else _CURE_OF_CALLS)
        error = DeviceMemoryError(f"{where}: {cure}{meaning} ({told(cause)})", **place)
    error.__cause__ = cause
    return error


def running(machine: Machine) -> str:
    """The text of the instruction that a machine is running; behind the last one, of that place."""
    if machine.at_end:
        return "the end of the list"
    return print_instruction(machine.program.lists[machine.device][machine.position])


def whereabouts(machine: Machine) -> str:
    """``device 1 was at instruction 3, forward s1[0] v0 keep``."""
    if machine.at_end:
        return f"device {machine.device} was done"
    return f"device {machine.device} was at instruction {machine.position}, {running(machine)}"


def _place(machine: Machine) -> tuple[int | None, int | None]:
    """The stage and the micro-batch of the instruction that runs, None where it has none."""
    if machine.at_end:
        return None, None
    instruction = machine.program.lists[machine.device][machine.position]
    buffer = getattr(instruction, "buffer", None)
    if buffer is not None:
        here = isinstance(instruction, ins.Arrival)
        return (buffer.target if here else buffer.source), buffer.microbatch
    return getattr(instruction, "stage", None), getattr(instruction, "microbatch", None)


def _named(stage: int | None, microbatch: int | None) -> str:
    parts = [] if stage is None else [f"stage {stage}"]
    parts += [] if microbatch is None else [f"micro-batch {microbatch}"]
    return f" ({', '.join(parts)})" if parts else ""
