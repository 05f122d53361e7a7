"""Train over several processes, and resume from the last checkpoint when one of them dies.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/train_ranks.py

Each process runs one stage of the model. When one dies, torchrun restarts all of them, and they
resume from the last checkpoint and reach the same weights as if nothing had happened. Without the
variable, restarted processes may try to connect to dead ones under PyTorch's gloo. ``python
examples/train_ranks.py`` trains in one process.

``--nproc-per-node=4`` with ``--replicas=2`` at the end trains two pipelines of two processes, each
on its half of every batch.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss

import fxpipe

WIDTH = 32


def make_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*blocks)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return the batch of this number, the same in every process and after every restart."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, WIDTH, generator=generator)
    return x, x.roll(1, dims=1).tanh()


def mesh_of(replicas: int = 1) -> DeviceMesh | int:
    """Return the mesh of the processes that torchrun has started; one device without it."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return 1
    return init_device_mesh("cpu", (replicas, processes // replicas), mesh_dim_names=("dp", "pp"))


def train(folder: str, steps: int, every: int, devices: DeviceMesh | int) -> None:
    """Train until ``steps`` batches are done, with a checkpoint after every ``every`` batches."""
    own = slice(None)  # which samples of a batch this process trains on
    if not isinstance(devices, int):
        own = slice(devices.get_local_rank("dp"), None, devices.size(0))
    with fxpipe.compile(
        make_model(),
        devices,
        schedule="1f1b",
        microbatches=4,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        example=(batch(0)[0][own],),
    ) as pipe:
        pipe.load(folder, must_exist=False)
        while pipe.batches < steps:
            x, y = batch(pipe.batches)
            loss = pipe.step(x[own], target=y[own])
            if pipe.batches % every == 0 or pipe.batches == steps:
                pipe.save(folder)
                if os.environ.get("RANK", "0") == "0":
                    print(f"step {pipe.batches}: loss {float(loss):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="train-ranks", help="where the checkpoint is")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--replicas", type=int, default=1, help="how many pipelines train together")
    options = parser.parse_args()
    train(options.folder, options.steps, options.every, mesh_of(options.replicas))
