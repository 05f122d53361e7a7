"""torch.distributed.pipelining: processes of one thread that talk through gloo."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from torch.distributed.pipelining.stage import _PipelineStageBase

from benchmarks.peers.case import Case
from benchmarks.peers.contender import Contender, index_of


class Pipelining(Contender):
    """One rank of its 1F1B. What a case divides and sequences are cut by hand, anything else, or
    all if asked, by its tracer."""

    def __init__(self, case: Case, rank: int, meeting: str, traced: bool = False) -> None:
        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=case.devices
        )
        model, x, y = case.make()
        stage = stage_of(model, replace(case, parts=None) if traced else case, rank, x)
        self.rank, self.x, self.y = rank, x, y
        self.last = case.devices - 1
        self.schedule = Schedule1F1B(stage, case.microbatches, loss_fn=case.loss)
        self.optimizer = case.optimizer(stage.submod.parameters())

    def meet(self) -> None:
        """See Contender.meet."""
        distributed.barrier()

    def step(self) -> Tensor | None:
        """See Contender.step."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.rank == self.last:
            self.schedule.step(target=self.y, losses=losses)
        else:
            self.schedule.step(*([self.x] if self.rank == 0 else []))
        self.optimizer.step()
        return torch.stack(losses).mean() if losses else None

    def close(self) -> None:
        """See Contender.close."""
        distributed.destroy_process_group()


def stage_of(model: nn.Module, case: Case, rank: int, x: Tensor) -> _PipelineStageBase:
    """The part of a model that a rank trains."""
    device = torch.device("cpu")
    if case.parts:
        return PipelineStage(case.parts(model)[rank], rank, case.devices, device)
    if isinstance(model, nn.Sequential):
        ends = [0, *(index_of(model, cut) for cut in case.cuts), len(model)]
        return PipelineStage(model[ends[rank] : ends[rank + 1]], rank, case.devices, device)
    part = x.tensor_split(case.microbatches)[0]
    split = dict.fromkeys(case.cuts, SplitPoint.BEGINNING)
    return pipeline(model, (part,), split_spec=split).build_stage(rank, device)
