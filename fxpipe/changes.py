"""What a user changes between steps on some ranks alone: weights, and settings of optimizers.

Replicas train the same weights with the same settings, so what one of them has changed is compared.
In a replica each weight is trained by one rank, and writing it on another one has no effect: that
is warned of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from fxpipe.compiler.compiled import Compiled, owned
from fxpipe.compiler.options import Options
from fxpipe.log import LOGGER
from fxpipe.runtime.ranks.message import digest
from fxpipe.runtime.weights.progress import Progress


class Changed(NamedTuple):
    """What a rank tells the others at the begin of a call.

    Attributes:
        chosen: the settings that the user has made in the one optimizer, a line each; the same on
            the ranks of a replica.
        settings: those of the stages' optimizers; the same on the ranks with the same device.
        writes: how often weights were written from outside of the pipe since the last step.
        own: the parameters that were written since, of those that this rank's stages train.
        strays: of those that stages of other ranks train.
    """

    chosen: Sequence[str] = ()
    settings: str = ""
    writes: int = 0
    own: Sequence[str] = ()
    strays: Sequence[str] = ()


class Changes:
    """Compares what was changed on the ranks of a pipe; all ranks call the same methods."""

    def __init__(self, options: Options, progress: Progress) -> None:
        """Nothing was trained yet."""
        self._options = options
        self._progress = progress
        self._several = options.replicas > 1
        self._same_weights = self._same_settings = False
        self._compared = False  # whether the first call was
        self._compiled: Compiled | None = None  # the last step
        self._own: frozenset[str] = frozenset()
        self._others: frozenset[str] = frozenset()
        # name of a parameter → where it was and how often it was written, as the pipe had left it
        self._left: Mapping[str, tuple[int, int]] = {}

    def told(self, *, flushed: bool) -> Changed:
        """What this rank tells. Unless everything is ``flushed``, updates write the weights at this
        time; other writes are refused by the next of them, or told in a later call."""
        settings = "\n".join(self._progress.settings()) if self._several else ""
        found = Changed(self._progress.chosen(), settings)
        if not flushed or not self._left:
            return found
        now, left, versions = self._marks(), self._left, self._progress.versions
        changed = {name for name in now.keys() & left.keys() if now[name] != left[name]}
        writes = sum(
            now[name][1] - left[name][1] + (now[name][0] != left[name][0]) for name in changed
        )
        own = changed & self._own
        if versions is not None:  # which updates write at other times
            own = versions.written
            writes = int(bool(own))
        if self._compiled is None:
            return found._replace(writes=writes)
        return found._replace(writes=writes, own=sorted(own), strays=sorted(changed & self._others))

    def hear(self, ranks: Sequence[Changed]) -> None:
        """Take what all ranks have told. Where weights were written in one replica and not in
        another, ``check`` compares them. Warns of what was written on another rank than the one
        that trains it, unless that one has the same values, as after
        ``model.load_state_dict(pipe.state_dict(full=True))``."""
        group = self._options.group
        devices = len(group.pipeline)
        if any(each.writes != ranks[rank % devices].writes for rank, each in enumerate(ranks)):
            self._same_weights = False
        replicas = [ranks[first : first + devices] for first in range(0, len(ranks), devices)]
        alone = {name for replica in replicas for name in _alone(replica)}
        if not alone:
            return
        state = dict(self._options.model.named_parameters())
        kept = {name: (name in self._own, digest(state[name])) for name in sorted(alone)}
        every = group.exchange("weights that were written", kept)
        for name in _alone(replicas[group.replica]):
            owner = next(rank for rank in group.pipeline if every[rank][name][0])
            for rank in group.pipeline:
                differs = every[rank][name][1] != every[owner][name][1]
                if name in ranks[rank].strays and differs:
                    LOGGER.warning(
                        "%s has written the parameter %r, which %s trains and has not written, so "
                        "that it has no effect; write or load weights on every rank",
                        *(group.members.names[rank], name, group.members.names[owner]),
                    )
                    return

    def check(self, compiled: Compiled) -> None:
        """Compare the replicas' weights and buffers at the first call, and weights where they may
        have become others in one. Buffers are made the same at the end of each step.

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
        self._left = self._marks()

    def check_settings(self, compiled: Compiled) -> None:
        """Compare the replicas' optimizers at the first step; ``told`` does later.

        Raises:
            RankError: they differ.
        """
        if self._several and self._progress.stages is not None and not self._same_settings:
            self._progress.optimizers_of(compiled.plan)
            self._agree(self._progress.settings())
            self._same_settings = True

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

    def _agree(self, lines: Sequence[str]) -> None:
        self._options.group.agree("what replicas train", "", twins="\n".join(lines))


def _alone(replica: Sequence[Changed]) -> list[str]:
    """The parameters of a replica that were written, and not by the rank that trains them."""
    written = {name for rank in replica for name in rank.own}
    return sorted({name for rank in replica for name in rank.strays} - written)
