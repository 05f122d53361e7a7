"""How long a program takes, for all times of its tasks at once.

A run ends when its longest path ends, and a path's time is linear in the times of its tasks. So
the makespan is the greatest of some linear forms, of which few are ever the greatest. They are
found by simulating at chosen times, and known to be all when the greatest of them is right on
every edge of the regions in which each is the greatest: it is convex, and so nowhere too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd

Vector = tuple[int, ...]

Longest = Callable[[Vector], Vector]
"""Times → how often each counts in what is longest at these times."""


@dataclass(frozen=True)
class Envelope:
    """The greatest of some linear forms over a cone of times.

    Attributes:
        forms: the coefficients of each; none could be left out.
        rays: the edges of the regions in which each is the greatest.
    """

    forms: frozenset[Vector]
    rays: frozenset[Vector]

    def at(self, times: Vector) -> int:
        return greatest(self.forms, times)

    def form_at(self, times: Vector) -> Vector:
        """A form that is the greatest at some times."""
        return max(self.forms, key=lambda form: (dot(form, times), form))

    def equals(self, forms: Sequence[Vector]) -> bool:
        """Whether some forms have the same greatest everywhere in the cone."""
        return self.forms <= set(forms) and all(
            greatest(forms, ray) == self.at(ray) for ray in self.rays
        )

    def middles(self) -> Iterator[Vector]:
        """For each form, times at which it is the greatest alone."""
        for form in sorted(self.forms):
            yield _middle(form, self.forms, self.rays)


def envelope(longest: Longest, walls: Sequence[Vector], most: int = 16) -> Envelope | None:
    """The forms of a run, or None where there are more than ``most``.

    Args:
        longest: simulates.
        walls: of the cone of times: each times a vector in it is at least 0.
        most: of forms.
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
    """Whether nothing else is as great in the middle of a form's region."""
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
