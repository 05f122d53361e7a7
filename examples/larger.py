"""Train a model that no single process could hold: each rank allocates only its own stages.

Start it with::

    torchrun --standalone --nproc-per-node=4 -m examples.larger

Every process limits itself to less memory than the weights of the whole model take. Training takes
twice as much as the weights: the weights and their gradients.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss

import fxpipe

WIDTH, DEPTH = 3072, 16
WEIGHTS = 4 * DEPTH * WIDTH * (WIDTH + 1)
"""The bytes of all weights of the model."""


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)))


def address_space() -> int:
    """Return how many bytes of address space this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_memory(more: int) -> None:
    """Let this process allocate at most ``more`` bytes of address space from now on."""
    ctypes.CDLL(None).mallopt(-8, 1)  # one arena for all threads: each arena reserves address space
    most = address_space() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def train(mesh: DeviceMesh, steps: int) -> tuple[list[float], int]:
    """Return the losses of some steps, and the bytes of the weights that this rank holds."""
    with torch.device("meta"):
        model = layers()
    x = torch.ones(8, WIDTH)
    with fxpipe.compile(
        model,
        mesh,
        microbatches=4,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=30.0),
        example=((x,), {"target": x}),  # compiles now, so that ranks know their stages
    ) as pipe:
        torch.manual_seed(0)
        pipe.reset_parameters()  # or pipe.load("run")
        losses = [float(pipe.step(x, target=x)) for _ in range(steps)]
        return losses, sum(value.nbytes for value in pipe.state_dict().values())


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    torch.set_num_threads(1)
    limit_memory(int(0.95 * WEIGHTS))
    losses, own = train(mesh, steps=3)
    print(f"rank {dist.get_rank()} has {own >> 20} of {WEIGHTS >> 20} MiB; losses {losses}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
