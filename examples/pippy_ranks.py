"""Train over two processes, each with a stage.

    torchrun --standalone --nproc-per-node=2 -m examples.pippy_ranks
    torchrun --standalone --nproc-per-node=2 -m examples.piped_ranks

The first script is one of torch.distributed.pipelining (once PiPPy), the second the same with
fxpipe. Both log the same losses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn.functional import mse_loss

MICROBATCHES, STEPS = 4, 5


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def train() -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the weights of this process."""
    rank, losses = dist.get_rank(), []
    model = make_model()
    x = torch.randn(16, 16)
    parts = pipeline(model, (x[:4],), split_spec={"2": SplitPoint.BEGINNING})
    stage = parts.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        own: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.roll(1, 0), losses=own)
            losses.append(torch.stack(own).mean().item())
            print(f"loss {losses[-1]:.6f}")
        optimizer.step()
    return losses, stage.submod.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
