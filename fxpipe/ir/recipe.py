"""Recipes: named ways to make a Schedule for any number of devices and micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from numbers import Integral
from operator import index
from typing import Any

from fxpipe import views
from fxpipe.errors import InputError, near, told
from fxpipe.extend import find, names, register, there
from fxpipe.ir.schedule import Delay, Edges, Schedule, ordered_copies
from fxpipe.ir.task import Pair, Task, is_task
from fxpipe.torchtools.state import without_collection

Rows = Callable[..., Iterable[Any]]
"""The function that an author writes: ``(device, devices, microbatches)`` → the device's tasks,
perhaps with pairs of them.

With a parameter ``stages`` it also gets the stages that the device holds, in order; with
``placement``, the device of every stage; with ``edges``, the recipe's, or None for a chain.
"""

Placement = Callable[[int], tuple[int | tuple[int, ...], ...]]
"""Number of devices → stage → its device, or a tuple of its device and those of its copies."""

DelayRule = Delay | Callable[[int, int], Delay]
"""A delay, or a function that gives it; see Recipe."""

EdgesRule = Sequence[tuple[int, int]] | Callable[[int, int], Sequence[tuple[int, int]]] | None
"""Which stages feed which, or a function that gives it; see Recipe."""

Frozen = Collection[int | tuple[int, int]]
"""Stages, or pairs of a micro-batch and a stage."""

_TASKS_PER_STAGE_AND_MICROBATCH = 16
_MOST = 10_000_000
_SHOWN = 8


def one_each(devices: int) -> tuple[int, ...]:
    """One stage a device, in order."""
    return tuple(range(devices))


def round_robin(chunks: int) -> Placement:
    """Place ``chunks`` stages on each device: stage s on device s mod p, as Megatron-LM does."""
    if not isinstance(chunks, int) or chunks < 1:
        raise InputError(f"chunks is {chunks!r}; a device holds at least 1 stage")

    def placement(devices: int) -> tuple[int, ...]:
        if devices * chunks > _MOST:
            raise InputError(
                f"chunks is {chunks} for {devices} devices; there may be at most {_MOST} stages"
            )
        return tuple(range(devices)) * chunks

    return placement


def vee(devices: int) -> tuple[int, ...]:
    """Two stages a device, placed as a V: device d holds the stages d and 2p − 1 − d."""
    return (*range(devices), *reversed(range(devices)))


@dataclass(frozen=True)
class Recipe:
    """A named way to make a Schedule for any number of devices and micro-batches.

    Attributes:
        name: the name that ``fxpipe.compile(schedule=...)`` takes.
        tasks: the author's generator.
        delay: how many versions older than the newest the weights are that a batch reads: a number,
            one for each stage, or a function of the numbers of devices and micro-batches that gives
            these.
        placement: the devices of the stages and of their copies.
        microbatches: the only number of micro-batches that it works for, or None for any.
        slices: the parts of each micro-batch's sequence, each with stages of its own; see Schedule.
        edges: which stages feed which, see Schedule, or a function as for ``delay``; by default
            each feeds the next.
        frozen: stages, or pairs of a micro-batch and a stage, whose weight gradients are left out,
            or a function as for ``delay``. Of their tasks, a B becomes an I, and W is dropped.
    """

    name: str
    tasks: Rows
    delay: DelayRule = 0
    placement: Placement = one_each
    microbatches: int | None = None
    slices: int = 1
    edges: EdgesRule = None
    frozen: Frozen | Callable[[int, int], Frozen] = ()

    @without_collection()
    def __call__(self, devices: int, microbatches: int) -> Schedule:
        """Make the schedule, without verifying it.

        Raises:
            InputError: a count is below 1, or the generator fails, does not end, or yields
                something that is not a task.
        """
        for word, count in (("devices", devices), ("microbatches", microbatches)):
            if not isinstance(count, Integral):
                raise InputError(f"{word} is {count!r}; give a whole number")
            if count < 1:
                raise InputError(f"{word} is {count!r}; a schedule needs at least 1")
        devices, microbatches = int(devices), int(microbatches)
        if devices * microbatches > _MOST:
            raise InputError(
                f"devices is {devices} and microbatches is {microbatches}; a schedule is made for "
                f"at most {_MOST} forwards"
            )
        places = self._places(devices)
        if len(places) * microbatches > _MOST:
            raise InputError(
                f"the placement of schedule {self.name!r} gives {len(places)} stages or more, and "
                f"microbatches is {microbatches}; a schedule is made for at most {_MOST} forwards"
            )
        counts = devices, microbatches
        each = "one, such as 1, a tuple with one for each stage"
        delay = self._given("delay", counts, _delay, "whole number", each)
        edges = self._given("edges", counts, _edges, "pairs of stages", "some, as ((0, 2), (1, 2))")
        each = "some, as [0], pairs of a micro-batch and a stage, as [(1, 0)]"
        frozen = self._given("frozen", counts, partial(_frozen, microbatches), "stages", each)
        placement, copies = tuple(at[0] for at in places), tuple(at[1:] for at in places)
        rows: list[tuple[Task, ...]] = []
        paired: set[Task] = set()
        for device in range(devices):
            held = [stage for stage, at in enumerate(places) if device in at]
            offered = {"stages": tuple(held), "placement": placement, "edges": edges}
            tasks = self._tasks(device, devices, microbatches, offered)
            row: list[Task] = []
            for task, second in self._row(device, microbatches, held, tasks):
                if task.kind in "BW" and (task.microbatch, task.stage) in frozen:
                    row += [replace(task, kind="I")] if task.kind == "B" else []
                    continue
                row.append(task)
                if second:
                    paired.add(task)
            rows.append(tuple(row))
        return Schedule(
            self.name,
            microbatches,
            placement,
            tuple(rows),
            delay,
            copies,
            frozenset(paired),
            self.slices,
            edges,
            frozen,
        )

    formulas = views.recipe_formulas

    def placed(self, placement: Placement) -> Recipe:
        """The same recipe over another placement, such as ``round_robin(4)``."""
        return replace(self, placement=placement)

    def delayed(self, delay: DelayRule) -> Recipe:
        """The same recipe with another delay."""
        return replace(self, delay=delay)

    def stages(self, devices: int) -> int:
        """The number of stages of its schedules."""
        return len(self.place(devices))

    def place(self, devices: int) -> tuple[int, ...]:
        """Stage → its own device."""
        return tuple(at[0] for at in self._places(devices))

    def copies(self, devices: int) -> tuple[tuple[int, ...], ...]:
        """Stage → the devices of its copies."""
        return ordered_copies(tuple(at[1:] for at in self._places(devices)))

    def _places(self, devices: int) -> list[tuple[int, ...]]:
        """Stage → its own device, and those of its copies."""
        try:
            return [
                (index(at[0]), *map(index, at[1:])) if isinstance(at, tuple) else (index(at),)
                for at in islice(self.placement(devices), _MOST + 1)
            ]
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"schedule {self.name!r}: its placement is {self.placement!r}, which gives no "
                f"device for each stage of {devices} devices ({told(error)}); give a function of "
                "their number, such as lambda devices: tuple(range(devices))"
            ) from error

    def _given(
        self, name: str, counts: tuple[int, int], plain: Callable[[Any], Any], what: str, cure: str
    ) -> Any:
        """What a field, or the function that it is, gives for these counts, in plain integers."""
        rule = getattr(self, name)
        try:
            return plain(rule(*counts) if callable(rule) else rule)
        except Exception as error:
            raise InputError(
                f"schedule {self.name!r}: {name}={rule!r} gives no {what} ({told(error)}); give "
                f"{cure}, or a function of the numbers of devices and micro-batches that does"
            ) from error

    def _row(
        self, device: int, microbatches: int, held: list[int], tasks: Iterable[Task | Pair]
    ) -> Iterator[tuple[Task, bool]]:
        """Check the tasks of a device that holds some stages, and give each its stage. Yields each
        and whether it is the second of a pair."""
        bound = _TASKS_PER_STAGE_AND_MICROBATCH * (microbatches + 1) * max(len(held), 1)
        where = f"schedule {self.name!r}, device {device}, position"
        flat = (
            (task, bool(number))
            for given in tasks
            for number, task in enumerate(given if isinstance(given, Pair) else (given,))
        )
        for position, (task, second) in enumerate(flat):
            if position == bound:
                raise InputError(
                    f"{where} {position}: more than {bound} tasks for {microbatches} "
                    "micro-batches; let the generator end"
                )
            if not is_task(task):
                raise InputError(
                    f"{where} {position}: got {task!r}; yield tasks such as F(0), B(0) or U()"
                )
            if task.stage is not None:
                yield task, second
            elif len(held) == 1:
                yield Task(task.kind, task.microbatch, held[0], task.batch), second
            elif not held:
                raise InputError(
                    f"{where} {position}: {task} runs on a device to which the placement gives no "
                    "stage; give a placement that gives each device a stage, or fewer devices"
                )
            else:
                some = ", ".join(map(str, held[:_SHOWN])) + (", …" if len(held) > _SHOWN else "")
                which = "" if task.microbatch is None else f"{task.microbatch}, "
                raise InputError(
                    f"{where} {position}: {task} names no stage and the device holds "
                    f"{len(held)}: {some}; name one, such as {task.kind}({which}{held[0]})"
                )

    def _tasks(
        self, device: int, devices: int, microbatches: int, offered: Mapping[str, Any]
    ) -> Iterator[Task | Pair]:
        """Run the author's function, with what it asks for of what is offered; an error in it is
        raised as an InputError that names it."""
        try:
            asked = [*inspect.signature(self.tasks).parameters][3:]
            keywords = {name: offered[name] for name in asked if name in offered}
            yield from self.tasks(device, devices, microbatches, **keywords)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"schedule {self.name!r} fails for device {device} of {devices} and "
                f"{microbatches} micro-batches ({told(error)}); let the function "
                "(device, devices, microbatches) yield tasks such as F(0), B(0) or U()"
            ) from error


def fixed(schedule: Schedule) -> Recipe:
    """The recipe that makes this one schedule."""
    return Recipe(
        schedule.name,
        lambda device, devices, microbatches: [
            Pair(*unit) if len(unit) > 1 else unit[0] for unit in schedule.units(device)
        ],
        schedule.delay,
        lambda devices: tuple(map(schedule.devices_of, range(schedule.stages))),
        schedule.microbatches,
        schedule.slices,
        schedule.edges,
        schedule.frozen,
    )


def _delay(given: Any) -> Delay:
    return tuple(map(index, given)) if isinstance(given, Sequence) else index(given)


def _edges(given: Any) -> Edges | None:
    return None if given is None else tuple((index(a), index(b)) for a, b in given)


def _frozen(microbatches: int, given: Any) -> frozenset[tuple[int, int]]:
    every = ((i, each) for each in given for i in range(microbatches))
    pairs = (each if isinstance(each, tuple) else (i, each) for i, each in every)
    return frozenset((index(i), index(stage)) for i, stage in pairs)


class Recipes(Mapping[str, Recipe]):
    """Every registered recipe by name, but for those of extensions that are not there; each is
    imported when it is first asked for. ``fxpipe.schedules`` registers the library's own."""

    def __getitem__(self, name: str) -> Recipe:
        if not there("recipe", name):
            raise KeyError(name)
        recipe: Recipe = find("recipe", name)
        return recipe

    def __iter__(self) -> Iterator[str]:
        return (name for name in names("recipe") if there("recipe", name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all, whether their extensions are there or not."""
        return names("recipe")


RECIPES = Recipes()


def enter(recipe: Recipe) -> Recipe:
    """Register a recipe under its name, in place of an earlier one, and return it. Raises
    InputError if that is the library's, unless this one is, too."""
    name = recipe.name
    if not _ours(recipe) and name in RECIPES and _ours(RECIPES[name]):
        raise InputError(f"{name!r} is a schedule of the library; give yours another name")
    register("recipe", name, recipe)
    return recipe


def _ours(recipe: Recipe) -> bool:
    """Whether a recipe is the library's own."""
    return str(getattr(recipe.tasks, "__module__", "")).startswith("fxpipe.")


def schedule(
    name: str,
    *,
    delay: DelayRule = 0,
    placement: Placement = one_each,
    slices: int = 1,
    edges: EdgesRule = None,
) -> Callable[[Rows], Recipe]:
    """Decorator: register a generator of tasks as the recipe ``name``.

    Registering a name of yours again replaces it, so that a notebook cell can be run twice.

    Args:
        name: the name that ``fxpipe.compile(schedule=...)`` takes.
        delay: how many versions behind the newest the weights are that a batch reads, such as 1;
            see Recipe.
        placement: number of devices → for each stage its device, or, if it has copies, a tuple of
            its own device and theirs.
        slices: the parts of each micro-batch's sequence; the placement then gives the stages of
            one slice after the other, such as ``round_robin(slices)``. See Schedule.
        edges: which stages feed which, such as ((0, 2), (1, 2)), or a function as for ``delay``;
            by default each feeds the next. See Schedule.

    Raises:
        InputError: the name is not a text, or that of a schedule of the library.
    """
    if not isinstance(name, str):
        raise InputError(
            f"a schedule's name is {name!r}; give a text, such as "
            '@fxpipe.schedule("mine") above the generator'
        )

    return lambda tasks: enter(Recipe(name, tasks, delay, placement, slices=slices, edges=edges))


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises InputError, with similar names, if there is none."""
    if name not in RECIPES.known:
        raise InputError(f"there is no schedule {name!r:.99}: {near(name, RECIPES)}")
    recipe: Recipe = find("recipe", name, f"schedule {name!r}")
    return recipe
