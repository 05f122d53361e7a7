"""The makespan of a program as a function of the times of its tasks.

A run ends when its longest path ends, and a path's time is linear in the times of its tasks. So
the makespan is the maximum of some linear forms, few of which are ever the maximum. They are found
by simulating at chosen times. All are found when their maximum is right on every edge of the
regions in which each is the maximum: the makespan is convex, so the maximum is nowhere too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd

Vector = tuple[int, ...]

Longest = Callable[[Vector], Vector]
"""Times → how often each of them counts in the longest path at these times."""


@dataclass(frozen=True)
class Envelope:
    """The maximum of some linear forms over a cone of times.

    Attributes:
        forms: the coefficients of each form; every form is the maximum somewhere.
        rays: the edges of the regions in which each form is the maximum.
    """

    forms: frozenset[Vector]
    rays: frozenset[Vector]

    def at(self, times: Vector) -> int:
        return greatest(self.forms, times)

    def form_at(self, times: Vector) -> Vector:
        """A form that is the maximum at these times."""
        return max(self.forms, key=lambda form: (dot(form, times), form))

    def equals(self, forms: Sequence[Vector]) -> bool:
        """Whether these forms have the same maximum everywhere in the cone."""
        return self.forms <= set(forms) and all(
            greatest(forms, ray) == self.at(ray) for ray in self.rays
        )

    def middles(self) -> Iterator[Vector]:
        """For each form, times at which it alone is the maximum."""
        for form in sorted(self.forms):
            yield _middle(form, self.forms, self.rays)


def envelope(longest: Longest, walls: Sequence[Vector], most: int = 16) -> Envelope | None:
    """The forms of a run, or None where there are more than ``most``.

    Args:
        longest: simulates the program at given times.
        walls: bound the cone of times: the dot product of each with a vector in it is at least 0.
        most: the greatest number of forms.
    """
    size = len(walls[0])
    edges = set(_rays(set(), walls, size))
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
    """Whether no other form is as great in the middle of this form's region."""
    middle = _middle(form, forms, rays)
    return all(other == form or dot(other, middle) < dot(form, middle) for other in forms)


def _middle(
    form: Vector, forms: set[Vector] | frozenset[Vector], rays: set[Vector] | frozenset[Vector]
) -> Vector:
    """A sum of the edges of a form's region, with weights that keep it off symmetries."""
    own = sorted(ray for ray in rays if dot(form, ray) == greatest(forms, ray))
    return tuple(sum((2 * k + 3) * ray[j] for k, ray in enumerate(own)) for j in range(len(form)))


def _rays(forms: set[Vector], walls: Sequence[Vector], size: int) -> Iterator[Vector]:
    """Where enough of the forms, and of the cone's walls, meet."""
    faces: list[tuple[Vector, Vector | None]] = [(wall, None) for wall in walls]
    for a, b in combinations(sorted(forms), 2):
        faces.append((tuple(x - y for x, y in zip(a, b, strict=True)), a))
    for chosen in combinations(faces, size - 1):
        for ray in _normals([face for face, _ in chosen]):
            if any(dot(wall, ray) < 0 for wall in walls):
                continue
            if all(form is None or dot(form, ray) == greatest(forms, ray) for _, form in chosen):
                yield ray


def _normals(rows: Sequence[Vector]) -> Iterator[Vector]:
    """The two shortest whole vectors at right angles to all rows, if there are no others."""
    size = len(rows) + 1
    found = [
        (-1) ** j * _determinant([(*row[:j], *row[j + 1 :]) for row in rows]) for j in range(size)
    ]
    if any(found):
        common = gcd(*found)
        yield tuple(x // common for x in found)
        yield tuple(-x // common for x in found)


def _determinant(rows: Sequence[Vector]) -> int:
    if not rows:
        return 1
    first, *rest = rows
    return sum(
        (-1) ** j * x * _determinant([(*row[:j], *row[j + 1 :]) for row in rest])
        for j, x in enumerate(first)
        if x
    )
