"""The errors that fxpipe raises on purpose, and the faults that verifiers report."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class FxpipeError(Exception):
    """The base of all errors of this library. The message says what is wrong and what to do.

    A note below the message names the error's section in docs/errors.md.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        documented = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        self.add_note(f"see docs/errors.md#{documented.__name__.lower()}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with its attributes, which a process pool would otherwise lose."""
        return type(self).__new__, (type(self), *self.args), vars(self)


class InputError(FxpipeError):
    """An argument of a call is wrong: devices, micro-batches, batch sizes, loss, optimizer."""


class CheckpointError(FxpipeError):
    """A checkpoint cannot be written, is not whole, or is of another model or optimizer."""


class TraceError(FxpipeError):
    """The model (or the loss) cannot be traced, or the traced graph does not compute the same.

    Attributes:
        where: the line that cannot be traced and why, or "" if no line is known.
        submodules: the names of the submodules that were being called there, outermost first.
    """

    def __init__(self, message: str, where: str = "", submodules: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.where = where
        self.submodules = tuple(submodules)


def way_out(submodule: str) -> str:
    """The advice for a part of a model that cannot be traced: make it a leaf module.

    Args:
        submodule: its name in the model, or "" if the part is in no submodule.
    """
    if submodule:
        return (
            f"mark {submodule!r} as a leaf that is called as it is: compile(..., "
            f"extensions=[fxpipe.LeafModules({submodule!r})])"
        )
    return (
        "move it into a submodule of its own and mark that as a leaf that is called as it is: "
        "compile(..., extensions=[fxpipe.LeafModules(its name)])"
    )


class PartitionError(FxpipeError):
    """The model cannot be cut as asked: too many stages, an unknown or a backward cut.

    Attributes:
        limited: whether no cut was found that keeps the memory limits.
    """

    def __init__(self, message: str, *, limited: bool = False) -> None:
        super().__init__(message)
        self.limited = limited


class ParseError(FxpipeError):
    """A text is not a plan, schedule or program.

    Attributes:
        line: line in the text, from 1.
        column: column in that line, from 1.
    """

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


@dataclass(frozen=True)
class Fault:
    """Something that a verifier found wrong.

    Attributes:
        what: what is wrong, one clause.
        cure: what to do about it, one clause.
        device: the device whose list has the fault, or None.
        position: the index in that list, from 0, or None.
        subject: the task or instruction at fault, as text.
    """

    what: str
    cure: str
    device: int | None = None
    position: int | None = None
    subject: str = ""

    def __str__(self) -> str:
        where = [] if self.device is None else [f"device {self.device}"]
        if self.position is not None:
            where.append(f"position {self.position}")
        if self.subject:
            where.append(self.subject)
        prefix = ", ".join(where) + ": " if where else ""
        return f"{prefix}{self.what}; {self.cure}"


class VerificationError(FxpipeError):
    """A plan, schedule or program is not valid. The message lists every fault.

    Attributes:
        faults: all faults, in the order of the message.
        value: the plan, schedule or program, whose ``draw`` shows the faults in red.
    """

    def __init__(self, subject: str, faults: Sequence[Fault], value: object = None) -> None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        lines = "".join(f"\n  {fault}" for fault in faults)
        super().__init__(f"{subject} has {count}:{lines}")
        self.faults = tuple(faults)
        self.value = value


class PassError(FxpipeError):
    """The input or the output of a pass does not verify. Names the pass."""


class EndedError(FxpipeError):
    """An earlier failure has left the stages at different updates, and the pipe has ended."""


RESTORE = "go on from the last checkpoint with restore() or load()"
"""The advice for a pipe that has ended."""


class CaptureError(FxpipeError):
    """A stage cannot be captured into a CUDA graph. Names it, and says what to do."""


class ExecutionError(FxpipeError):
    """An instruction raised while a program ran; the original exception is the ``__cause__``.

    Attributes:
        device: index of the device whose list was running.
        instruction: the instruction as text.
        stage: the stage it belongs to, or None.
        microbatch: the micro-batch it belongs to, or None.
        source: the line of the model's own code, or "" if there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        device: int,
        instruction: str,
        stage: int | None,
        microbatch: int | None,
        source: str,
    ) -> None:
        super().__init__(message)
        self.device = device
        self.instruction = instruction
        self.stage = stage
        self.microbatch = microbatch
        self.source = source


class DeviceMemoryError(ExecutionError):
    """A device has no memory left for an instruction, or for what is compiled or loaded outside of
    a step; ``instruction`` is then empty. Says what to do."""


class DeviceError(ExecutionError):
    """A device reports, late, that an earlier instruction failed, without saying which one, so that
    ``device`` is −1 and ``instruction`` empty."""


class RankError(ExecutionError):
    """Another rank failed, was lost, is late, or does something else than this rank.

    If an instruction failed there, ``device``, ``instruction``, ``stage``, ``microbatch`` and
    ``source`` describe it as far as it is known; the traceback is in the notes.

    Attributes:
        rank: the other rank's number in the pipe, or −1 if it is not known which rank it was.
    """

    def __init__(self, message: str, *, rank: int, **place: Any) -> None:
        nowhere = {"instruction": "", "stage": None, "microbatch": None, "source": ""}
        super().__init__(message, **{"device": rank, **nowhere, **place})
        self.rank = rank


def told(error: BaseException) -> str:
    """An exception as text (``ValueError: no luck``), even if its ``str`` raises."""
    name = type(error).__name__
    try:
        text = str(error).strip()
    except Exception as failure:
        return f"{name}, whose text cannot be made ({type(failure).__name__})"
    return f"{name}: {text}" if text else name


def near(name: str, names: Iterable[str]) -> str:
    """A hint for a misspelt name: the similar names, or else all names (at most eight).

    A name with dots is also compared with the ends of others: ``h.2`` with ``transformer.h.2``.
    """
    known = sorted(names)
    dots = name.count(".") + 1
    ends = {item: ".".join(item.split(".")[-dots:]) for item in known}
    close = [item for item in known if name and ends[item] == name][:3]
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if not close and dots > 1:
        similar = difflib.get_close_matches(name, ends.values(), n=3, cutoff=0.5)
        close = [item for item in known if ends[item] in similar][:3]
    if close:
        return "did you mean " + " or ".join(repr(item) for item in close) + "?"
    shown = ", ".join(repr(item) for item in known[:8]) + (", …" if len(known) > 8 else "")
    return f"the known ones are {shown}" if known else "there are none"
