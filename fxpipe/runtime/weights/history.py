"""The versions of the weights by name: what a checkpoint keeps of them, for any partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Versions = Mapping[int, Mapping[str, Tensor]]
"""Version → name → value."""


@dataclass(frozen=True)
class History:
    """The versions that batches to come may read, while no batch is in flight.

    Attributes:
        newest: the newest version: how many batches have updated the weights. Its values are the
            model's own parameters.
        base: the oldest that can be read; earlier ones are read as this one.
        older: the versions before the newest, where batches read them themselves.
        predicted: what the batches of a version read instead, where that is predicted; the
            newest among them.
    """

    newest: int
    base: int
    older: Versions = field(default_factory=dict)
    predicted: Versions = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> History:
        """The same under other names; without what has none."""

        def rename(versions: Versions) -> Versions:
            return {
                version: {names[name]: own for name, own in tensors.items() if name in names}
                for version, tensors in versions.items()
            }

        return History(self.newest, self.base, rename(self.older), rename(self.predicted))


def since(versions: Versions, version: int, name: str) -> Tensor | None:
    """A parameter's value of a version; of the oldest after it where it has none of that."""
    later = [v for v, tensors in versions.items() if v >= version and name in tensors]
    return versions[min(later)][name] if later else None
