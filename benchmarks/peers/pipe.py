"""fxpipe itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fxpipe
from benchmarks.peers.case import DEVICES, Case
from benchmarks.peers.contender import Contender


class Pipe(Contender):
    """It is told nothing of the model but the model."""

    def __init__(self, case: Case, **options: Any) -> None:
        torch.set_num_threads(DEVICES)  # one for each device
        model, self.x, self.y = case.make()
        self.pipe = fxpipe.compile(
            model,
            ["cpu"] * DEVICES,
            microbatches=case.microbatches,
            loss=case.loss,
            optimizer=case.optimizer,
            **options,
        )

    def step(self) -> Tensor:
        """See Contender.step."""
        loss: Tensor = self.pipe.step(self.x, target=self.y)
        return loss

    def settle(self) -> None:
        """See Contender.settle."""
        self.pipe.flush()

    def close(self) -> None:
        """See Contender.close."""
        self.pipe.close()
