"""``search_schedule``: the best schedule for given times, in given memory, and how good it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from random import Random
from time import perf_counter

import fxpipe.schedules
from fxpipe.errors import FxpipeError, InputError
from fxpipe.ir.plan import Plan
from fxpipe.ir.recipe import Placement, Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.search import exact as solver
from fxpipe.search import swaps
from fxpipe.search.bounds import Bound, best_bound
from fxpipe.search.certificate import Certificate, gap_of
from fxpipe.search.local import search_of
from fxpipe.search.placing import best_placements, spread_bound
from fxpipe.search.problem import Order, Problem
from fxpipe.search.read import Given, apart, problems_of
from fxpipe.search.timing import Timeline, fits, peaks, value_of
from fxpipe.simulator.costs import Costs, Links, measured_costs
from fxpipe.simulator.sizes import Sizes

_FIRST = 0.2, 0.1
"""Of the time, for list schedules, where swaps follow, and where the solver does, too."""

_SWAPPED = 1_000_000
"""Pairs of tasks to order above which none follow: there are too few in the time."""

_THEN = 0.3, 0.7
"""Of the time, until when tasks are swapped where the solver follows, and until when windows are
done anew, for more pairs of tasks than ``_QUICK``, where the solver needs long."""

_QUICK = 10_000

_WORTH = 100
"""List schedules that count as much as a second of the solver's own measure."""

_FINALISTS = 2
"""Placements whose schedules are searched, where the placement is, too."""

_TIGHTENED = 6
"""How often memory is held back, at most, until a simulation fits."""


Library = dict[str, tuple[float, Order] | str]
"""Name → its time and its order, or why it has none."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        schedule: the best schedule.
        certificate: what it takes, and what no schedule of its placement can be below.
        others: the certificates of the other placements, and of whole backwards beside halves,
            where these were searched, too. With ``placement="search"`` that of the schedule with
            the bound for its own placement, while ``certificate`` has the one for all of them.
        library: name of each library schedule → its time under the same costs, or why it is none to
            compare with.
    """

    schedule: Schedule
    certificate: Certificate
    others: tuple[Certificate, ...]
    library: Mapping[str, float | str]

    @property
    def value(self) -> float:
        """The time that the schedule takes: of one step, or of each where many follow."""
        return self.certificate.value

    @property
    def bound(self) -> float:
        """The time that no schedule of all that were searched can be below."""
        every = (self.certificate, *self.others)
        wide = [each for each in every if each.wide is not None]
        return min(each.bound.time for each in wide or every)

    @property
    def gap(self) -> float:
        """By which share of the bound the schedule is above it at most."""
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
    """Search for the schedule that takes the least time, and a bound that tells how good it is.

    Library schedules that fit are among the candidates, so that none of them is faster.

    Args:
        costs: letter of a kind of task, or (letter, stage) → time, as for ``simulate``. A "B" that
            is left out takes as long as its halves. Or the plan of a pipe, whose stages were
            measured.
        microbatches: of a step.
        devices: how many; by default one for each stage that ``costs`` names.
        placement: the device of each stage, or a function such as ``fxpipe.vee``. By default one
            stage a device; where there are more stages than devices, round robin, the V and
            neighbours together are searched. "search" for all ways to put the stages on the
            devices that leave none empty, and a bound that holds for all of them.
        whole: True for backwards in one piece, False for their halves, None for whichever of the
            two ``costs`` names, or for both.
        memory: the most that each device may hold, one number or one for each device: in bytes of
            ``sizes``, or, without ``sizes``, in micro-batches from their forward to their last
            task, as ``Schedule.stash`` counts.
        sizes: bytes of what devices hold. The schedule keeps to the limits in a simulation with
            these sizes; the bound counts what forwards and input gradients leave behind.
        links: the latency and bandwidth of the ways between devices, as for ``simulate``. Transfers
            do not wait for one another.
        flush: whether one step is to take the least time, from its first task to its last. If not,
            batches overlap: each of many steps is to take the least time, a device begins the next
            as soon as it is done with one, and reads weights that are one version old (delay 1).
            Schedules that mix batches on a device, such as 2bw, are not among those: see ``delay``.
        delay: at least 1 for schedules without flush whose batches may mix on a device: by how many
            versions the weights that a batch reads may be behind at most. Each batch is then to
            take the least time, once many have run. The schedule has the smallest delay that it
            can do with.
        seconds: how long it may take. It ends earlier where the schedule is proven optimal.
        work: instead of ``seconds``, how many list schedules to try (and swaps and the solver's
            effort in proportion), so that the result is the same on every machine.
        seed: of the random choices.
        exact: whether to use CP-SAT, which ``pip install fxpipe[search]`` installs; by default
            where it is installed.

    Raises:
        InputError: an argument makes no sense, or a micro-batch does not fit into the memory.
    """
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
    budget = _Budget(seconds, work, seed, solver.available() if exact is None else exact)
    if isinstance(placement, str) and placement == "search":
        found = _search_placements(given, budget)
    else:
        problems = problems_of(given)
        share = replace(budget, seconds=seconds / len(problems))
        found = [_search(problem, given, share) for problem in problems]
    best, library = min(found, key=lambda one: one[0].value)
    times = {name: each if isinstance(each, str) else each[0] for name, each in library.items()}
    others = tuple(one for one, _ in found if one is not best)
    return Found(best.schedule, best, others, times)


@dataclass(frozen=True)
class _Budget:
    """What a search may take: seconds, or list schedules."""

    seconds: float
    work: int | None
    seed: int
    exact: bool


def _search_placements(given: Given, budget: _Budget) -> list[tuple[Certificate, Library]]:
    """Placements in half of the time, and in the rest the schedules of the best ones."""
    started, (_, devices) = perf_counter(), given.counts
    bounds = {}
    for wide in apart(given):
        each = best_bound(wide), spread_bound(wide, devices)
        bounds[wide] = max(each, key=lambda bound: bound.time)

    def go_on(passes: int) -> bool:
        if budget.work is not None:
            return passes < budget.work / 2
        return perf_counter() - started < budget.seconds / 2

    least = min(bound.time for bound in bounds.values()) * (1 + 1e-12)
    places = best_placements(given, Random(budget.seed), go_on, least)
    problems = [p for each in places[:_FINALISTS] for p in problems_of(given.on(each))]
    problems = problems or problems_of(given)  # which says what does not fit
    left = max(0.1, budget.seconds - (perf_counter() - started))
    share = replace(budget, seconds=left / len(problems))
    if budget.work is not None:
        share = replace(share, work=max(1, budget.work // 2 // len(problems)))
    found, refused = [], []
    for problem in problems:
        try:
            found.append(_search(problem, given, share))
        except InputError as error:  # it needs more memory in a simulation
            refused.append(error)
    if not found:
        raise refused[0]
    for wide, bound in bounds.items():
        own = [one for one in found if one[0].problem.whole == wide.whole]
        if own:
            best, library = min(own, key=lambda one: one[0].value)
            found.insert(0, (replace(best, bound=bound, wide=wide), library))
    return found


def _search(problem: Problem, given: Given, budget: _Budget) -> tuple[Certificate, Library]:
    """The best of one problem, with memory that is held back until a simulation fits."""
    started, bound = perf_counter(), best_bound(problem)
    sizes = given.sizes if given.memory is not None else None
    limits = given.limits(problem.devices)

    def exceeds(schedule: Schedule) -> list[float]:
        """Device → by how much a simulation is above what it may hold."""
        if sizes is None:
            return [0.0]
        steps = 1 if problem.flush else None
        ran = schedule.simulate(given.costs, links=given.links, sizes=sizes, steps=steps)
        return [max(0.0, has.peak - most) for has, most in zip(ran.memory, limits, strict=True)]

    library, orders, known = library_orders(problem), [], []
    for name, each in library.items():
        if isinstance(each, str):
            continue
        orders.append(each)
        certificate = Certificate(problem, problem.schedule_of(each[1]), each[0], bound)
        if any(exceeds(certificate.schedule)):
            library[name] = "keeps more than fits"
        else:
            known.append(certificate)
    left = budget.seconds - (perf_counter() - started)
    budget = replace(budget, seconds=max(0.1, left))
    tight = problem
    rounds = 1 if sizes is None else _TIGHTENED
    for others in range(rounds - 1, -1, -1):
        # half of what is left, as the first round mostly fits
        part = 2 ** min(rounds - others, rounds - 1)
        share = replace(budget, seconds=budget.seconds / part)
        own = bound if tight is problem else best_bound(tight)
        certificate = _solve(tight, own, share, orders)
        over = exceeds(certificate.schedule)
        if not any(over):
            if tight is not problem:
                certificate = replace(certificate, problem=problem, bound=bound)
            return min((certificate, *known), key=lambda one: one.value), library
        order = problem.order_of(certificate.schedule)
        assert order is not None
        kept = zip(tight.memory, peaks(problem, order), over, tight.least_memory, strict=True)
        memory = tuple(
            max(least, min(most, peak - more)) if more else most for most, peak, more, least in kept
        )
        if not others or memory == tight.memory:
            break
        tight = replace(tight, memory=memory)
    if known:
        return min(known, key=lambda one: one.value), library
    device = max(range(problem.devices), key=over.__getitem__)
    raise InputError(
        f"device {device} holds {over[device]:g} bytes more than it may with every schedule that "
        "was tried; allow more memory, recompute, or cut the model elsewhere"
    )


def _solve(
    problem: Problem, bound: Bound, budget: _Budget, known: Sequence[tuple[float, Order]]
) -> Certificate:
    """List schedules, then swaps, and then, where the solver is there and all is small, windows and
    it; some orders with their times are known."""
    started = perf_counter()
    local = search_of(problem, Random(budget.seed))
    for value, own in known:
        if fits(problem, own):
            local.offer(value, own)
    pairs = solver.literals(problem)
    swapped = not problem.delay and pairs <= _SWAPPED
    small = budget.exact and not problem.delay and pairs <= solver.LITERALS

    def lasting(share: float) -> Callable[[], bool]:
        if budget.work is not None:
            most = share * budget.work
            return lambda: local.passes < most
        return lambda: perf_counter() - started < share * budget.seconds

    enough = bound.time * (1 + 1e-12)
    local.run(enough, lasting(_FIRST[small] if swapped else 1.0))
    assert local.best is not None
    local.offer(value_of(problem, local.best), local.best)
    if swapped:
        swaps.improve(local, enough, lasting(_THEN[0] if small else 1.0))
    if small and pairs > _QUICK:
        solver.improve(local, enough, lasting(_THEN[1]))
    if small and local.value > bound.time * (1 + 1e-9):
        timeline = Timeline(problem, local.best)
        model = solver.Exact(timeline, below=local.value, bound=bound.time)
        left, effort = max(0.1, budget.seconds - (perf_counter() - started)), inf
        if budget.work is not None:
            left, effort = inf, budget.work / _WORTH
        order, least = model.solve(left, effort, budget.seed)
        if order is not None:
            local.offer(value_of(problem, order), order)
        if least > bound.time * (1 + 1e-9):
            bound = Bound(min(least, local.value), "solver")
    schedule = problem.schedule_of(local.best)
    return Certificate(problem, schedule, local.value, bound)


def library_orders(problem: Problem) -> Library:
    """Name → its time, as the problem counts it, and its order; or why it has none here.

    Backwards are taken apart, or put together, as the problem asks.
    """
    recipes: list[Recipe] = [getattr(fxpipe.schedules, name) for name in fxpipe.schedules.__all__]
    found: Library = {}
    for name, recipe in sorted({each.name: each for each in recipes}.items()):
        order = _order(problem, recipe)
        if isinstance(order, str):
            found[name] = order
        elif not fits(problem, order):
            found[name] = "keeps more than fits"
        elif (value := value_of(problem, order)) < inf:
            found[name] = value, order
        else:
            found[name] = "gets stuck"
    return found


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
