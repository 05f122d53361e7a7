"""Compare how fxpipe and torchgpipe's ``balance_by_time`` divide torchgpipe's own chain models.

Run it with ``python -m benchmarks.chains``; torchgpipe must be installed. Both divide by the same
times: first torchgpipe's times of whole layers, then fxpipe's times of single operations, which
are summed over each layer for torchgpipe.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import describe
from benchmarks.models.amoebanet import AmoebaNetD
from benchmarks.models.pairs import Cell, First, Twice
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet
from benchmarks.report import Grid, Report
from fxpipe.ir.traced import Value
from fxpipe.passes.differentiate.divide import Wanted, divide
from fxpipe.passes.differentiate.part_backward import part_backward
from fxpipe.passes.graph.randomness import seed_randomness
from fxpipe.passes.partition.assignment import one_stage
from fxpipe.passes.partition.atoms import Atoms, Footprint, atoms_of
from fxpipe.passes.partition.cut import cut
from fxpipe.passes.partition.measure import measure
from fxpipe.passes.partition.solve import SLACK, Partitioner
from fxpipe.passes.partition.work import StageDevices, Transfer, Work
from fxpipe.passes.tracing.capture import capture
from fxpipe.torchtools.source import module_paths

STAGES = (2, 4, 8)
SECONDS = 10.0
"""How long torchgpipe measures a model."""


def main() -> int:
    """Run the benchmark; returns 1 if a model is divided over 1 % worse than by torchgpipe."""
    machine = describe()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    worst = 0.0
    for name, model, batch in models():
        theirs = profiled(model, batch)
        atoms = measured(model, batch)
        ours = layer_times(atoms)
        for stages in STAGES:
            reached = slowest_block(theirs, stages)
            chain = divided(as_chain(theirs), stages)
            blocks = slowest_block(ours, stages)
            free = 1e3 * divided(atoms.work, stages)
            worst = max(worst, chain / reached, free / blocks)
            by_layers = (reached, chain, chain / reached)
            by_operations = (blocks, free, free / blocks)
            rows.append([name, str(stages), *(_cell(*by_layers)), *(_cell(*by_operations))])
    headings = ["model", "stages"]
    for times in ("its times", "our times"):
        headings += [f"torchgpipe, {times}", f"fxpipe, {times}", "ratio"]
    settings = {
        "figures": "the slowest stage, in ms of forward and backward",
        "its times": f"of layers, by torchgpipe's profile_times: all its runs of {SECONDS:g} s",
        "our times": "of operations, the best of some runs; torchgpipe gets them summed by layer",
        "greatest ratio": f"{worst:.4f}",
    }
    title = "Balancing torchgpipe's chain models"
    Report("chains", title, settings, [], machine, [Grid(headings, rows)]).publish()
    return 0 if worst <= (1 + SLACK) * (1 + 1e-9) else 1


def models() -> list[tuple[str, nn.Sequential, Tensor]]:
    """ResNet-101, U-Net (5, 16) and AmoebaNet-D (6, 64) as sequences, with a batch each."""
    torch.manual_seed(0)
    return [
        ("ResNet-101", resnet(ResNet(width=16)), torch.randn(4, 3, 64, 64)),
        ("U-Net (5, 16)", unet(UNet(5, 16, dropout=0.0)), torch.randn(2, 3, 64, 64)),
        ("AmoebaNet-D (6, 64)", amoebanet(AmoebaNetD(6, 64)), torch.randn(4, 3, 64, 64)),
    ]


def resnet(model: ResNet) -> nn.Sequential:
    layers = (*model.stem.children(), *model.blocks.children(), *model.head.children())
    return nn.Sequential(*map(_out_of_place, layers))


def unet(model: UNet) -> nn.Sequential:
    """Return a U-Net with one convolution per layer, which passes skips from layer to layer."""
    layers: list[nn.Module] = []
    for down in model.downs:
        first, *others = down.children()
        layers += [_Keeping(nn.Sequential(*([nn.MaxPool2d(2)] if layers else []), first))]
        layers += map(_Keeping, others)
        layers.append(_Fork())
    first, *others = model.bottleneck.children()
    layers += [_Keeping(nn.Sequential(nn.MaxPool2d(2), first)), *map(_Keeping, others)]
    for up in model.ups:
        layers += [_Join(), *map(_Keeping, up.children())]
    return nn.Sequential(*layers, _Keeping(model.segment), First())


def amoebanet(model: AmoebaNetD) -> nn.Sequential:
    """Return an AmoebaNet with one cell per layer; layers pass the last two results on."""
    return nn.Sequential(model.stem, Twice(), *map(Cell, model.cells), First(), *model.head)


def profiled(model: nn.Sequential, batch: Tensor) -> list[float]:
    """Layer → milliseconds of all runs, as ``balance_by_time`` measures them."""
    profile: Any = importlib.import_module("torchgpipe.balance.profile")
    times = profile.profile_times(model, batch, SECONDS, torch.device("cpu"))
    return [microseconds / 1e3 for microseconds in times]


def slowest_block(times: Sequence[float], stages: int) -> float:
    """The slowest of the blocks into which ``balance_by_time`` divides layers."""
    balance: Any = importlib.import_module("torchgpipe.balance")
    sizes = balance.balance_cost(list(times), stages)
    ends = [0, *itertools.accumulate(sizes)]
    return max(sum(times[start:end]) for start, end in itertools.pairwise(ends))


def as_chain(times: Sequence[float]) -> Work:
    """Layers that are never cut, one after the other."""
    none = (0,) * len(times)
    values = tuple(Transfer(i, (i + 1,), 1, True) for i in range(len(times) - 1))
    return Work(tuple(times), none, none, values)


def divided(work: Work, stages: int) -> float:
    """The slowest stage here."""
    found = Partitioner().divide(work, StageDevices.equal(stages))
    assert found is not None
    return found.slowest


def measured(model: nn.Sequential, batch: Tensor) -> Atoms:
    """The atoms of a sequence, with the times of its operations."""
    captured = capture(model, None, (batch,), {}, (), (), ["x"], [False], step=False)
    traced = seed_randomness(captured)
    values = {name: batch for name in traced.inputs if name is not None}
    state = traced.state_of(model)
    wanted = Wanted(frozenset(out.name for out in traced.outputs if isinstance(out, Value)))
    plan = divide(cut(traced, one_stage(traced), {}), traced, state, wanted)
    plan = part_backward(plan)
    costs = measure(traced, plan, values, state)
    return atoms_of(traced, costs, Footprint())


def layer_times(atoms: Atoms) -> list[float]:
    """Layer → milliseconds of its operations, in the order of the layers."""
    times: dict[str, float] = {}
    for nodes, seconds in zip(atoms.nodes, atoms.work.seconds, strict=True):
        layer = (module_paths(nodes[0]) or [nodes[0].name])[0]
        times[layer] = times.get(layer, 0.0) + 1e3 * seconds
    return list(times.values())


def _cell(theirs: float, ours: float, ratio: float) -> list[str]:
    return [f"{theirs:.4g}", f"{ours:.4g}", f"{ratio:.4f}"]


def _out_of_place(layer: nn.Module) -> nn.Module:
    """Make a layer keep its input: torchgpipe measures each layer on the previous one's output."""
    for module in layer.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return layer


class _Keeping(nn.Module):
    """Applies a layer to the first of some values, and passes the others on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: Any) -> tuple[Tensor, ...]:
        x, *across = values if isinstance(values, tuple) else (values,)
        return self.layer(x), *across


class _Fork(nn.Module):
    """Adds the current value to the skips that layers pass on."""

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return values[0], *values


class _Join(nn.Module):
    """Upsamples the value and concatenates the latest skip."""

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, last, *across = values
        larger = nn.functional.interpolate(x, scale_factor=2.0)
        return torch.cat([larger, last], dim=1), *across


if __name__ == "__main__":
    sys.exit(main())
