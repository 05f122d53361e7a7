"""Time a causal transformer in slices of its sequences beside whole sequences, over two devices.

    python -m benchmarks.slices

Few micro-batches of long sequences: the devices of ``1f1b`` wait for a whole sequence, and those of
``seq1f1b`` for a slice. All take turns, and the medians over the rounds are printed, with the
memory that is predicted for the fuller device.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Report
from fxpipe.schedules.one_f_one_b import seq1f1b

WIDTH, HEADS, LAYERS, WORDS, LENGTH, MICROBATCHES = 256, 4, 8, 1000, 1024, 2


class Block(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.second(x))
        return out


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    machine = describe()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    words, target = torch.randint(WORDS, (2, MICROBATCHES, LENGTH))
    pipes: dict[str, Any] = {}
    for name, recipe, own in (
        ("1f1b", "1f1b", []),
        *((f"seq1f1b({n})", seq1f1b(n), [fxpipe.Slices(dim=1)]) for n in (2, 4)),
    ):
        given: dict[str, Any] = {"schedule": recipe, "extensions": own}
        twin = copy.deepcopy(model)
        sgd = torch.optim.SGD(twin.parameters(), lr=0.01)
        pipes[name] = fxpipe.compile(
            twin, 2, microbatches=MICROBATCHES, loss=loss, optimizer=sgd, partition=["5"], **given
        )
        pipes[name].prepare(words, target=target)
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for round_ in range(options.rounds + 1):
        for name in random.sample(list(pipes), len(pipes)):
            begin = time.perf_counter()
            float(pipes[name].step(words, target=target))
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    found = {
        name: {
            "seconds": median(seconds[name]),
            "MiB": max(device.peak for device in pipe.simulate().memory) / 2**20,
        }
        for name, pipe in pipes.items()
    }
    whole = found["1f1b"]["seconds"]
    Report(
        name="slices",
        title="A causal transformer in slices of its sequences, over two CPU devices",
        settings={
            "model": f"{LAYERS} blocks of width {WIDTH}, SGD",
            "batch": f"{MICROBATCHES} micro-batches of one sequence of {LENGTH}",
            "rounds": options.rounds,
        },
        figures=[
            *(Figure(name, each["seconds"], "s") for name, each in found.items()),
            *(
                Figure(f"{name}, over 1f1b's speed", whole / each["seconds"])
                for name, each in found.items()
                if name != "1f1b"
            ),
            *(
                Figure(f"{name}, predicted for the fuller device", each["MiB"], "MiB")
                for name, each in found.items()
            ),
        ],
        machine=machine,
        samples=seconds,
    ).publish()
    for pipe in pipes.values():
        pipe.close()


if __name__ == "__main__":
    main()
