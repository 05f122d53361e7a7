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
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import fxpipe

MICROBATCHES, STEPS = 4, 5


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def train() -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the weights of this process."""
    rank, losses = dist.get_rank(), []
    model = make_model()
    x = torch.randn(16, 16)
    with fxpipe.compile(
        model,
        init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        schedule="1f1b",
        microbatches=MICROBATCHES,
        partition=["2"],
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    ) as pipe:
        for _ in range(STEPS):
            losses.append(pipe.step(x, target=x.roll(1, 0)).item())
            if rank == 1:
                print(f"loss {losses[-1]:.6f}")
        return losses, pipe.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
