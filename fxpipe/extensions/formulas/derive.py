"""Derive closed forms: sample a schedule exactly, fit, and check on all samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sympy import (
    And,
    Eq,
    Expr,
    Ge,
    Integer,
    Max,
    Mod,
    Piecewise,
    Symbol,
    cancel,
    factor,
    floor,
    sympify,
    true,
)
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from fxpipe.errors import InputError
from fxpipe.extensions.formulas.fit import Point, fit
from fxpipe.extensions.formulas.formulas import (
    QUANTITIES,
    Basis,
    Formula,
    Formulas,
    T,
    basis,
    m,
    p,
    s,
    time,
    v,
)
from fxpipe.extensions.formulas.samples import Sample, sample
from fxpipe.extensions.simulator.costs import PAIRS
from fxpipe.ir.recipe import Recipe, round_robin
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.passes.lowering.chain import chain_program, with_sums
from fxpipe.passes.lowering.pairs import pairs_in

_MANY = Ge(p, 2)

REGIONS: tuple[Boolean, ...] = (
    true,
    _MANY,
    Ge(m, p),
    And(_MANY, Ge(m, p)),
    Ge(m, 2 * p - 1),
    Ge(m, 2 * p),
    And(_MANY, Ge(m, 2 * p - 1)),
    And(_MANY, Ge(m, 2 * p)),
    Eq(Mod(m, p), 0),
    And(_MANY, Eq(Mod(m, p), 0)),
)
"""The regions to try, the widest first. The first one throughout which a form is right is taken."""

DEVICES = (1, 2, 3, 4, 5, 6)
"""The numbers of devices to sample."""

CHUNKS_DEVICES = (1, 2, 3, 4)
"""The same if the number of stages per device varies, too."""

FEWEST = 12
"""The least number of samples in a region."""


def microbatches_for(devices: int) -> tuple[int, ...]:
    """The numbers of micro-batches to sample: a few around those at which schedules change."""
    counts = {1, 2, 3, 4, 5, 7, *(k * devices + d for k in (1, 2, 3) for d in (-1, 0, 1))}
    return tuple(sorted(count for count in counts if count > 0))


def schedule_formulas(schedule: Schedule, *, given: Sequence[Relational] = ()) -> Formulas:
    """Derive the closed forms of a schedule, in the times of its tasks, for one step with a flush.

    Args:
        schedule: a valid schedule.
        given: what is known of the times of tasks, such as ``time("W") <= time("F")``.

    Raises:
        VerificationError: the schedule is not valid.
        InputError: ``given`` relates something else.
    """
    schedule = with_sums(schedule.verify())
    times = _basis([schedule], given)
    only = _sample(schedule, times, 1)
    forms: dict[str, Expr] = {}
    for quantity in _TIMES:
        devices = Integer(schedule.devices)
        form = _in_times(quantity, lambda name: getattr(only, name), devices, times)
        if form is not None:
            forms[quantity] = form
    cases = [(Integer(count), Eq(s, stage)) for stage, count in enumerate(only.stash)]
    forms["stash"] = Piecewise(*cases) if len(set(only.stash)) > 1 else cases[0][0]
    forms["peak_stash"] = Integer(only.peak)
    formulas = {name: Formula(form, true, 1) for name, form in forms.items()}
    return Formulas(schedule.name, tuple(given), formulas)


def recipe_formulas(
    recipe: Recipe,
    *,
    given: Sequence[Relational] = (),
    where: Boolean | None = None,
    devices: Sequence[int] | None = None,
    microbatches: Callable[[int], Sequence[int]] | None = None,
    chunks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Formulas:
    """Derive the closed forms of all schedules that a recipe makes, in p and m.

    It simulates the schedules at some points (p, m), each for all times of the tasks at once, and
    fits polynomials that meet all samples exactly. A form that only meets the samples of a region
    says so.

    Args:
        recipe: the recipe.
        given: what is known of the times of tasks, such as ``time("W") <= time("F")``.
        where: the region of p and m that matters, such as ``m >= p``; the forms may be simpler
            there.
        devices: the p of the samples.
        microbatches: p → the m of the samples.
        chunks: the v of the samples, if the forms are to have v: stages per device, dealt
            round-robin.
        steps: the T of the samples, if batches overlap: steps in a row.

    Raises:
        VerificationError: a schedule is not valid.
        InputError: ``given`` relates something else, or ``where`` leaves nothing to try.
    """
    if devices is None:
        devices = CHUNKS_DEVICES if chunks else DEVICES
    for word, counts in (("devices", devices), ("chunks", chunks), ("steps", steps)):
        if counts is not None and not isinstance(counts, Sequence):
            raise InputError(f"{word} is {counts!r}; give a list of counts, such as [2, 3, 4]")
    if microbatches is not None and not callable(microbatches):
        raise InputError(
            f"microbatches is {microbatches!r}; give a function of the number of devices, such as "
            "lambda p: [p, 2 * p, 3 * p]"
        )
    region = true if where is None else sympify(where)
    overlaps = recipe(2, 2).depth > 0
    if steps is None:
        steps = (1, 2, 3, 5) if overlaps else (1,)
    symbols = [p, m, *([v] if chunks else []), *([T] if overlaps else [])]
    schedules: dict[Point, Schedule] = {}
    for a in devices:
        for b in (microbatches or microbatches_for)(a):
            if region.subs({p: a, m: b}) == true:
                for chunk in chunks or (0,):
                    placed = recipe.placed(round_robin(chunk)) if chunk else recipe
                    schedule = with_sums(placed(a, b).verify())
                    schedules[a, b, *([chunk] if chunks else [])] = schedule
    if not schedules:
        raise InputError(f"where is {region}, and none of the points that are tried lies there")
    times = _basis(list(schedules.values()), given)
    samples = {
        (*point, *([count] if overlaps else [])): _sample(schedule, times, count)
        for point, schedule in schedules.items()
        for count in steps
    }
    formulas: dict[str, Formula] = {}
    inside = [
        (
            where,
            {x: result for x, result in samples.items() if where.subs({p: x[0], m: x[1]}) == true},
        )
        for where in REGIONS
    ]
    for quantity in QUANTITIES:
        for where, known in inside:
            if len(known) < FEWEST:
                continue
            expression = _expression(quantity, known, symbols, times)
            if expression is not None:
                formulas[quantity] = Formula(expression, And(region, where), len(known))
                break
    return Formulas(recipe.name, tuple(given), formulas)


def _basis(schedules: Sequence[Schedule], given: Sequence[Relational]) -> Basis:
    """The basic times of the schedules' tasks and pairs."""
    kinds = {kind for schedule in schedules for kind in schedule.kinds}
    kinds |= {f"F&{then.kind}" for schedule in schedules for then in schedule.paired}
    return basis([letter for letter in (*KINDS, *PAIRS) if letter in kinds], given)


def _sample(schedule: Schedule, times: Basis, steps: int) -> Sample:
    # offloaded values are waited for in frees
    program = chain_program(schedule, frees="O" in schedule.kinds)
    return sample(program, times, pairs_in(schedule), steps)


def _expression(
    quantity: str, samples: Mapping[Point, Sample], symbols: Sequence[Symbol], times: Basis
) -> Expr | None:
    """The closed form of a quantity that meets all these samples, or None."""

    def fitted(name: str) -> Sequence[Expr] | None:
        forms = [getattr(result, name) for result in samples.values()]
        if None in forms:
            return None
        rows = [dict(zip(samples, row, strict=True)) for row in zip(*forms, strict=True)]
        parts = [fit(row, symbols) for row in rows]
        return None if None in parts else parts

    match quantity:
        case "stash":
            kept = {
                (*x, stage): count
                for x, result in samples.items()
                for stage, count in enumerate(result.stash)
            }
            return fit(kept, [*symbols, s])
        case "peak_stash":
            return fit({x: result.peak for x, result in samples.items()}, symbols)
    return _in_times(quantity, fitted, p, times)


_TIMES = {"makespan": ["makespan"], "bubble": ["through", "work"], "bubble_size": ["size"]}
"""Quantity in the times of tasks → the forms of a sample that it is made of."""


def _in_times(
    quantity: str,
    form: Callable[[str], Sequence[Expr | int] | None],
    devices: Expr,
    times: Basis,
) -> Expr | None:
    """The closed form of a quantity from the forms of a sample, by name; None if one is None."""
    forms = [form(name) for name in _TIMES[quantity]]
    if None in forms:
        return None
    whole, *work = (_neat(times.form(each)) for each in forms if each is not None)
    return _share(work[0], devices, whole) if work else whole


def _neat(form: Expr) -> Expr:
    """The form with the common factor of all micro-batch tasks taken out."""
    once = [time(letter) for letter, kind in KINDS.items() if not kind.per_microbatch]
    rest = form.subs(dict.fromkeys(once, 0))
    return factor(form - rest) + factor(rest)


def _share(work: Expr, devices: Expr, through: Expr) -> Expr:
    """The fraction of the devices' time that is not work."""
    rest = 1 - factor(work) / (devices * through)
    return rest if through.has(Max, Mod, Piecewise, floor) else factor(cancel(rest))
