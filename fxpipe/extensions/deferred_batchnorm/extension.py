"""The extension that gathers the statistics of BatchNorm over a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.compiler.options import Options
from fxpipe.extend import Extension
from fxpipe.extensions.deferred_batchnorm.defer_batchnorm import defer_batchnorm
from fxpipe.passes.runner import Pass

_PASSES = {"join": [("seed_randomness", Pass(defer_batchnorm, "traced, model", "traced"))]}


@dataclass(frozen=True)
class DeferredBatchNorm(Extension):
    """Update BatchNorm's running statistics once per step, by the mean and variance of the whole
    batch, as without micro-batches.

    These are computed from those of the micro-batches, so the last bits may differ. Without this
    extension each micro-batch updates the statistics, in order. Either way each micro-batch is
    normalised by its own statistics.
    """

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """A pass behind the one that seeds random numbers."""
        return _PASSES
