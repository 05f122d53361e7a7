"""What was made for earlier calls, and of what it was made, so that results go together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")


@dataclass(eq=False)
class Result:
    """A value, and the results that were made or found while it was made: its parts."""

    value: Any
    parts: list[Result]


class Memo:
    """The results of functions. Each has a kind and a key; of one key there may be several results,
    each of which fits some calls."""

    def __init__(self) -> None:
        # the least recently used first
        self._results: dict[tuple[str, Hashable], tuple[Result, ...]] = {}
        self._making: tuple[list[Result], ...] = ()  # the parts of what is being made now

    def __call__(
        self,
        kind: str,
        key: Callable[[], Hashable],
        make: Callable[[], T],
        fits: Callable[[T], bool] | None = None,
    ) -> T:
        """The first result that fits, or else a new one.

        Args:
            key: asked again once the result is made, as making it may show on what it depends.
        """
        found = self._find(kind, key(), fits)
        if found is None:
            found = self._made(make)
            place = kind, key()
            self._results[place] = (*self._results.get(place, ()), found)
            self._note(found)
        return cast(T, found.value)

    def anew(self, kind: str, key: Callable[[], Hashable], make: Callable[[], T]) -> T:
        """A new result, in place of all of its key."""
        made = self._made(make)
        self._results.pop((kind, key()), None)
        self._results[kind, key()] = (made,)
        self._note(made)
        return cast(T, made.value)

    def find(self, kind: str, key: Hashable, fits: Callable[[Any], bool] | None = None) -> Any:
        """The first result that fits; None if there is none. From now on its key is the one used
        last."""
        found = self._find(kind, key, fits)
        if found is None:
            return None
        self._results[kind, key] = self._results.pop((kind, key))
        return found.value

    def values(self, kind: str, key: Hashable = None) -> list[Any]:
        """All results of a kind, or of a key; those used last come last."""
        return [
            result.value
            for (other, own), results in self._results.items()
            if other == kind and key in (None, own)
            for result in results
        ]

    def keys(self, kind: str) -> list[Any]:
        """The keys of which there are results, in the same order."""
        return [key for other, key in self._results if other == kind]

    def replace(self, old: object, new: object) -> None:
        """Let a result have another value wherever it is this one."""
        for results in self._results.values():
            for result in results:
                if result.value is old:
                    result.value = new

    def share(self, other: Memo, *kinds: str) -> None:
        """Take over the results of these kinds from another."""
        self._results |= {k: v for k, v in other._results.items() if k[0] in kinds}

    def forget(self, *kinds: str) -> None:
        """Forget all results of these kinds."""
        self._results = {k: v for k, v in self._results.items() if k[0] not in kinds}

    def keep(self, kind: str, most: int) -> None:
        """If there are more results of a kind, forget all but the ``most`` used last, and whatever
        is no part of these."""
        keys = [key for key in self._results if key[0] == kind]
        if len(keys) <= most:
            return
        kept = set[Result]()
        new = [result for key in keys[-most:] for result in self._results[key]]
        while new:
            kept.update(new)
            new = [part for result in new for part in result.parts if part not in kept]
        left = {k: tuple(r for r in v if r in kept) for k, v in self._results.items()}
        self._results = {key: results for key, results in left.items() if results}

    def _made(self, make: Callable[[], Any]) -> Result:
        parts: list[Result] = []
        outer, self._making = self._making, (*self._making, parts)
        try:
            return Result(make(), parts)
        finally:
            self._making = outer

    def _find(self, kind: str, key: Hashable, fits: Callable[[Any], bool] | None) -> Result | None:
        for result in self._results.get((kind, key), ()):
            if fits is None or fits(result.value):
                if self._making:
                    self._note(result)
                return result
        return None

    def _note(self, result: Result) -> None:
        if self._making:
            self._making[-1].append(result)
