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

    def __init__(
        self, case: Case, devices: DeviceMesh | None = None, built_on: str = "cpu", **options: Any
    ) -> None:
        torch.set_num_threads(1 if devices else case.devices)  # one for each device
        model, self.x, self.y = case.make(built_on)
        if case.parts:
            options["partition"] = list(case.cuts)
        self.pipe = fxpipe.compile(
            model,
            devices or ["cpu"] * case.devices,
            microbatches=case.microbatches,
            loss=case.loss,
            optimizer=case.optimizer,
            example=((self.x,), {"target": self.y}) if built_on == "meta" else None,
            **options,
        )
        if built_on == "meta":
            self.pipe.reset_parameters()

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

    def __init__(self, case: Case, rank: int, meeting: str, built_on: str = "cpu") -> None:
        size = case.devices
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
        super().__init__(case, mesh, built_on)

    def meet(self) -> None:
        """See Contender.meet."""
        distributed.barrier()

    def close(self) -> None:
        """See Contender.close."""
        super().close()
        distributed.destroy_process_group()
