"""The errors of a run, which name the device and the instruction that it was running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpipe.errors import DeviceError, DeviceMemoryError, ExecutionError, FxpipeError, told
from fxpipe.formatting import bytes_text
from fxpipe.ir import instruction as ins
from fxpipe.runtime.interpreter import Machine
from fxpipe.text.program import print_instruction
from fxpipe.torchtools import source

if TYPE_CHECKING:
    from fxpipe.runtime.devices.backend import Backend

Expected = Callable[[], Sequence[int]]
"""Predicts for each device the most bytes that it holds."""


class DeviceMemory(NamedTuple):
    """The memory of a device.

    Attributes:
        place: the device's name; devices with the same name share the memory.
        used: the most bytes that this process has allocated there; None if they are not counted.
        total: the size of the memory in bytes; None if it is not known.
    """

    place: str
    used: int | None
    total: int | None


def explained_failure(
    machine: Machine,
    cause: BaseException,
    consequence: str,
    backend: Backend,
    expected: Expected | None = None,
) -> ExecutionError:
    """Make the error to raise for an exception of the instruction that a machine is running.

    ``consequence`` says in one clause what it means for the weights; it is empty if that is not
    known yet. ``expected`` predicts what the devices hold.
    """
    if isinstance(cause, ExecutionError):
        return cause
    instruction = machine.program.lists[machine.device][machine.position]
    text = running(machine)
    stage, microbatch = _place(instruction)
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
        memories = [backend.memory(device) for device in range(machine.program.devices)]
        peaks = _peaks(expected)
        error = DeviceMemoryError(
            f"{where}: {_lack(machine.device, memories, peaks)}{meaning} ({told(cause)})",
            predicted=None if peaks is None else peaks[machine.device],
            capacity=memories[machine.device].total,
            **place,
        )
    error.__cause__ = cause
    return error


def explained_late(cause: BaseException, when: str, backend: Backend) -> DeviceError | None:
    """Make the error for a failure that a device reports late; None if ``cause`` is not one.

    ``when`` says in one clause what was running when it was raised.
    """
    if not backend.is_late(cause):
        return None
    return DeviceError(
        f"when {when}, a device reported that an instruction launched earlier had failed "
        f"({told(cause)}), and does not say which. Run it again with launches that wait, on CUDA "
        "with the environment variable CUDA_LAUNCH_BLOCKING=1: then the error names the "
        "instruction. All that this process had on the device is lost: start it again, from the "
        "last checkpoint",
        device=-1,
        instruction="",
        stage=None,
        microbatch=None,
        source="",
    )


def running(machine: Machine) -> str:
    """The text of the instruction that a machine is running."""
    return print_instruction(machine.program.lists[machine.device][machine.position])


def whereabouts(machine: Machine) -> str:
    """``device 1 was at instruction 3, forward s1[0] v0 keep``."""
    if machine.at_end:
        return f"device {machine.device} was done"
    return f"device {machine.device} was at instruction {machine.position}, {running(machine)}"


def _lack(device: int, memories: Sequence[DeviceMemory], peaks: Sequence[int] | None) -> str:
    """Say which device is out of memory, what was predicted, and what to change."""
    place, used, total = memories[device]
    facts = []
    if used is not None:
        facts.append(f"it held up to {bytes_text(used)}")
    if peaks is not None:
        sharing = [d for d, memory in enumerate(memories) if memory.place == place]
        together = sum(peaks[d] for d in sharing)
        more = f", and {bytes_text(together)} for the {len(sharing)} devices that share it"
        facts.append(
            f"{bytes_text(peaks[device])} ({peaks[device]} bytes) were predicted at the device's "
            f"peak{more if len(sharing) > 1 else ''}"
        )
    size = "" if total is None else f" of its {bytes_text(total)}"
    details = f": {'; '.join(facts)}" if facts else ""
    return (
        f"{place} has no memory left{size}{details}. Take more micro-batches or a smaller batch; "
        'recompute ("always", "except_last", or this stage alone); a schedule that keeps fewer '
        "micro-batches, such as 1f1b; or a partition that gives this stage less"
    )


def _peaks(expected: Expected | None) -> Sequence[int] | None:
    if expected is None:
        return None
    try:
        return expected()
    except FxpipeError:  # a prediction that fails must not hide the actual failure
        return None


def _place(instruction: ins.Instruction) -> tuple[int | None, int | None]:
    """The stage and the micro-batch of an instruction, None where it has none."""
    buffer = getattr(instruction, "buffer", None)
    if buffer is not None:
        here = isinstance(instruction, ins.Arrival)
        return (buffer.target if here else buffer.source), buffer.microbatch
    return getattr(instruction, "stage", None), getattr(instruction, "microbatch", None)


def _named(stage: int | None, microbatch: int | None) -> str:
    parts = [] if stage is None else [f"stage {stage}"]
    parts += [] if microbatch is None else [f"micro-batch {microbatch}"]
    return f" ({', '.join(parts)})" if parts else ""
