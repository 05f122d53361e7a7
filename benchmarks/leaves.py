"""Measure what one untraceable function costs a GPT-2-like model under zero bubble.

``plain`` has PyTorch's GELU in all blocks. ``custom`` has in its middle block an autograd function
that reads a number on the way back, which no graph can hold: the smallest submodule around it is
called as it is. ``same`` has the same arithmetic in that block as ``custom``, traced. Steps run in
turns. Run it with ``python -m benchmarks.leaves`` on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from examples import plain
from fxpipe.ir.called import calls_in

WIDTH, HEADS, BLOCKS, WORDS = 256, 4, 8, 1000
DEVICES, MICROBATCHES = 2, 8


class Quick(torch.autograd.Function):
    """GELU by a sigmoid, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(1.702 * x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        if math.isnan(float(gradient.flatten()[0])):  # which no graph can ask
            raise ValueError("a gradient is not a number")
        found: Tensor = gradient * gate * (1 + 1.702 * x * (1 - gate))
        return found


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Quick.apply(x)  # type: ignore[no-untyped-call]
        return y


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outward(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(self.activation(self.up(self.norms[1](x))))
        return y


class Model(nn.Module):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        middle = BLOCKS // 2
        self.blocks = nn.ModuleList(
            Block(activation() if k == middle else nn.GELU()) for k in range(BLOCKS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x)).flatten(0, 1)
        return y


def loss(made: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(made, target.flatten())


KINDS: dict[str, type[nn.Module]] = {"plain": nn.GELU, "same": Same, "custom": Custom}


def pipe_of(model: nn.Module) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        DEVICES,
        microbatches=MICROBATCHES,
        schedule="zb-h1",
        loss=loss,
        partition=[f"blocks.{BLOCKS // 2}"],
    )


def looped(kind: str, words: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The gradients of the plain loop."""
    model = Model(KINDS[kind])
    pairs = zip(words.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    with plain.one_thread():
        for part, wanted in pairs:
            (loss(model(part), wanted) / MICROBATCHES).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args(arguments)
    words = torch.randint(WORDS, (2 * MICROBATCHES, options.length))
    target = torch.randint(WORDS, words.shape)
    models = {kind: Model(of) for kind, of in KINDS.items()}
    pipes = {kind: pipe_of(model) for kind, model in models.items()}
    for kind, pipe in pipes.items():
        start = time.process_time()
        pipe.step(words, target=target)
        seconds = time.process_time() - start
        expected = looped(kind, words, target)
        alike = sum(
            torch.equal(p.grad, expected[name])
            for name, p in models[kind].named_parameters()
            if p.grad is not None
        )
        halves = [stage.input_grad is not None for stage in pipe.plan.stages]
        leaves = [str(n.target) for s in pipe.plan.stages for n in calls_in(s.graph.graph.nodes)]
        print(
            f"{kind}: first step {seconds:.1f} s; {alike} of {len(expected)} gradients are the "
            f"loop's to the bit; halves {halves}; {leaves}"
        )
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind, pipe in pipes.items():
            begin = time.process_time(), time.perf_counter()
            pipe.step(words, target=target)
            now = time.process_time(), time.perf_counter()
            times[kind].append((now[0] - begin[0], now[1] - begin[1]))
    for at, what in enumerate(("processor", "wall")):
        for kind, own in times.items():
            middle = median(each[at] for each in own)
            ratio = median(a[at] / b[at] for a, b in zip(own, times["same"], strict=True))
            print(f"{what} time of a step, {kind}: {1e3 * middle:.1f} ms, × {ratio:.3f}")
    for pipe in pipes.values():
        pipe.close()


if __name__ == "__main__":
    main()
