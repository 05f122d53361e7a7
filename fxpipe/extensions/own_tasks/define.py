"""Define kinds of tasks of your own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Real

from fxpipe.errors import InputError
from fxpipe.extensions.own_tasks.opcodes import OwnKind, TaskContext, made
from fxpipe.ir.task import BUILT_IN, KINDS, Task

_READABLE = ("gradients", "parameters")
_WRITABLE = ("gradients",)


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
        ("reads", reads, _READABLE),
        ("writes", writes, _WRITABLE),
    ):
        if word != "follows" and not isinstance(given, tuple | list):
            raise InputError(f"{what}: {word} is {given!r}; give a tuple, such as ('gradients',)")
        for item in given:
            if item not in known:
                raise InputError(f"{what}: {word} names {item!r}; name some of {', '.join(known)}")
    KINDS[letter] = OwnKind(
        letter,
        name,
        per_microbatch,
        follows,
        cost=cost,
        reads=(*dict.fromkeys((*reads, *writes)),),
        make=partial(made, letter),
        writes=tuple(writes),
        run=run,
    )
    if per_microbatch:
        return lambda microbatch, stage=None, *, batch=0: Task(letter, microbatch, stage, batch)
    return lambda stage=None, *, batch=0: Task(letter, None, stage, batch)
