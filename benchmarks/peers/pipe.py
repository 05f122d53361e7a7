"""fxpipe itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxpipe
from benchmarks.peers.case import Case
from benchmarks.peers.contender import Contender


class Pipe(Contender):
    """It is told nothing of the model but the model; where others divide it by hand, the cuts."""

    def __init__(self, case: Case, devices: DeviceMesh | None = None, **options: Any) -> None:
        torch.set_num_threads(1 if devices else case.devices)  # one for each device
        model, self.x, self.y = case.make()
        if case.parts:
            options["partition"] = list(case.cuts)
        self.pipe = fxpipe.compile(
            model,
            devices or ["cpu"] * case.devices,
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


class RankPipe(Pipe):
    """One rank of a pipe over processes."""

    def __init__(self, case: Case, rank: int, meeting: str) -> None:
        size = case.devices
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        super().__init__(case, init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)))

    def meet(self) -> None:
        """See Contender.meet."""
        distributed.barrier()

    def close(self) -> None:
        """See Contender.close."""
        super().close()
        distributed.destroy_process_group()
