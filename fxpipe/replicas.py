"""Check that all replicas of a pipe train the same weights with the same settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.options import Options
from fxpipe.runtime.ranks.message import digest
from fxpipe.runtime.weights.progress import Progress


class Replicas:
    """Compares the replicas of a pipe; all ranks call the same methods."""

    def __init__(self, options: Options, progress: Progress) -> None:
        """Nothing was compared yet."""
        self._options = options
        self._progress = progress
        self._several = options.replicas > 1
        self._same_weights = self._same_settings = False
        self._compared = False  # whether the first call was
        # name of a parameter → where it was and how often it was written, when it was as the pipe
        # had left it
        self._left: Mapping[str, tuple[int, int]] = {}

    def told(self, *, flushed: bool) -> State:
        """What this rank tells the others at the begin of a call. Unless everything is ``flushed``,
        updates write the weights at this time; other writes are refused by the next of them."""
        chosen = self._progress.chosen()
        if not self._several:
            return State(chosen, "", 0)
        settings = "\n".join(self._progress.settings())
        return State(chosen, settings, self._writes() if flushed else 0)

    def hear(self, writes: Sequence[int]) -> None:
        """Take how often weights were written from outside, rank by rank. Where they were in one
        replica and not in another, ``check`` compares them."""
        devices = len(self._options.group.pipeline)
        if any(writes[rank] != writes[rank % devices] for rank in range(len(writes))):
            self._same_weights = False

    def check(self, compiled: Compiled) -> None:
        """Compare weights and buffers at the first call, and weights where they may have become
        others in one replica. Buffers are made the same at the end of each step.

        Raises:
            RankError: a stage of this process has other values in another replica.
        """
        if not self._several or self._same_weights:
            return
        state = compiled.traced.state_of(self._options.model)
        own = filter(self._options.owns, range(len(compiled.plan.stages)))
        names = frozenset[str]().union(*map(compiled.names, own))
        if self._compared:
            names &= {name for name, each in state.items() if isinstance(each, nn.Parameter)}
        self._agree([f"{name}: {digest(state[name])}" for name in sorted(names)])
        self._same_weights = self._compared = True
        self.stepped()

    def check_settings(self, compiled: Compiled) -> None:
        """Compare optimizers at the first step; ``told`` does later.

        Raises:
            RankError: they differ between replicas.
        """
        if self._several and self._progress.stages is not None and not self._same_settings:
            self._agree(self._progress.settings_of(compiled.plan))
            self._same_settings = True

    def stepped(self) -> None:
        """The weights are as the pipe has left them."""
        if self._several and self._progress.versions is None:
            self._left = self._marks()

    def _writes(self) -> int:
        """How often parameters were written since; where batches overlap, whether they were."""
        if self._progress.versions is not None:
            return int(self._progress.versions.changed)
        marks = self._marks()
        changes = [
            version - self._left[name][1] + (place != self._left[name][0])
            for name, (place, version) in marks.items()
            if name in self._left
        ]
        return sum(changes)

    def _marks(self) -> dict[str, tuple[int, int]]:
        named = self._options.model.named_parameters()
        return {name: (each.data_ptr(), each._version) for name, each in named}

    def _agree(self, lines: Sequence[str]) -> None:
        self._options.group.agree("what replicas train", "", twins="\n".join(lines))


class State(NamedTuple):
    """What ranks have in common: ``chosen`` those of a replica, the rest those with the same device
    in all replicas.

    Attributes:
        chosen: the settings that the user has made in the one optimizer, a line each.
        settings: those of the stages' optimizers.
        writes: how often weights were written from outside of the pipe since the last step.
    """

    chosen: Sequence[str]
    settings: str
    writes: int
