"""Tasks: the pieces of compute that a schedule orders, and the kinds of them.

The set of kinds is open: ``define_task`` adds a user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, NamedTuple

from fxpipe.errors import InputError
from fxpipe.ir.value import batch_mark

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[str, int | None, int]
"""Kind, micro-batch and stage: one task of every batch. An A on a copy of a stage has the copy's
device for a micro-batch."""

READABLE = ("gradients", "parameters")
"""What a task of a user's own may read of its stage."""

WRITABLE = ("gradients",)
"""What a task of a user's own may change in place; what it changes it can also read."""


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
        reads: for a user's own kind, which of READABLE it reads.
        writes: for a user's own kind, which of WRITABLE it changes.
        run: for a user's own kind, the function that it runs.
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
    writes: tuple[str, ...] = ()
    run: Callable[[TaskContext], None] | None = None


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


def define_task(
    letter: str,
    name: str,
    *,
    run: Callable[[TaskContext], None],
    cost: float | None = None,
    per_microbatch: bool = False,
    follows: str = "",
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
) -> Callable[..., Task]:
    """Define a kind of task of your own, and return the function that makes its tasks.

    Args:
        letter: a capital letter that no built-in kind has; defining yours again replaces it.
        name: its name in messages, pictures and traces.
        run: the function that it runs on its device.
        cost: the time that it takes where nothing is measured; a forward takes 1.
        per_microbatch: True for a task for each micro-batch, False for one a step and stage.
        follows: letters of the tasks of the same stage that come before it.
        reads: what ``run`` reads: "gradients", "parameters" or both.
        writes: "gradients" if ``run`` changes them in place.

    Returns:
        For a task once a step, ``task(stage=None, *, batch=0)``; for one of a micro-batch,
        ``task(microbatch, stage=None, *, batch=0)``.

    Raises:
        InputError: the letter is taken or invalid, the cost is missing or negative, or ``follows``,
            ``reads`` or ``writes`` name something unknown.
    """
    what = f"task {name!r}"
    if not isinstance(letter, str) or len(letter) != 1 or not ("A" <= letter <= "Z"):
        raise InputError(f"{what}: its letter is {letter!r}; give one capital letter, A to Z")
    if letter in BUILT_IN:
        raise InputError(f"{what}: {letter!r} is the letter of {KINDS[letter].name}; take another")
    if not isinstance(name, str):
        raise InputError(f"{what}: give its name as a text")
    if cost is None:
        raise InputError(f"{what} has no cost; give cost=, in the unit in which a forward takes 1")
    if not isinstance(cost, Real) or not 0 <= cost < float("inf"):
        raise InputError(f"{what}: its cost is {cost!r}; give a time of at least 0")
    if not callable(run):
        raise InputError(f"{what}: run is {run!r}; give a function of a TaskContext")
    if not isinstance(follows, str):
        raise InputError(f"{what}: follows is {follows!r}; give letters of tasks, such as 'BW'")
    for word, given, known in (
        ("follows", follows, tuple(KINDS)),
        ("reads", reads, READABLE),
        ("writes", writes, WRITABLE),
    ):
        if word != "follows" and not isinstance(given, tuple | list):
            raise InputError(f"{what}: {word} is {given!r}; give a tuple, such as ('gradients',)")
        for item in given:
            if item not in known:
                raise InputError(f"{what}: {word} names {item!r}; name some of {', '.join(known)}")
    KINDS[letter] = TaskKind(
        letter, name, per_microbatch, follows, cost=cost, reads=reads, writes=writes, run=run
    )
    if per_microbatch:
        return lambda microbatch, stage=None, *, batch=0: Task(letter, microbatch, stage, batch)
    return lambda stage=None, *, batch=0: Task(letter, None, stage, batch)
