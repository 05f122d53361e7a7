"""Weights that a user writes on a rank that does not train them, and not on the one that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.options import Options
from fxpipe.compiler.owned import owned
from fxpipe.log import LOGGER
from fxpipe.runtime.ranks.message import digest
from fxpipe.runtime.weights.progress import Progress


class Written(NamedTuple):
    """Names of the parameters that were written on a rank since the last step.

    Attributes:
        own: of those that its stages train.
        strays: of those that stages of other ranks train.
    """

    own: Sequence[str] = ()
    strays: Sequence[str] = ()


class Strays:
    """Compares what was written on the ranks of a pipeline; all ranks call the same methods."""

    def __init__(self, options: Options, progress: Progress) -> None:
        """Nothing was trained yet."""
        self._options = options
        self._progress = progress
        self._compiled: Compiled | None = None
        self._own: frozenset[str] = frozenset()
        self._others: frozenset[str] = frozenset()
        # name of a parameter → where it was and how often it was written, after the last step
        self._left: Mapping[str, tuple[int, int]] = {}

    def told(self, *, flushed: bool) -> Written:
        """What this rank tells the others at the begin of a call. Unless everything is ``flushed``,
        it is told in a later one: an update refuses it on the rank that trains the parameter."""
        if not flushed or not self._left:
            return Written()
        now = self._marks()
        changed = {name for name, mark in now.items() if self._left.get(name, mark) != mark}
        versions = self._progress.versions
        own = changed & self._own if versions is None else versions.written
        return Written(sorted(own), sorted(changed & self._others))

    def check(self, ranks: Sequence[Written]) -> None:
        """Warn of what was written on another rank than the one that trains it, unless that one
        has the same values, as after ``model.load_state_dict(pipe.state_dict(full=True))``."""
        group = self._options.group
        devices = len(group.pipeline)
        replicas = [ranks[first : first + devices] for first in range(0, len(ranks), devices)]
        alone = {name for replica in replicas for name in _alone(replica)}
        if not alone:
            return
        state = dict(self._options.model.named_parameters())
        kept = {name: (name in self._own, digest(state[name])) for name in sorted(alone)}
        every = group.exchange("weights that were written", kept)
        first = group.replica * devices
        for name in _alone(replicas[group.replica]):
            owner = next(r for r in range(first, first + devices) if every[r][name][0])
            for rank in range(first, first + devices):
                differs = every[rank][name][1] != every[owner][name][1]
                if name in ranks[rank].strays and differs:
                    LOGGER.warning(
                        "%s has written the parameter %r, which %s trains and has not written, so "
                        "that it has no effect; write or load weights on every rank",
                        *(group.met.names[rank], name, group.met.names[owner]),
                    )
                    return

    def stepped(self, compiled: Compiled) -> None:
        """The weights are as the step of a program has left them."""
        if compiled is not self._compiled:
            self._compiled = compiled
            model, owns = self._options.model, self._options.owns
            self._own = owned(model, compiled, owns).used
            self._others = owned(model, compiled, lambda stage: not owns(stage)).used - self._own
        self._left = self._marks()

    def _marks(self) -> dict[str, tuple[int, int]]:
        named = self._options.model.named_parameters()
        return {name: (each.data_ptr(), each._version) for name, each in named}


def _alone(replica: Sequence[Written]) -> list[str]:
    """The parameters of a replica that were written, and not by the rank that trains them."""
    written = {name for rank in replica for name in rank.own}
    return sorted({name for rank in replica for name in rank.strays} - written)
