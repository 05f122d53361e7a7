"""``search_schedule``: find a fast schedule for given times and memory, and bound its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from random import Random
from time import perf_counter

from fxpipe import schedules
from fxpipe.errors import FxpipeError, InputError
from fxpipe.extensions.search.bounds import best_bound
from fxpipe.extensions.search.local import Local, improve
from fxpipe.extensions.search.problem import Order, Problem
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.timing import fits, peaks_of_order, value_of
from fxpipe.extensions.simulator.costs import Costs, Links, measured_costs
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir.plan import Plan
from fxpipe.ir.recipe import Placement, Recipe
from fxpipe.ir.schedule import Schedule

_LISTED = 0.5
"""The most of the time that list schedules take, if swaps follow."""

_SWAPPED = 1_000_000
"""With more pairs of tasks to order, swaps get only the time that list schedules leave. Ten times
as many where devices hold several stages, for which list schedules are worse."""

_TIGHTENED = 6
"""How often the memory is reduced, at most, until a simulation fits."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        schedule: the best schedule.
        value: the time of one step or, without flush, of each of many steps.
        bound: the time below which no schedule of any searched placement can be.
        problem: the times, placement and memory for which the schedule was found.
        library: name of each library schedule that solves the problem and fits → its time.
    """

    schedule: Schedule
    value: float
    bound: float
    problem: Problem
    library: Mapping[str, float]

    @property
    def gap(self) -> float:
        """How far the schedule is above the bound, as a share of the bound; 0 if it is optimal."""
        above = self.value - self.bound
        return above / self.bound if above > 1e-9 * self.value else 0.0

    def __str__(self) -> str:
        what = "a step" if self.problem.flush else "each of many steps"
        gap = f"within {100 * self.gap:.2g}% of the best" if self.gap else "optimal"
        return f"{what} takes {self.value:.6g}; none takes less than {self.bound:.6g} ({gap})"


def search_schedule(
    costs: Costs | Plan,
    microbatches: int,
    *,
    devices: int | None = None,
    placement: Sequence[int] | Placement | None = None,
    whole: bool | None = None,
    memory: float | Sequence[float] | None = None,
    sizes: Sizes | None = None,
    links: Links | None = None,
    flush: bool = True,
    seconds: float = 10.0,
    work: int | None = None,
    seed: int = 0,
) -> Found:
    """Search for the schedule that takes the least time, and for a bound that tells how good it is.

    Library schedules that fit are among the candidates, so none of them is faster than the result.

    Args:
        costs: letter of a kind of task, or (letter, stage) → time, as for ``simulate``. If there is
            no "B", it takes as long as its halves. Or the plan of a pipe whose stages were
            measured.
        microbatches: how many a step has.
        devices: how many there are; by default one for each stage that ``costs`` names.
        placement: the device of each stage, or a function such as ``fxpipe.vee``. By default each
            device has one stage; if there are more stages than devices, round robin, the V and
            neighbours together are tried.
        whole: True for backwards in one piece, False for their halves, None for whichever of the
            two ``costs`` names, or for both.
        memory: the most that each device may hold, one number or one for each device: in bytes if
            there are ``sizes``, otherwise in micro-batches from their forward to their last task,
            as ``Schedule.kept`` counts.
        sizes: bytes of what devices hold. The schedule keeps to the limits in a simulation with
            these sizes; the bound counts only what forwards and input gradients leave behind.
        links: the latency and bandwidth of the links between devices, as for ``simulate``.
            Transfers do not wait for one another.
        flush: whether to minimize the time of one step, from its first task to its last. If False,
            batches overlap, and the time of each of many steps is minimized: a device begins the
            next step as soon as it is done with one, and reads weights that are one version old
            (delay 1). Batches do not mix on a device, as they do in 2bw.
        seconds: the time limit. The search ends earlier if the schedule is proven optimal.
        work: instead of ``seconds``, how many list schedules to try (and swaps in proportion), so
            that the result is the same on every machine.
        seed: of the random choices.

    Raises:
        InputError: an argument is not valid, or a micro-batch does not fit into the memory.
    """
    started = perf_counter()
    for word, flag in (("flush", flush), ("whole", whole or False)):
        if not isinstance(flag, bool):
            raise InputError(f"{word} is {flag!r}; give True or False")
    for word, budgeted in (("seconds", seconds), ("work", 1 if work is None else work)):
        if not isinstance(budgeted, Real) or not 0 < budgeted < inf:
            raise InputError(f"{word} is {budgeted!r}; give a number above 0")
    if not isinstance(seed, int):
        raise InputError(f"seed is {seed!r}; give a whole number")
    if isinstance(costs, Plan):
        costs = measured_costs(costs)
        if not costs:
            raise InputError("the plan's stages were not measured; give costs={letter: time}")
    given = Given(costs, microbatches, devices, placement, whole, memory, sizes, links, flush)
    ends = inf if work is not None else started + seconds
    results = _search_each(problems_of(given), given, _Budget(ends, work, seed))
    best = min(results, key=lambda result: result.value)
    return replace(best, bound=min(result.bound for result in results))


@dataclass(frozen=True)
class _Budget:
    """The limits of a search: when it ends, or how many list schedules it makes."""

    ends: float
    work: int | None
    seed: int

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.ends - perf_counter()

    def part(self, parts: float) -> _Budget:
        """One of so many equal parts of what is left."""
        if self.work is not None:
            return replace(self, work=max(1, int(self.work / parts)))
        now = perf_counter()
        return replace(self, ends=now + max(0.0, self.ends - now) / parts)


def _search_each(problems: Sequence[Problem], given: Given, budget: _Budget) -> list[Found]:
    """Search problems, and return the results of those for which a schedule fits.

    Raises:
        InputError: none does.
    """
    results, refused = [], []
    for at, problem in enumerate(problems):
        # the work is for each; the time, for all
        share = budget if budget.work is not None else budget.part(len(problems) - at)
        try:
            results.append(_search(problem, given, share))
        except InputError as error:  # it needs more memory in a simulation
            refused.append(error)
    if not results:
        raise refused[0]
    return results


class _Limits:
    """The bytes of orders in simulations, against what the devices may hold."""

    def __init__(self, problem: Problem, given: Given) -> None:
        self._problem, self._given = problem, given
        sizes = given.sizes if given.memory is not None else None
        # the problem itself counts what forwards save, and what waits for weight gradients
        if sizes is not None:
            counted = Sizes(saved=sizes.saved, deferred=sizes.deferred)
            sizes = None if sizes == counted else sizes
        self._sizes = sizes
        self._most = given.limits(problem.devices)
        self._over: dict[Order, tuple[float, ...]] = {}

    @property
    def simulated(self) -> bool:
        """Whether orders that fit the problem may not fit a simulation."""
        return self._sizes is not None

    def over(self, order: Order) -> tuple[float, ...]:
        """Device → by how many bytes it is above its limit."""
        if self._sizes is None:
            return (0.0,)
        if order not in self._over:
            given, steps = self._given, 1 if self._problem.flush else None
            schedule = self._problem.schedule_of(order)
            ran = schedule.simulate(given.costs, links=given.links, sizes=self._sizes, steps=steps)
            held = zip(ran.memory, self._most, strict=True)
            self._over[order] = tuple(max(0.0, each.peak - most) for each, most in held)
        return self._over[order]

    def fitting(self, order: Order) -> bool:
        return not any(self.over(order))


def _search(problem: Problem, given: Given, budget: _Budget) -> Found:
    """Search one problem. What is faster than the best schedule, and does not fit in a simulation,
    is ruled out by less memory, and the search goes on."""
    bound, limits = best_bound(problem), _Limits(problem, given)
    library, tight = library_orders(problem), problem
    times = {name: time for name, (time, order) in library.items() if limits.fitting(order)}
    known = [*library.values()]
    best: tuple[float, Order] | None = None
    for left in range(_TIGHTENED - 1, -1, -1):
        # half of the time that is left, as the first schedule mostly fits
        share = budget.part(2 if left and limits.simulated else 1)
        least = bound if tight is problem else best_bound(tight)
        local = _solve(tight, least, share, known, limits.fitting)
        if local.best is not None and (best is None or local.value < best[0]):
            best = local.value, local.best
        if local.refused is None or (best is not None and local.refused[0] >= best[0]):
            break
        memory = _less_memory(tight, local.refused[1], limits)
        if memory == tight.memory or (budget.work is None and budget.left <= 0):
            break
        tight = replace(tight, memory=memory)
        known = [*known, best] if best is not None else known
    if best is not None:
        value, order = best
        return Found(problem.schedule_of(order), value, bound, problem, times)
    assert local.refused is not None
    over = limits.over(local.refused[1])
    device = max(range(problem.devices), key=over.__getitem__)
    raise InputError(
        f"device {device} holds {over[device]:g} bytes more than it may with every schedule that "
        "was tried; allow more memory, recompute, or cut the model elsewhere"
    )


def _less_memory(problem: Problem, order: Order, limits: _Limits) -> tuple[float, ...]:
    """Device → its memory, less where an order that fits the problem does not fit the limits."""
    kept = zip(
        problem.memory,
        peaks_of_order(problem, order),
        limits.over(order),
        problem.least_memory,
        strict=True,
    )
    return tuple(
        max(least, min(most, peak - more)) if more else most for most, peak, more, least in kept
    )


def _solve(
    problem: Problem,
    bound: float,
    budget: _Budget,
    known: Sequence[tuple[float, Order]],
    fitting: Callable[[Order], bool],
) -> Local:
    """Search with list schedules, and then with swaps.

    Args:
        problem: the problem.
        bound: a bound for it.
        budget: how long to search.
        known: times and orders to start from.
        fitting: whether an order fits into memory, besides what the problem knows of it.
    """
    started = perf_counter()
    local = Local(problem, Random(budget.seed), fitting)
    for value, candidate in known:
        if fits(problem, candidate):
            local.offer(value, candidate)
    several = any(len(stages) > 1 for stages in problem.held)
    swapped = _pairs(problem) <= _SWAPPED * (10 if several else 1)

    def lasting(share: float) -> Callable[[], bool]:
        if budget.work is not None:
            most = share * budget.work
            return lambda: local.passes < most
        until = started + share * (budget.ends - started)
        return lambda: perf_counter() < until

    enough = bound * (1 + 1e-12)
    local.run(enough, lasting(_LISTED if swapped else 1.0), lasting(1.0))
    if local.best is not None:
        local.offer(value_of(problem, local.best), local.best)
    if swapped or lasting(1.0)():
        improve(local, enough, lasting(1.0))
    return local


def _pairs(problem: Problem) -> int:
    """How many pairs of tasks there are to order."""
    kinds = 2 if problem.whole else 3
    pairs = [kinds * len(held) * (kinds * len(held) - 1) // 2 for held in problem.held]
    return sum(pairs) * problem.microbatches**2


def library_orders(problem: Problem) -> dict[str, tuple[float, Order]]:
    """Name of a library schedule → its time and order, for those that fit.

    Backwards are split into halves, or halves put together, as the problem asks.
    """
    found: dict[str, tuple[float, Order]] = {}
    for name, recipe in sorted({recipe.name: recipe for recipe in schedules.library()}.items()):
        order = _order(problem, recipe)
        if order is not None and (value := value_of(problem, order)) < inf:
            found[name] = value, order
    return found


def _order(problem: Problem, recipe: Recipe) -> Order | None:
    """The order of a recipe's schedule; None if it solves another problem: with stages elsewhere,
    older weights, batches that mix on a device, or other tasks."""
    try:
        if recipe.place(problem.devices) != problem.placement or recipe.copies(problem.devices):
            return None
        schedule = recipe(problem.devices, problem.microbatches)
        older = max(schedule.delays) > (not problem.flush)
        if older or schedule.depth or not schedule.trains or "R" in schedule.kinds:
            return None
        return problem.order_of(schedule)
    except FxpipeError:
        return None  # it is for other numbers of devices or micro-batches
