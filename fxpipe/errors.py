"""Every error that fxpipe raises on purpose, and the fault that a verifier reports."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class FxpipeError(Exception):
    """Base of all errors of this library. Its text names the thing and says what to do."""


class InputError(FxpipeError):
    """An argument of a call is wrong: devices, micro-batches, batch sizes, loss, optimizer."""


class TraceError(FxpipeError):
    """The model (or the loss) cannot be traced, or the traced graph does not compute the same."""


class PartitionError(FxpipeError):
    """The model cannot be cut as asked: too many stages, an unknown or a backward cut."""


class ParseError(FxpipeError):
    """A text is not a plan, schedule or program. Carries the place.

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
    """One thing that a verifier found wrong.

    Attributes:
        what: what is wrong, one clause.
        cure: what to do about it, one clause.
        device: the device whose list holds the fault, if it has one.
        position: index in that list, from 0, if it has one.
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
    """A plan, schedule or program is not valid. Its text lists every fault.

    Attributes:
        faults: all faults, in the order of the text.
    """

    def __init__(self, subject: str, faults: Sequence[Fault]) -> None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        lines = "".join(f"\n  {fault}" for fault in faults)
        super().__init__(f"{subject} has {count}:{lines}")
        self.faults = tuple(faults)


class PassError(FxpipeError):
    """A pass was given, or made, something that its verifier refuses. Names the pass."""


class ExecutionError(FxpipeError):
    """An instruction raised while a program ran; the original exception is the ``__cause__``.

    Attributes:
        device: index of the device whose list was running.
        instruction: the instruction as text.
        stage: the stage it belongs to, or None.
        microbatch: the micro-batch it belongs to, or None.
        source: the line of the model's own code, or "" where there is none.
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


def near(name: str, names: Iterable[str]) -> str:
    """A hint for a misspelt name: the near ones, else all of them (at most eight)."""
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(item) for item in close) + "?"
    shown = ", ".join(repr(item) for item in known[:8]) + (", …" if len(known) > 8 else "")
    return f"the known ones are {shown}" if known else "there are none"
