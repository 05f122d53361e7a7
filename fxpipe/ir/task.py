"""Tasks: the pieces of compute that a schedule orders, and the kinds of them.

The set of kinds is open: ``define_task`` adds a user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING

from fxpipe.errors import InputError
from fxpipe.ir.value import batch_mark

if TYPE_CHECKING:
    from torch import Tensor

READABLE = ("gradients", "parameters")
"""What a user's own task may read of its stage."""

WRITABLE = ("gradients",)
"""What a user's own task may change of its stage, in place; it is given that, too."""


@dataclass(frozen=True)
class TaskContext:
    """What a user's own task is given when it runs.

    What the kind reads and does not write are copies. To change one of them is an error, and so is
    to put another tensor in the place of one: gradients are changed in place.

    Attributes:
        stage: its stage.
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
        follows: letters of the tasks of the same stage and micro-batch that come before it (of
            all micro-batches, for a task once a step); one that the schedule does not hold does
            not count.
        previous: letters of the tasks of the stage before, for the same micro-batch, one of which
            brings what it reads.
        next: the same of the stage behind.
        gathers: letters of the tasks of all stages, for all micro-batches, that come before it: a
            collective waits for every stage.
        cost: the time that it takes where nothing is measured; a forward takes 1.
        reads: of READABLE, for a user's own kind.
        writes: of WRITABLE, for a user's own kind.
        run: what a user's own kind does.
    """

    letter: str
    name: str
    per_microbatch: bool = True
    follows: str = ""
    previous: str = ""
    next: str = ""
    gathers: str = ""
    cost: float = 1.0
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
        TaskKind("A", "reduce", per_microbatch=False, follows="BW", cost=0.1),
        TaskKind("C", "clip", per_microbatch=False, gathers="BWA", cost=0.1),
        TaskKind("U", "update", per_microbatch=False, follows="FBIWRAC", cost=0.5),
    )
}
"""Letter → kind, in the order of tables and legends."""

BUILT_IN = frozenset(KINDS)

BESIDE = "OP"
"""The letters of tasks that run beside the others of their device, which only begin them."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of compute: a kind, a micro-batch and a stage.

    Attributes:
        kind: a letter of KINDS.
        microbatch: index in its batch, from 0; None for a task once a step.
        stage: the stage; None while an author leaves it out, never None in a Schedule.
        batch: 0 for this step's batch, −1 for the one before it, and so on.
    """

    kind: str
    microbatch: int | None = None
    stage: int | None = None
    batch: int = 0

    def __str__(self) -> str:
        index = "" if self.microbatch is None else str(self.microbatch)
        at = "" if self.stage is None else f"@{self.stage}"
        # A later batch than this step's is always wrong, and has no text that can be parsed.
        return f"{self.kind}{index}{batch_mark(self.batch)}{at}"


def is_task(value: object) -> bool:
    """Whether it is a task whose kind is a text, with whole numbers where it has some."""
    if not isinstance(value, Task) or not isinstance(value.kind, str):
        return False
    if type(value.microbatch) is type(value.stage) is type(value.batch) is int:
        return True  # nearly all are
    numbers = [each for each in (value.microbatch, value.stage) if each is not None]
    return all(isinstance(number, Integral) for number in (value.batch, *numbers))


def F(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Forward of a micro-batch; the stage may be left out where the device holds one."""
    return Task("F", microbatch, stage, batch)


def B(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Backward of a micro-batch: input and weight gradients."""
    return Task("B", microbatch, stage, batch)


def I(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:  # noqa: E743
    """The half of a backward that the stage before waits for: the gradients of the inputs."""
    return Task("I", microbatch, stage, batch)


def W(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """The other half, which nobody waits for but the update: the gradients of the weights."""
    return Task("W", microbatch, stage, batch)


def R(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Recompute: run the forward again, of which only the inputs were kept, before a backward."""
    return Task("R", microbatch, stage, batch)


def O(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:  # noqa: E743
    """Offload: begin to store what the stage keeps, outside of the device's memory; with an R these
    are its inputs."""
    return Task("O", microbatch, stage, batch)


def P(microbatch: int, stage: int | None = None, *, batch: int = 0) -> Task:
    """Prefetch: begin to bring back what was stored. The backward, or R, waits for it."""
    return Task("P", microbatch, stage, batch)


def A(stage: int | None = None, *, batch: int = 0) -> Task:
    """Begin to sum a stage's gradients over the replicas; what needs the sums waits for them."""
    return Task("A", None, stage, batch)


def C(stage: int | None = None, *, batch: int = 0) -> Task:
    """Clip a stage's gradients by the norm of those of all stages, for which it waits."""
    return Task("C", None, stage, batch)


def U(stage: int | None = None, *, batch: int = 0) -> Task:
    """Update of a stage's parameters from the gradients of the batch."""
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
    """Add a kind of task of your own, and get the function that makes its tasks.

    Args:
        letter: a capital letter that is not taken; defining one's own letter again replaces it.
        name: its name in messages, pictures and traces.
        run: what it does on its device.
        cost: the time that it takes where nothing is measured; a forward takes 1.
        per_microbatch: whether it comes for a micro-batch, or once a step and stage.
        follows: letters of the tasks of the same stage that come before it.
        reads: "gradients" and "parameters", whichever ``run`` looks at.
        writes: "gradients" where ``run`` changes them in place.

    Returns:
        For a task once a step, ``task(stage=None, *, batch=0)``; for one of a micro-batch,
        ``task(microbatch, stage=None, *, batch=0)``.

    Raises:
        InputError: the letter is taken or is none, the cost is missing or negative, or ``follows``,
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
