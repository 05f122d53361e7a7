"""``search_schedule``: find a fast schedule for given times and memory, and bound its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from random import Random
from time import perf_counter

import fxpipe.schedules
from fxpipe.errors import FxpipeError, InputError
from fxpipe.extensions.search import exact as solver
from fxpipe.extensions.search import swaps
from fxpipe.extensions.search.bounds import Bound, best_bound
from fxpipe.extensions.search.certificate import Certificate, gap_of
from fxpipe.extensions.search.local import Local, search_of
from fxpipe.extensions.search.placing import best_placements, spread_bound
from fxpipe.extensions.search.problem import Order, Problem
from fxpipe.extensions.search.read import Given, apart, problems_of
from fxpipe.extensions.search.timing import Timeline, fits, peaks, value_of
from fxpipe.extensions.simulator.costs import Costs, Links, measured_costs
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir.plan import Plan
from fxpipe.ir.recipe import Placement, Recipe
from fxpipe.ir.schedule import Schedule

_FIRST = 0.2, 0.1
"""Share of the time for list schedules, if only swaps follow, and if the solver does, too."""

_GIVEN = 0.5, 0.15
"""The same for the list schedules by fixed rules, which are the first; in a short or large search
they may need more than the share for all."""

_SWAPPED = 1_000_000
"""No swaps follow with more pairs of tasks to order: there is no time for enough of them. Ten times
as many where devices hold several stages, for which list schedules are worse."""

_THEN = 0.3, 0.7
"""If the solver follows: the share of the time after which swaps end, and after which windows
end."""

_QUICK = 10_000
"""Windows are used only with more pairs of tasks to order, which take the solver long."""

_MODELLED = 10_000
"""Pairs of tasks to order that are put into the solver's model in a second, about; where less time
is left, there is no model."""

_WORTH = 100
"""List schedules that count as much as a second of the solver's deterministic time."""

_FINALISTS = 2
"""If the placement is searched: placements whose schedules are searched in the end."""

_TIGHTENED = 6
"""How often the memory is reduced, at most, until a simulation fits."""


Library = dict[str, tuple[float, Order] | str]
"""Name of a library schedule → its time and order, or why it has none."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        schedule: the best schedule.
        certificate: its time, and a bound for its placement.
        others: the certificates of the other placements, and of whole backwards beside halves, if
            these were searched, too. With ``placement="search"``, ``certificate`` has a bound for
            all placements, and the one for the schedule's own placement is here.
        library: name of each library schedule → its time under the same costs, or why it cannot be
            compared.
    """

    schedule: Schedule
    certificate: Certificate
    others: tuple[Certificate, ...]
    library: Mapping[str, float | str]

    @property
    def value(self) -> float:
        """The time of one step or, without flush, of each of many steps."""
        return self.certificate.value

    @property
    def bound(self) -> float:
        """The time below which no schedule of any searched problem can be."""
        every = (self.certificate, *self.others)
        wide = [certificate for certificate in every if certificate.wide is not None]
        return min(certificate.bound.time for certificate in wide or every)

    @property
    def gap(self) -> float:
        """How far the schedule is above the bound, as a share of the bound."""
        return gap_of(self.value, self.bound)

    def __str__(self) -> str:
        return str(self.certificate)


def search_schedule(
    costs: Costs | Plan,
    microbatches: int,
    *,
    devices: int | None = None,
    placement: Sequence[int] | Placement | str | None = None,
    whole: bool | None = None,
    memory: float | Sequence[float] | None = None,
    sizes: Sizes | None = None,
    links: Links | None = None,
    flush: bool = True,
    delay: int = 0,
    seconds: float = 10.0,
    work: int | None = None,
    seed: int = 0,
    exact: bool | None = None,
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
            neighbours together are tried. "search" tries all ways to put the stages on the devices
            that leave none empty, and gives a bound that holds for all of them.
        whole: True for backwards in one piece, False for their halves, None for whichever of the
            two ``costs`` names, or for both.
        memory: the most that each device may hold, one number or one for each device: in bytes if
            there are ``sizes``, otherwise in micro-batches from their forward to their last task,
            as ``Schedule.stash`` counts.
        sizes: bytes of what devices hold. The schedule keeps to the limits in a simulation with
            these sizes; the bound counts only what forwards and input gradients leave behind.
        links: the latency and bandwidth of the links between devices, as for ``simulate``.
            Transfers do not wait for one another.
        flush: whether to minimize the time of one step, from its first task to its last. If False,
            batches overlap, and the time of each of many steps is minimized: a device begins the
            next step as soon as it is done with one, and reads weights that are one version old
            (delay 1). Batches do not mix on a device, as they do in 2bw: see ``delay``.
        delay: at least 1 for schedules without flush whose batches may mix on a device: how many
            versions old the weights that a batch reads may be at most. The time of a batch, once
            many have run, is minimized. The schedule has the smallest delay that it needs.
        seconds: the time limit. The search ends earlier if the schedule is proven optimal.
        work: instead of ``seconds``, how many list schedules to try (and swaps and the solver's
            effort in proportion), so that the result is the same on every machine.
        seed: of the random choices.
        exact: whether to use CP-SAT, which ``pip install fxpipe[search]`` installs; by default
            it is used if it is installed.

    Raises:
        InputError: an argument is not valid, or a micro-batch does not fit into the memory.
    """
    started = perf_counter()
    for word, flag in (("flush", flush), ("whole", whole or False), ("exact", exact or False)):
        if not isinstance(flag, bool):
            raise InputError(f"{word} is {flag!r}; give True or False")
    if exact and not solver.available():
        raise InputError("exact=True needs ortools; pip install fxpipe[search], or leave it out")
    for word, budgeted in (("seconds", seconds), ("work", 1 if work is None else work)):
        if not isinstance(budgeted, Real) or not 0 < budgeted < inf:
            raise InputError(f"{word} is {budgeted!r}; give a number above 0")
    if not isinstance(seed, int):
        raise InputError(f"seed is {seed!r}; give a whole number")
    if isinstance(costs, Plan):
        costs = measured_costs(costs)
        if not costs:
            raise InputError("the plan's stages were not measured; give costs={letter: time}")
    given = Given(
        costs, microbatches, devices, placement, whole, memory, sizes, links, flush, delay
    )
    ends = inf if work is not None else started + seconds
    budget = _Budget(ends, work, seed, solver.available() if exact is None else exact)
    if isinstance(placement, str) and placement == "search":
        results = _search_placements(given, budget)
    else:
        results = _search_each(problems_of(given), given, budget)
    best, library = min(results, key=lambda result: result[0].value)
    times = {name: entry if isinstance(entry, str) else entry[0] for name, entry in library.items()}
    others = tuple(certificate for certificate, _ in results if certificate is not best)
    return Found(best.schedule, best, others, times)


@dataclass(frozen=True)
class _Budget:
    """The limits of a search: when it ends, or how many list schedules it makes."""

    ends: float
    work: int | None
    seed: int
    exact: bool

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


Result = tuple[Certificate, Library]


def _search_each(problems: Sequence[Problem], given: Given, budget: _Budget) -> list[Result]:
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


def _search_placements(given: Given, budget: _Budget) -> list[Result]:
    """Search placements for half of the time, and schedules for the best ones in the rest."""
    _, devices = given.counts
    bounds = {}
    for wide in apart(given):
        pair = best_bound(wide), spread_bound(wide, devices)
        bounds[wide] = max(pair, key=lambda bound: bound.time)
    half = budget.part(2)

    def go_on(passes: int) -> bool:
        return passes < half.work if half.work is not None else half.left > 0

    least = min(bound.time for bound in bounds.values()) * (1 + 1e-12)
    places = best_placements(given, Random(budget.seed), go_on, least)
    problems = [p for placement in places[:_FINALISTS] for p in problems_of(given.on(placement))]
    problems = problems or problems_of(given)  # raises an error that says what does not fit
    share = budget if budget.work is None else half.part(len(problems))
    results = _search_each(problems, given, share)
    for wide, bound in bounds.items():
        alike = [result for result in results if result[0].problem.whole == wide.whole]
        if alike:
            best, library = min(alike, key=lambda result: result[0].value)
            results.insert(0, (replace(best, bound=bound, wide=wide), library))
    return results


class _Limits:
    """The bytes of orders in simulations, against what the devices may hold."""

    def __init__(self, problem: Problem, given: Given) -> None:
        self._problem, self._given = problem, given
        sizes = given.sizes if given.memory is not None else None
        # the problem itself counts what forwards save, and what waits for weight gradients
        if sizes is not None and not given.delay:
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


def _search(problem: Problem, given: Given, budget: _Budget) -> Result:
    """Search one problem. What is faster than the best schedule, and does not fit in a simulation,
    is ruled out by less memory, and the search goes on."""
    bound, limits = best_bound(problem), _Limits(problem, given)
    library, known, tight = library_orders(problem), [], problem
    for name, entry in library.items():
        if not isinstance(entry, str):
            known.append(entry)
            if not limits.fitting(entry[1]):
                library[name] = "keeps more than fits"
    best: tuple[float, Order] | None = None
    for left in range(_TIGHTENED - 1, -1, -1):
        # half of the time that is left, as the first schedule mostly fits
        share = budget.part(2 if left and limits.simulated else 1)
        least = bound if tight is problem else best_bound(tight)
        local, least = _solve(tight, least, share, known, limits.fitting)
        if tight is problem:
            bound = least
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
        return Certificate(problem, problem.schedule_of(best[1]), best[0], bound), library
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
        problem.memory, peaks(problem, order), limits.over(order), problem.least_memory, strict=True
    )
    return tuple(
        max(least, min(most, peak - more)) if more else most for most, peak, more, least in kept
    )


def _solve(
    problem: Problem,
    bound: Bound,
    budget: _Budget,
    known: Sequence[tuple[float, Order]],
    fitting: Callable[[Order], bool],
) -> tuple[Local, Bound]:
    """Search with list schedules, then with swaps, and then, if the problem is small and CP-SAT is
    allowed, with windows and a model of all tasks; return this search and the best bound.

    Args:
        problem: the problem.
        bound: a bound for it.
        budget: how long to search.
        known: times and orders to start from.
        fitting: whether an order fits into memory, besides what the problem knows of it.
    """
    started = perf_counter()
    local = search_of(problem, Random(budget.seed), fitting)
    for value, candidate in known:
        if fits(problem, candidate):
            local.offer(value, candidate)
    pairs = solver.literals(problem)
    several = any(len(stages) > 1 for stages in problem.held)
    swapped = not problem.delay and pairs <= _SWAPPED * (10 if several else 1)
    small = budget.exact and not problem.delay and pairs <= solver.LITERALS

    def lasting(share: float) -> Callable[[], bool]:
        if budget.work is not None:
            most = share * budget.work
            return lambda: local.passes < most
        until = started + share * (budget.ends - started)
        return lambda: perf_counter() < until

    enough = bound.time * (1 + 1e-12)
    first = _FIRST[small] if swapped else 1.0
    local.run(enough, lasting(first), lasting(max(first, _GIVEN[small])))
    if local.best is not None:
        local.offer(value_of(problem, local.best), local.best)
    if swapped:
        swaps.improve(local, enough, lasting(_THEN[0] if small else 1.0))
    if small and pairs > _QUICK:
        solver.improve(local, enough, lasting(_THEN[1]))
    if small and local.value > bound.time * (1 + 1e-9) and budget.left > pairs / _MODELLED:
        timeline = Timeline(problem, local.first)
        below = local.value if local.best is not None else None
        model = solver.Exact(timeline, below=below, bound=bound.time)
        left, effort = max(0.0, budget.left), inf
        if budget.work is not None:
            effort = budget.work / _WORTH
        order, least = model.solve(left, effort, budget.seed)
        if order is not None:
            local.offer(value_of(problem, order), order)
        if least > bound.time * (1 + 1e-9):
            bound = Bound(min(least, local.value), "solver")
    return local, bound


def library_orders(problem: Problem) -> Library:
    """Name of a library schedule → its time in this problem and its order, or why it has none.

    Backwards are split into halves, or halves put together, as the problem asks.
    """
    recipes: list[Recipe] = [getattr(fxpipe.schedules, name) for name in fxpipe.schedules.__all__]
    library: Library = {}
    for name, recipe in sorted({recipe.name: recipe for recipe in recipes}.items()):
        order = _order(problem, recipe)
        if isinstance(order, str):
            library[name] = order
        elif not fits(problem, order):
            library[name] = "keeps more than fits"
        elif (value := value_of(problem, order)) < inf:
            library[name] = value, order
        else:
            library[name] = "gets stuck"
    return library


def _order(problem: Problem, recipe: Recipe) -> Order | str:
    try:
        if recipe.place(problem.devices) != problem.placement or recipe.copies(problem.devices):
            return "has its stages elsewhere"
        schedule = recipe(problem.devices, problem.microbatches)
        if max(schedule.delays) > (problem.delay or not problem.flush):
            return "reads older weights"
        if schedule.depth and not problem.delay:
            return "mixes batches on a device"
        if not schedule.trains or "R" in schedule.kinds:
            return "does not train, or recomputes"
        order = problem.order_of(schedule)
        if order is not None and problem.delay:
            if max(problem.schedule_of(order).delays) > problem.delay:
                return "reads older weights"
    except FxpipeError:
        return "is not for so many devices and micro-batches"
    return order or "leaves tasks out, or has others"
