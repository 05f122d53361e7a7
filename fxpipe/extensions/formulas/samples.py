"""A schedule's exact makespan, bubble and stash, for given counts and all times of its tasks.

A run ends when its longest path ends, and a path's time is linear in the times of its tasks. So the
makespan is the maximum of some linear forms, few of which are ever the greatest. Simulations at
chosen times find these forms. The search is complete when their maximum is right on all edges of
the regions in which each form is the greatest: as the makespan is convex, it is right everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import gcd

from sympy.core.relational import Relational

from fxpipe.errors import InputError
from fxpipe.extensions.formulas.formulas import Basis, Vector, basis
from fxpipe.extensions.simulator.analysis import peak_stash
from fxpipe.extensions.simulator.costs import PAIRS, task_times
from fxpipe.extensions.simulator.simulate import run
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program, Turn
from fxpipe.ir.task import KINDS
from fxpipe.ir.walk import waits_of, walk
from fxpipe.passes.lowering.pairs import Pairs, joins

Longest = Callable[[Vector], Vector]
"""Times → how often each of them counts in the longest path at these times."""


@dataclass(frozen=True)
class Envelope:
    """The maximum of some linear forms over a cone of times.

    Attributes:
        forms: the coefficients of each form; every form is the greatest somewhere.
        rays: the edges of the regions in which each form is the greatest.
    """

    forms: frozenset[Vector]
    rays: frozenset[Vector]

    def at(self, times: Vector) -> int:
        return greatest(self.forms, times)

    def form_at(self, times: Vector) -> Vector:
        """A form that is the greatest at these times."""
        return max(self.forms, key=lambda form: (dot(form, times), form))

    def equals(self, forms: Sequence[Vector]) -> bool:
        """Whether these forms have the same maximum everywhere in the cone."""
        return self.forms <= set(forms) and all(
            greatest(forms, ray) == self.at(ray) for ray in self.rays
        )

    def middles(self) -> Iterator[Vector]:
        """Yield, for each form, times at which it alone is the greatest."""
        for form in sorted(self.forms):
            yield _middle(form, self.forms, self.rays)


def envelope(longest: Longest, walls: Sequence[Vector], most: int = 16) -> Envelope | None:
    """The envelope of a run's longest paths, or None if it has more than ``most`` forms.

    The walls bound the cone of times: their dot products with a vector in it are at least 0.
    """
    size = len(walls[0])
    edges = set(_edges(walls[size:], size))
    forms: set[Vector] = {longest(next(iter(edges)))}
    done: set[Vector] = set()
    while True:
        rays = set(_rays(forms, walls, size)) | edges
        new = rays - done
        if not new:
            break
        done |= new
        for ray in sorted(new):
            found = longest(ray)
            if dot(found, ray) > greatest(forms, ray):
                forms.add(found)
            if len(forms) > most:
                return None
    needed = [form for form in forms if _alone(form, forms, rays)]
    return Envelope(frozenset(needed), frozenset(rays))


def dot(a: Vector, b: Vector) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def greatest(forms: Sequence[Vector] | set[Vector] | frozenset[Vector], times: Vector) -> int:
    return max(dot(form, times) for form in forms)


def _alone(form: Vector, forms: set[Vector], rays: set[Vector]) -> bool:
    """Whether this form alone is the greatest in the middle of its region."""
    middle = _middle(form, forms, rays)
    return all(other == form or dot(other, middle) < dot(form, middle) for other in forms)


def _middle(
    form: Vector, forms: set[Vector] | frozenset[Vector], rays: set[Vector] | frozenset[Vector]
) -> Vector:
    """A sum of the edges of a form's region, with unequal weights to keep it off symmetries."""
    edges = sorted(ray for ray in rays if dot(form, ray) == greatest(forms, ray))
    return tuple(sum((2 * k + 3) * ray[j] for k, ray in enumerate(edges)) for j in range(len(form)))


def _rays(forms: set[Vector], walls: Sequence[Vector], size: int) -> Iterator[Vector]:
    """Yield the edges of the regions in which each form is the greatest."""
    for form in forms:
        others = (tuple(x - y for x, y in zip(form, b, strict=True)) for b in forms if b != form)
        yield from _edges([*walls[size:], *others], size)


def _edges(walls: Iterable[Vector], size: int) -> Iterable[Vector]:
    """The edges of the cone of times that are at least 0, as are their products with the walls.

    This is the double description method (Fukuda and Prodon, 1996). Wall by wall, the edges beyond
    the wall are dropped, and a new one is added wherever the wall cuts the face between two
    neighbours. Each edge has the walls in which it lies as bits.
    """
    every = range(size)
    edges = {tuple(int(i == j) for j in every): sum(1 << j for j in every if j != i) for i in every}
    for number, wall in enumerate(walls, start=size):
        side = {edge: dot(wall, edge) for edge in edges}
        kept = {
            e: on | (1 << number if not side[e] else 0) for e, on in edges.items() if side[e] >= 0
        }
        for a, b in product((e for e in edges if side[e] > 0), (e for e in edges if side[e] < 0)):
            both = edges[a] & edges[b]
            if all(both & ~on or e in (a, b) for e, on in edges.items()):
                cut = [side[a] * y - side[b] * x for x, y in zip(a, b, strict=True)]
                kept[tuple(x // gcd(*cut) for x in cut)] = both | 1 << number
        edges = kept
    return edges


@dataclass(frozen=True)
class Paths:
    """The longest paths of a program, as counts of basic times; ``columns`` are those of a Basis.

    Each time is simulated as one large integer. Its high digits are the time itself, and its low
    digits count the basic times in it. The simulator adds and compares these integers as usual.
    """

    program: Program
    columns: Mapping[str, Vector]
    pairs: Pairs = field(default_factory=dict)
    _known: dict[tuple[Vector, bool], list[list[int]]] = field(default_factory=dict)

    def work(self) -> Vector:
        """The time of all micro-batch tasks on all devices."""
        works = [self._work(device) for device in range(self.program.devices)]
        return tuple(map(sum, zip(*works, strict=True)))

    def after_all(self) -> Vector | None:
        """The time of a device's once-per-step tasks, if they come last, after a barrier, and take
        the same time on all devices; otherwise None."""
        times: set[Vector] = set()
        for list_ in self.program.lists:
            kinds = "".join(
                "|" if isinstance(x, ins.Barrier) else "u" if _once(x) else "t"
                for x in list_
                if isinstance(x, ins.Barrier) or x.letter is not None
            )
            if "u" in kinds and kinds.strip("t").rstrip("u") != "|":
                return None
            times.add(self._counted([x for x in list_ if _once(x) and x.letter is not None]))
        return times.pop() if len(times) == 1 else None

    def makespan(self, times: Vector) -> Vector:
        """The time until everything is done."""
        ends = self._ends(times, once=True)
        return self._digits(max(row[-1] for row in ends if row))

    def through(self, times: Vector) -> Vector:
        """The time until the last micro-batch is finished; once-per-step tasks take no time."""
        ends, tasks = self._ends(times, once=False), self._tasks
        return self._digits(max(ends[d][at[-1]] for d, at in enumerate(tasks) if at))

    def size(self, times: Vector) -> Vector:
        """The most that a device idles between its first task and its last, such as −2 T_W.

        Once-per-step tasks take no time.
        """
        ends, tasks = self._ends(times, once=False), self._tasks
        return max(
            (
                self._idle(device, ends[device][at[0] - 1] if at[0] else 0, ends[device][at[-1]])
                for device, at in enumerate(tasks)
                if at
            ),
            key=lambda idle: (dot(idle, times), idle),
        )

    def _idle(self, device: int, start: int, end: int) -> Vector:
        first, last = self._digits(start), self._digits(end)
        work = self._work(device)
        return tuple(b - a - w for a, b, w in zip(first, last, work, strict=True))

    def _work(self, device: int) -> Vector:
        """The time of a device's micro-batch tasks."""
        list_ = self.program.lists[device]
        return self._counted([list_[position] for position in self._tasks[device]])

    def _counted(self, tasks: Sequence[ins.Instruction]) -> Vector:
        counts = Counter(letter for x in tasks if (letter := x.letter) is not None)
        for first, then in pairwise(tasks if self.pairs else ()):
            if joins(first, then, self.pairs):
                counts.subtract(["F", then.letter or ""])
                counts[f"F&{then.letter}"] += 1
        size = len(next(iter(self.columns.values())))
        return tuple(
            sum(n * self.columns[key][j] for key, n in counts.items()) for j in range(size)
        )

    def _ends(self, times: Vector, *, once: bool) -> list[list[int]]:
        """Device → the ends of its instructions."""
        if (times, once) not in self._known:
            costs: dict[str, float] = dict.fromkeys(KINDS, 0)
            for letter, column in self.columns.items():
                if once or letter not in KINDS or KINDS[letter].per_microbatch:
                    costs[letter] = self._encoded(column, times)
            less = {
                then: (*first, costs["F"] + costs[then[0]] - costs[f"F&{then[0]}"])
                for then, first in self.pairs.items()
            }
            events = run(self.program, self._turns, task_times(self.program, costs), less=less)
            self._known[times, once] = [list(map(int, row)) for row in events.ends]
        return self._known[times, once]

    @cached_property
    def _tasks(self) -> list[list[int]]:
        """Device → the positions of its micro-batch tasks."""
        return [
            [at for at, x in enumerate(list_) if x.letter is not None and not _once(x)]
            for list_ in self.program.lists
        ]

    @cached_property
    def _turns(self) -> list[Turn]:
        walked = walk([len(list_) for list_ in self.program.lists], waits_of(self.program))
        if walked.stuck:
            raise InputError(
                f"program {self.program.name!r} gets stuck; Program.verify() tells why"
            )
        return walked.turns

    @cached_property
    def _shift(self) -> int:
        most = max(max(column) for column in self.columns.values())
        return (sum(map(len, self.program.lists)) * most + 1).bit_length()

    def _encoded(self, column: Vector, times: Vector) -> int:
        """The time of a task as an integer, with counts of its basic times in the low digits."""
        code = dot(column, times)
        for count in reversed(column):
            code = (code << self._shift) + count
        return code

    def _digits(self, time: int) -> Vector:
        mask = (1 << self._shift) - 1
        size = len(next(iter(self.columns.values())))
        return tuple(time >> self._shift * j & mask for j in range(size))


def _once(instruction: object) -> bool:
    return getattr(instruction, "microbatch", None) is None


@dataclass(frozen=True)
class Bases:
    """The basic times of all tasks of a schedule, and of its micro-batch tasks alone."""

    all: Basis
    tasks: Basis

    @staticmethod
    def of(kinds: frozenset[str], given: Sequence[Relational]) -> Bases:
        of_microbatch = [letter for letter in KINDS if KINDS[letter].per_microbatch]
        of_microbatch = [letter for letter in (*of_microbatch, *PAIRS) if letter in kinds]
        once = [letter for letter in KINDS if letter in kinds and letter not in of_microbatch]
        return Bases(basis([*of_microbatch, *once], given), basis(of_microbatch, given))

    @property
    def apart(self) -> bool:
        """Whether no assumption relates once-per-step tasks to micro-batch tasks."""
        kept, count = self.tasks.symbols, len(self.tasks.symbols)
        return self.all.symbols[:count] == kept and self.all.scale == self.tasks.scale


@dataclass(frozen=True)
class Sample:
    """One run, for all times of its tasks.

    Attributes:
        makespan: the time until everything is done, in all basic times; None for too many forms.
        through: the time until the last micro-batch is through, in those of micro-batch tasks.
        size: the most that a device idles between its first task and its last, in the same times.
        work: the time of all micro-batch tasks, in the same times.
        stash: stage → the most micro-batches that it keeps at once.
        peak: the most micro-batches that a device's stages together keep at once.
    """

    makespan: Envelope | None
    through: Envelope | None
    size: Envelope | None
    work: Vector
    stash: Sequence[int]
    peak: int


def sample(program: Program, times: Bases, pairs: Pairs) -> Sample:
    """Simulate a program at enough times of tasks and pairs to know its results for all times.

    Raises:
        InputError: the program gets stuck.
    """
    paths = Paths(program, times.tasks.columns, pairs)
    stash, devices = peak_stash(program)
    through = envelope(paths.through, times.tasks.walls)
    return Sample(
        _makespan(program, times, paths, through),
        through,
        envelope(paths.size, times.tasks.walls),
        paths.work(),
        stash,
        max(devices),
    )


def _makespan(
    program: Program, times: Bases, paths: Paths, through: Envelope | None
) -> Envelope | None:
    every = Paths(program, times.all.columns, paths.pairs)
    after = every.after_all()
    if after is None or not times.apart:
        return envelope(every.makespan, times.all.walls)
    if through is None:
        return None
    # once-per-step tasks come after all others, and take the same time on every device
    count = len(times.tasks.symbols)
    rest = after[count:]
    units = [tuple(int(i == j) for j in range(count + len(rest))) for i in range(count, len(after))]
    zeros = (0,) * len(rest)
    return Envelope(
        frozenset((*form, *rest) for form in through.forms),
        frozenset({*((*ray, *zeros) for ray in through.rays), *units}),
    )
