"""What runs the list of a rank's device on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxpipe.extensions.ranks.channels import RankChannels
from fxpipe.extensions.ranks.group import RankGroup
from fxpipe.extensions.ranks.pairs import PairGroups
from fxpipe.extensions.ranks.program import OwnProgram
from fxpipe.ir.program import Program
from fxpipe.runtime.backend import Backend
from fxpipe.runtime.host import Job


class RankBackend(Backend):
    """Runs the list of this rank's device, on a CPU."""

    group: RankGroup
    between: type[RankChannels] = RankChannels

    def __init__(self, group: RankGroup, device: torch.device, in_order: bool) -> None:
        """Make no process groups yet. ``in_order`` is as in RankChannels."""
        super().__init__(group)
        self.pairs, self._in_order = PairGroups(group, device), in_order

    def devices(self, program: Program) -> Sequence[int]:
        return (self.group.device,)

    def channels(self, program: Program, threads: int, jobs: Mapping[int, Job]) -> Any:
        """Also makes the process groups that the program needs and that do not exist yet; all anew
        after a failure. Raises like PairGroups.connect."""
        assert isinstance(program, OwnProgram)
        if self.pairs.number != self.group.epoch:
            self.pairs.abort()
            self.pairs.drained()
            self.pairs = PairGroups(self.group, self.pairs.device)
        self.pairs.connect(program)
        return self.between(program, self.group, jobs, self.pairs, self._in_order)

    def end(self) -> None:
        self.pairs.drained()  # after a failure, until no stream waits for other ranks
        super().end()

    def close(self) -> None:
        self.pairs.abort()
        super().close()
