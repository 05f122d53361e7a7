"""Find changes that a user makes between steps on some ranks alone: of weights or of optimizers'
settings.

Replicas train the same weights with the same settings, so they compare what any of them has
changed. In a replica one rank trains each weight; writing it on another rank has no effect, and
causes a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.options import Options
from fxpipe.compiler.owned import owned
from fxpipe.log import LOGGER
from fxpipe.runtime.ranks.message import digest
from fxpipe.runtime.weights.progress import Progress


class Changed(NamedTuple):
    """What a rank tells the others at the begin of a call.

    Attributes:
        chosen: the settings that the user has made in the one optimizer, a line each; the same on
            the ranks of a replica.
        settings: the settings of the stages' optimizers; the same on the ranks with the same
            device.
        writes: how often weights were written outside of the pipe since the last step.
        own: the parameters written since then that this rank's stages train.
        strays: the parameters written since then that stages of other ranks train.
    """

    chosen: Sequence[str] = ()
    settings: str = ""
    writes: int = 0
    own: Sequence[str] = ()
    strays: Sequence[str] = ()


class Changes:
    """Compares what was changed on the ranks of a pipe; all ranks call the same methods."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._several = options.replicas > 1
        # what a call compares counts only if it succeeds: the ranks of one that fails may have
        # come to different places
        self._failures = 0
        self._same_weights = self._same_settings = False
        self._compared = False  # whether the weights and buffers of a call were
        self._compiled: Compiled | None = None  # of the last step
        self._own: frozenset[str] = frozenset()
        self._others: frozenset[str] = frozenset()
        # name of a parameter → its address and version after the pipe's last step
        self._left: Mapping[str, tuple[int, int]] = {}

    def told(self, *, flushed: bool) -> Changed:
        """What this rank tells the others. Unless all batches are ``flushed``, updates are writing
        weights now; the next update refuses other writes, or a later call tells of them."""
        if self._failures != self._options.group.failures:
            self._failures = self._options.group.failures
            self._same_weights = self._same_settings = False
        self._compared |= self._same_weights
        settings = "\n".join(self._progress.settings()) if self._same_settings else ""
        changes = Changed(self._progress.chosen(), settings)
        if not flushed or not self._left:
            return changes
        now, left, versions = self._marks(), self._left, self._progress.versions
        changed = {name for name in now.keys() & left.keys() if now[name] != left[name]}
        writes = sum(
            now[name][1] - left[name][1] + (now[name][0] != left[name][0]) for name in changed
        )
        trained = changed & self._own
        if versions is not None:  # updates write at other times; the versions know other writes
            trained = versions.written
            writes = int(bool(trained))
        changes = changes._replace(writes=writes)
        if self._compiled is None:
            return changes
        return changes._replace(own=sorted(trained), strays=sorted(changed & self._others))

    def hear(self, ranks: Sequence[Changed]) -> None:
        """Take what all ranks have told. If weights were written in one replica and not in another,
        ``check`` will compare them. Warns of a weight that was written only on ranks that do not
        train it."""
        group = self._options.group
        devices = len(group.pipeline)
        if any(told.writes != ranks[rank % devices].writes for rank, told in enumerate(ranks)):
            self._same_weights = False
        replica = [ranks[rank] for rank in group.pipeline]
        written = {name for told in replica for name in told.own}
        for rank, told in zip(group.pipeline, replica, strict=True):
            for name in sorted({*told.strays} - written):
                LOGGER.warning(
                    "%s has written the parameter %r, which another rank trains and has not "
                    "written, so that it has no effect; write or load weights on every rank",
                    *(group.members.names[rank], name),
                )
                return

    def check(self, compiled: Compiled) -> None:
        """Compare the replicas' weights and buffers at the first call, and later the weights when
        they may differ. Each step ends with equal buffers.

        Raises:
            RankError: a stage of this process has other values in another replica.
        """
        if not self._several or self._same_weights:
            return
        state = compiled.traced.state_of(self._options.model)
        stages = filter(self._options.owns, range(len(compiled.plan.stages)))
        names = frozenset[str]().union(*map(compiled.names, stages))
        if self._compared:
            names &= {name for name, x in state.items() if isinstance(x, nn.Parameter)}
        self._agree([f"{name}: {digest(state[name])}" for name in sorted(names)])
        self._same_weights = True
        self._left = self._marks()

    def check_settings(self, compiled: Compiled) -> None:
        """Compare the replicas' optimizers at the first step; later ``told`` does.

        Raises:
            RankError: they differ.
        """
        if self._several and self._progress.stages is not None and not self._same_settings:
            self._progress.optimizers_of(compiled.plan)
            self._agree(self._progress.settings())
            self._same_settings = True

    def stepped(self, compiled: Compiled) -> None:
        """Note the weights after a step of a program."""
        if compiled is not self._compiled:
            self._compiled = compiled
            model, owns = self._options.model, self._options.owns
            self._own = owned(model, compiled, owns).used
            self._others = owned(model, compiled, lambda stage: not owns(stage)).used - self._own
        self._left = self._marks()

    def _marks(self) -> dict[str, tuple[int, int]]:
        named = self._options.model.named_parameters()
        return {name: (tensor.data_ptr(), tensor._version) for name, tensor in named}

    def _agree(self, lines: Sequence[str]) -> None:
        self._options.group.agree("what replicas train", "", twins="\n".join(lines))
