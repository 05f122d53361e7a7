"""Tasks: the pieces of compute that a schedule orders, and the kinds of them.

The set of kinds is open: an extension adds a user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

from fxpipe.ir.value import batch_mark

Key = tuple[str, int | None, int]
"""Kind, micro-batch and stage: one task of every batch. An A on a copy of a stage has the copy's
device for a micro-batch."""


@dataclass(frozen=True, slots=True)
class TaskKind:
    """A kind of compute task.

    Attributes:
        letter: its letter in text and pictures.
        name: its name in messages.
        per_microbatch: False for a task that comes once a step and stage.
        follows: letters of the tasks that must come before it on its stage, for its micro-batch
            (for all micro-batches, if it comes once a step); missing tasks are ignored.
        previous: letters of the tasks on each stage that feeds its own, for its micro-batch, one of
            which makes its inputs.
        next: letters of the tasks on each stage that its own feeds, for its micro-batch, one of
            which makes its inputs.
        gathers: letters of the tasks on all stages, for all micro-batches, that come before it.
        cost: the time that it takes where nothing is measured; a forward takes 1.
        repeats: whether a stage may have several of it in a step.
        lacking: where every stage must have one, what to do about a stage that has none.
        reads: which of "gradients" and "parameters" of its stage a user's own kind reads or writes.
        make: for a user's own kind, its stage, micro-batch, version and batch → its instruction.
    """

    letter: str
    name: str
    per_microbatch: bool = True
    follows: str = ""
    previous: str = ""
    next: str = ""
    gathers: str = ""
    cost: float = 1.0
    repeats: bool = False
    lacking: str = "add it"
    reads: tuple[str, ...] = ()
    make: Callable[[int, int | None, int, int], Any] | None = None


KINDS: dict[str, TaskKind] = {
    kind.letter: kind
    for kind in (
        TaskKind("F", "forward", previous="F", cost=1.0),
        TaskKind("B", "backward", follows="FROP", next="BI", cost=2.0),
        TaskKind("I", "input gradient", follows="FROP", next="BI", cost=1.0),
        TaskKind("W", "weight gradient", follows="I", cost=1.0),
        TaskKind("R", "recompute", follows="FP", cost=1.0),
        TaskKind("O", "offload", follows="F", cost=1.0),
        TaskKind("P", "prefetch", follows="O", cost=1.0),
        TaskKind(
            "A",
            "reduce",
            per_microbatch=False,
            follows="BIW",
            cost=0.1,
            lacking="let every stage sum its gradients over the replicas, or none",
        ),
        TaskKind(
            "C",
            "clip",
            per_microbatch=False,
            gathers="BIWA",
            cost=0.1,
            lacking="clip every stage or none",
        ),
        TaskKind("G", "gather", per_microbatch=False, cost=0.0, repeats=True),
        TaskKind("D", "drop", per_microbatch=False, cost=0.0, repeats=True),
        TaskKind("U", "update", per_microbatch=False, follows="FBIWRAC", cost=0.5),
    )
}
"""Letter → kind, in the order of tables and legends."""

BUILT_IN = frozenset(KINDS)


def usual_cost(letter: str | None) -> float:
    """The time of a kind of task where nothing is measured; 0 for None, which computes nothing."""
    if letter is None:
        return 0.0
    return KINDS[letter].cost if letter in KINDS else 1.0


BESIDE: Mapping[str, str] = {"O": "offload", "P": "offload", "G": "sharding", "D": "sharding"}
"""Letter of a task that the device only begins, and that then runs beside its other tasks, or that
moves memory alone → the extension that has its instruction."""

WITHOUT_GRADIENTS = frozenset("FGD")
"""The letters of the tasks of inference."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of compute: a kind, a micro-batch and a stage.

    ``F(3) & B(1)`` is a Pair.

    Attributes:
        kind: a letter of KINDS.
        microbatch: index in its batch, from 0; None for a task once a step.
        stage: the stage. An author may leave it out, None; in a Schedule it is never None.
        batch: 0 for this step's batch, −1 for the one before it, and so on.
    """

    kind: str
    microbatch: int | None = None
    stage: int | None = None
    batch: int = 0

    def __str__(self) -> str:
        index = "" if self.microbatch is None else str(self.microbatch)
        at = "" if self.stage is None else f"@{self.stage}"
        return f"{self.kind}{index}{batch_mark(self.batch)}{at}"

    def __and__(self, other: Task) -> Pair:
        return Pair(self, other) if isinstance(other, Task) else NotImplemented


class Pair(NamedTuple):
    """A forward of one micro-batch and a backward of another that run together, ``F3&B1``.

    They start together, once both have their inputs, and end together.
    """

    forward: Task
    backward: Task

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


BESIDE_FORWARD = "BIW"
"""The letters of the tasks that can be a pair with a forward."""


def is_task(value: object) -> bool:
    """Whether a value is a Task, its kind a text and its numbers whole."""
    if not isinstance(value, Task) or not isinstance(value.kind, str):
        return False
    if type(value.microbatch) is type(value.stage) is type(value.batch) is int:
        return True  # nearly always
    numbers = [number for number in (value.microbatch, value.stage) if number is not None]
    return all(isinstance(number, Integral) for number in (value.batch, *numbers))


def F(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Forward of a micro-batch. The stage of a task can be left out if its device holds one."""
    return Task("F", microbatch, stage, batch)


def B(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Backward of a micro-batch: the gradients of the inputs and of the weights."""
    return Task("B", microbatch, stage, batch)


def I(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:  # noqa: E743
    """Input gradient: the half of a backward for which the stage before waits."""
    return Task("I", microbatch, stage, batch)


def W(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Weight gradient: the other half of a backward, for which only the update waits."""
    return Task("W", microbatch, stage, batch)


def R(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Recompute: run a forward again before its backward; only its inputs were kept."""
    return Task("R", microbatch, stage, batch)


def O(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:  # noqa: E743
    """Offload: begin to move what the stage keeps out of the device's memory.

    With a recompute, R, that is the inputs of the forward.
    """
    return Task("O", microbatch, stage, batch)


def P(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Prefetch: begin to bring back what was offloaded. The backward, or R, waits for it."""
    return Task("P", microbatch, stage, batch)


def A(stage: int | None = None, *, batch: int = 0) -> Task:
    """Reduce: begin to sum a stage's gradients over the replicas. Tasks that need the sums wait."""
    return Task("A", None, stage, batch)


def G(stage: int | None = None, *, batch: int = 0) -> Task:
    """Gather: begin to make a stage's whole weights of the shards that the replicas keep. The tasks
    that read them wait."""
    return Task("G", None, stage, batch)


def D(stage: int | None = None, *, batch: int = 0) -> Task:
    """Drop: keep of a stage's weights this replica's shard alone, until it gathers them again."""
    return Task("D", None, stage, batch)


def C(stage: int | None = None, *, batch: int = 0) -> Task:
    """Clip a stage's gradients by the norm over all stages; it waits for the gradients of all."""
    return Task("C", None, stage, batch)


def U(stage: int | None = None, *, batch: int = 0) -> Task:
    """Update a stage's parameters from the gradients of the batch."""
    return Task("U", None, stage, batch)
