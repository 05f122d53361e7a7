"""The extension that lets stages store what they keep outside of their devices' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.arguments import read_modes
from fxpipe.compiler.options import Options
from fxpipe.extend import Extension
from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.runner import Pass
from fxpipe.passes.schedule import RecomputeLike


@dataclass(frozen=True)
class Offload(Extension):
    """Let stages store what they keep for their backwards (their inputs, if they recompute) outside
    of their devices' memory, and fetch it in time; both happen beside their computations.

    CUDA devices store in pinned host memory, and CPU devices in an unnamed file in the folder of
    Python's ``tempfile`` (TMPDIR).

    Attributes:
        modes: which stages do, as for ``recompute`` of ``compile``: "never", "always", or
            "except_last" (all micro-batches but the last), a list of modes, or stage → mode.
    """

    modes: RecomputeLike = "always"

    def check(self, options: Options) -> None:
        """Raise InputError if there is no such mode or stage."""
        read_modes("Offload", self.modes, options.recipe.stages(len(options.devices)))

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """A pass behind all others that add tasks to a schedule."""
        return {"schedule": [("add_clip", Pass(self.add_offload, "schedule", "schedule"))]}

    def add_offload(self, schedule: Schedule) -> Schedule:
        """Add offloads and prefetches; a pass."""
        return add_offload(schedule, self.modes)
