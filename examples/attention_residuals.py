"""Train a transformer in which every block reads the outputs of all earlier ones, over 4 devices.

    python -m examples.attention_residuals
    torchrun --standalone --nproc-per-node=4 -m examples.attention_residuals

A block's input is an average of the embedding and of what all blocks before it gave, weighted by
attention over depth ("Attention Residuals", Kimi Team, 2026), where an ordinary transformer has
their sum. So each value crosses all later stages. It is sent to the next stage that reads it and
kept there (stashed) for those after it, and its gradient comes back the same way. A plain loop over
the micro-batches must give the same losses and weights to the last bit.

``torch.distributed.pipelining`` cuts this model, but cannot train it: its backward ends with
"Backward of skip connections not supported yet" (torch 2.13). ``benchmarks.residuals`` times this
model beside peers that are given parts which hand all values on.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention

import fxpipe
from examples import plain

DEVICES, BLOCKS, MICROBATCHES, BATCH = 4, 8, 8, 32
WORDS, LENGTH, WIDTH, HEADS = 32, 64, 96, 4
CUTS = [f"blocks.{BLOCKS // DEVICES * stage}" for stage in range(1, DEVICES)]


class Block(nn.Module):
    """Attention over depth, then causal attention over the sequence and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(WIDTH))
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, earlier: list[Tensor]) -> Tensor:
        """Compute a value like each of the earlier ones: samples × positions × width."""
        values = torch.stack(earlier)
        weights = (rms_norm(values, (WIDTH,)) @ self.query).softmax(0)
        x = (weights.unsqueeze(-1) * values).sum(0)
        heads = self.attention(rms_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        narrow: Tensor = self.narrow(self.wide(rms_norm(x, (WIDTH,))).relu())
        return narrow


class Transformer(nn.Module):
    """Predicts the next word at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        values = [self.words(words) + self.positions.weight]
        for block in self.blocks:
            values.append(block(values))
        scores: Tensor = self.last(rms_norm(torch.stack(values).sum(0), (WIDTH,)))
        return scores


def loss_of(made: Tensor, words: Tensor) -> Tensor:
    return cross_entropy(made.flatten(0, 1), words.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Sequences whose second half repeats the first, and what follows each word."""
    generator = torch.Generator().manual_seed(number)
    half = torch.randint(WORDS, (BATCH, LENGTH // 2), generator=generator)
    words = torch.cat([half, half, half[:, :1]], dim=1)
    return words[:, :-1], words[:, 1:]


def main() -> None:
    """Train, and compare with a plain loop."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    devices: DeviceMesh | int = DEVICES
    if "WORLD_SIZE" in os.environ:
        devices = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of each device
    model = Transformer()
    alone = copy.deepcopy(model)
    adam = torch.optim.Adam(alone.parameters(), lr=1e-3)
    with fxpipe.compile(
        model,
        devices,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        loss=loss_of,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        partition=CUTS,
        example=((batch(0)[0],), {"target": batch(0)[1]}),
    ) as pipe:
        times: dict[str, list[float]] = {"fxpipe": [], "the plain loop": []}
        same = True
        for number in range(steps):
            x, y = batch(number)
            begin = time.perf_counter()
            loss = pipe.step(x, target=y)
            between = time.perf_counter()
            expected = plain.step(alone, loss_of, adam, x, y, MICROBATCHES)
            times["fxpipe"].append(between - begin)
            times["the plain loop"].append(time.perf_counter() - between)
            same &= torch.equal(loss, expected)
        weights = pipe.state_dict(full=True)
        same &= all(torch.equal(weights[name], x) for name, x in alone.state_dict().items())
        if os.environ.get("RANK", "0") == "0":
            print(pipe)
            same_or_not = "equal bit for bit to" if same else "NOT equal to"
            print(f"loss {float(loss):.4f} after {steps} steps, {same_or_not} the loop's")
            for name, each in times.items():
                print(f"a step of {name}: {1000 * median(each):.0f} ms")


if __name__ == "__main__":
    main()
