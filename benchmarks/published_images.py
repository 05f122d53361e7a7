"""Predictions of torchgpipe's published runs, layer by layer on paper, and of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import fxpipe
from benchmarks.models.amoebanet import AmoebaNetD
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet
from fxpipe import B, F, R, Recipe, Sizes, U
from fxpipe.extensions.paper.counting import count
from fxpipe.extensions.paper.presets import P40
from fxpipe.extensions.simulator import Simulation
from fxpipe.extensions.simulator.sizes import Workspace
from fxpipe.ir import instruction as ins

GIB = 2**30

aten = torch.ops.aten

Row = Mapping[str, str]

# --- models as torchgpipe has them: a row of layers


class Cat(nn.Module):
    """Joins channels."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1)


class Residual(nn.Module):
    """Adds what a shortcut makes of the second input."""

    def __init__(self, shortcut: nn.Module) -> None:
        super().__init__()
        self.shortcut = shortcut

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = x + self.shortcut(y)
        return z


@dataclass
class Layers:
    """Layers, each with the layers whose results it reads; −1 is the input."""

    modules: list[nn.Module] = field(default_factory=list)
    inputs: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, module: nn.Module, *inputs: int) -> int:
        """Add a layer, by default behind the last one; returns its number."""
        self.modules.append(module)
        self.inputs.append(inputs or (len(self.modules) - 2,))
        return len(self.modules) - 1


def flat_unet(convolutions: int, base: int) -> Layers:
    """Convolution, dropout, norm and ReLU are a layer each, and so is each skip's beginning."""
    model, row, kept = UNet(convolutions, base), Layers(), []
    for down in model.downs:
        for convolution in down:  # type: ignore[attr-defined]
            for module in convolution:
                row.add(module)
        kept.append(row.add(nn.Identity()))
        row.add(model.halve)
    for convolution in model.bottleneck:
        for module in convolution:  # type: ignore[attr-defined]
            row.add(module)
    for up in model.ups:
        larger = row.add(model.enlarge)
        row.add(Cat(), larger, kept.pop())
        for convolution in up:  # type: ignore[attr-defined]
            for module in convolution:
                row.add(module)
    row.add(model.segment)
    return row


def flat_resnet() -> Layers:
    """ResNet-101."""
    model, row = ResNet(), Layers()
    for module in model.stem:
        row.add(module)
    for block in model.blocks:
        identity = row.add(nn.Identity())
        for module in block.residual:  # type: ignore[union-attr]
            last = row.add(module)
        row.add(Residual(block.shortcut), last, identity)  # type: ignore[arg-type]
        row.add(nn.ReLU())
    for module in model.head:
        row.add(module)
    return row


def amoebanet(cells: int, filters: int) -> AmoebaNetD:
    """torchgpipe's AmoebaNet-D, whose largest pools are means: operations.py has them so."""
    model = AmoebaNetD(cells, filters)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for operations in lists:
        for at, pool in enumerate(operations):
            if isinstance(pool, nn.MaxPool2d) and pool.kernel_size == 3:
                mean = nn.AvgPool2d(3, pool.stride, padding=1, count_include_pad=False)
                operations[at] = mean
    return model


def flat_amoebanet(cells: int, filters: int) -> Layers:
    """The stem, each cell, and the head."""
    model, row = amoebanet(cells, filters), Layers()
    before = last = row.add(model.stem)
    for cell in model.cells:
        before, last = last, row.add(cell, last, before)
    row.add(model.head)
    return row


MODELS = {
    "AmoebaNet-D (18,256) 224x224": (lambda: flat_amoebanet(18, 256), 224),
    "U-Net (5,64) 192x192": (lambda: flat_unet(5, 64), 192),
    "ResNet-101 224x224": (flat_resnet, 224),
}

EPOCHS = {
    "AmoebaNet-D (18,256) 224x224": 10_000,
    "U-Net (5,64) 192x192": 10_000,
    "ResNet-101 224x224": 50_000,
}
"""Model → samples of an epoch of torchgpipe's speed benchmarks."""

BALANCE = {
    ("AmoebaNet-D (18,256) 224x224", 2, 1): (7, 17),
    ("AmoebaNet-D (18,256) 224x224", 2, 4): (9, 15),
    ("AmoebaNet-D (18,256) 224x224", 2, 32): (9, 15),
    ("AmoebaNet-D (18,256) 224x224", 4, 1): (3, 4, 5, 12),
    ("AmoebaNet-D (18,256) 224x224", 4, 4): (3, 6, 7, 8),
    ("AmoebaNet-D (18,256) 224x224", 4, 32): (3, 6, 7, 8),
    ("AmoebaNet-D (18,256) 224x224", 8, 1): (2, 2, 2, 2, 2, 3, 4, 7),
    ("AmoebaNet-D (18,256) 224x224", 8, 4): (2, 2, 2, 3, 3, 4, 4, 4),
    ("AmoebaNet-D (18,256) 224x224", 8, 32): (2, 2, 2, 3, 3, 4, 4, 4),
    ("U-Net (5,64) 192x192", 1, 1): (241,),
    ("U-Net (5,64) 192x192", 1, 2): (241,),
    ("U-Net (5,64) 192x192", 2, 32): (104, 137),
    ("U-Net (5,64) 192x192", 4, 16): (30, 66, 84, 61),
    ("U-Net (5,64) 192x192", 8, 40): (16, 27, 31, 44, 22, 57, 27, 17),
    ("ResNet-101 224x224", 1, 1): (370,),
    ("ResNet-101 224x224", 1, 2): (370,),
    ("ResNet-101 224x224", 2, 1667): (135, 235),
    ("ResNet-101 224x224", 4, 256): (44, 92, 124, 110),
    ("ResNet-101 224x224", 8, 150): (26, 22, 33, 44, 44, 66, 66, 69),
}
"""Model, devices, micro-batches → layers of each stage; docs/benchmarks of torchgpipe 0.0.7."""


@dataclass(frozen=True)
class Layer:
    """What a layer takes of a P40 whose products reach the peak, and what it hands on.

    Attributes:
        operations: half → the seconds of its products, and of the bytes of each operation.
        bytes: of its result.
        parameters: their bytes.
    """

    operations: Mapping[str, Sequence[tuple[float, float]]]
    bytes: int
    parameters: int

    def seconds(self, halves: str, efficiency: float) -> float:
        return sum(
            max(computing / efficiency, moving)
            for half in halves
            for computing, moving in self.operations[half]
        )


@cache
def layers(model: str, samples: int) -> tuple[Sequence[Layer], Sequence[tuple[int, ...]]]:
    """The layers of a model for micro-batches of so many samples, counted on the meta device."""
    make, side = MODELS[model]
    device = replace(P40, efficiency=1.0)
    with torch.device("meta"):
        row: Layers = make()  # type: ignore[no-untyped-call]
        values = {-1: torch.empty(samples, 3, side, side)}
        found = []
        for at, (module, inputs) in enumerate(zip(row.modules, row.inputs, strict=True)):
            given = [values[x].detach().requires_grad_(x >= 0) for x in inputs]
            for part in module.modules():
                if isinstance(part, nn.ReLU):
                    part.inplace = False  # as torchgpipe's
            one = count(_Out(module), given, {}, None, samples)
            made: dict[str, list[tuple[float, float]]] = {"F": [], "I": [], "W": []}
            for ran in one.ran:
                moving = max(
                    device.launch, ran.operation.bytes / device.bandwidth / device.streaming
                )
                made[ran.half].append((device.computing(ran.operation), moving))
            with torch.no_grad():
                values[at] = module(*given)
            size = values[at].numel() * 4
            parameters = sum(p.numel() * 4 for p in module.parameters())
            found.append(Layer(made, size, parameters))
    return found, row.inputs


class _Out(nn.Module):
    """A module around a layer, so that the layer has a name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Tensor) -> Tensor:
        y: Tensor = self.module(*given)
        return y


def torchgpipe(keep: int) -> Recipe:
    """Forwards; then backwards in reverse, each behind its recompute, but for ``keep`` of them."""

    @fxpipe.schedule("torchgpipe")
    def made(device: int, devices: int, microbatches: int) -> Any:
        for i in range(microbatches):
            yield F(i)
        for i in reversed(range(microbatches)):
            if i < microbatches - keep:
                yield R(i)
            yield B(i)
        yield U()

    return made


def speed(row: Row, efficiency: float) -> float:
    """Samples a second of an epoch, whose last batch is smaller."""
    chunks, epoch = int(row["microbatches"]), EPOCHS[row["model"]]
    batch = round(float(row["microbatch"]) * chunks)
    whole, rest = divmod(epoch, batch)
    seconds = 0.0
    for times, size in ((whole, batch), (rest > 0, rest)):
        if times:
            samples = ceil(size / chunks)
            seconds += times * _step(row, efficiency, samples, ceil(size / samples))
    return epoch / seconds


def _step(row: Row, efficiency: float, samples: int, chunks: int) -> float:
    """The seconds of a batch of so many micro-batches of so many samples."""
    model, devices = row["model"], int(row["pipeline"])
    balance = BALANCE[model, devices, int(row["microbatches"])]
    some, inputs = layers(model, samples)
    home = [stage for stage, many in enumerate(balance) for _ in range(many)]
    costs: dict[Any, float] = {"F": 0.0, "B": 0.0, "R": 0.0, "U": 0.0}
    for stage in range(devices):
        own = [layer for layer, at in zip(some, home, strict=True) if at == stage]
        forward = sum(layer.seconds("F", efficiency) for layer in own)
        costs["F", stage] = costs["R", stage] = forward
        costs["B", stage] = sum(layer.seconds("IW", efficiency) for layer in own)
        rate = P40.bandwidth * P40.streaming
        costs["U", stage] = sum(3 * layer.parameters for layer in own) / rate
    between: dict[tuple[int, int], int] = {}
    for at, sources in enumerate(inputs):
        for source in {s for s in sources if s >= 0 and home[s] != home[at]}:
            pair = home[source], home[at]
            between[pair] = between.get(pair, 0) + some[source].bytes
    values = {f"y{stage}": between.pop((stage, stage + 1), 0) for stage in range(devices)}
    edges = {f"skip{a}-{b}": (a, b) for a, b in between}
    values |= {f"skip{a}-{b}": size for (a, b), size in between.items()}
    keep = {"never": chunks, "always": 0, "except_last": 1}[row["recomputation"]]
    few = _few(devices, chunks)
    times = []
    for microbatches in few:
        schedule = torchgpipe(min(keep, microbatches))(devices, microbatches)
        run = schedule.simulate(costs, links=P40.link, sizes=Sizes(values), edges=edges)
        times.append(run.makespan)
    seconds = times[0]
    if len(times) > 1:
        seconds += (times[1] - times[0]) / (few[1] - few[0]) * (chunks - few[0])
    return float(seconds)


def _few(devices: int, chunks: int) -> tuple[int, ...]:
    """The numbers of micro-batches to simulate; many are told from two fewer."""
    return (chunks,) if chunks <= 64 else (4 * devices, 5 * devices)


# --- memory of torchgpipe's models, compiled on paper

CUTS = {
    "U-Net (6,72) 192x192": ((6, 72), ()),
    "U-Net (11,128) 192x192": ((11, 128), ()),
    "U-Net (24,128) 192x192": ((24, 128), ("bottleneck.9",)),
    "U-Net (24,160) 192x192": ((24, 160), ("downs.4.20", "bottleneck.9", "bottleneck.18")),
    "U-Net (48,160) 192x192": (
        (48, 160),
        (
            *("downs.4.6", "downs.4.41", "bottleneck.8", "bottleneck.17", "bottleneck.26"),
            *("bottleneck.35", "bottleneck.44"),
        ),
    ),
    "AmoebaNet-D (18,208) 224x224": ((18, 208), ()),
    "AmoebaNet-D (18,416) 224x224": ((18, 416), ()),
    "AmoebaNet-D (18,544) 224x224": ((18, 544), (16,)),
    "AmoebaNet-D (36,544) 224x224": ((36, 544), (16, 28, 35)),
    "AmoebaNet-D (72,512) 224x224": ((72, 512), (23, 39, 50, 56, 62, 67, 72)),
}
"""Model → its sizes, and the submodules, or layers, at which stages begin."""


def memory(model: str) -> float:
    """GiB that the allocators of all devices have reserved in torchgpipe's memory benchmarks.

    To what a step holds in torchgpipe's order they add, as in PyTorch 1:

    - gradients from the start, as the benchmarks never set them to zero between their two steps;
    - while a 3 × 3 convolution runs, at least its filters as Winograd's algorithm transforms them,
      to 6 × 6, without which U-Net's convolutions could not be as fast as they are published;
    - what a device has sent, until its forwards, or its backwards, are over: another stream reads
      it, and Python launches far ahead of the device.

    If that does not fit, the allocator gives back blocks, and convolutions do without workspaces.
    """
    with on_paper(model) as pipe:
        run = pipe.simulate()
        assert run.sizes is not None
        sizes = two_steps(run.sizes)
        held = run.with_costs(run.costs, sizes=replace(sizes, runs=winograd(pipe, sizes.runs)))
    most = P40.memory - P40.context
    reserved = [min(held.memory[d].peak + _sent(run, d), most) for d in range(run.devices)]
    return float(sum(reserved) / GIB)


def on_paper(model: str) -> fxpipe.Pipeline:
    """A model of the memory benchmarks, compiled with torchgpipe's cuts and order."""
    sizes, cuts = CUTS[model]
    name = model.split(" ")[0]
    batch, side = (32, 192) if name == "U-Net" else (128, 224)
    baseline = model.startswith(("U-Net (6,72)", "AmoebaNet-D (18,208)"))
    at = [cut if isinstance(cut, str) else f"cells.{cut - 1}" for cut in cuts]
    with torch.device("meta"):
        made: nn.Module = (UNet if name == "U-Net" else amoebanet)(*sizes)
        x = torch.zeros(batch, 3, side, side)
        y = torch.zeros(batch, 1, side, side) if name == "U-Net" else torch.zeros(batch).long()
    loss: Any = binary_cross_entropy_with_logits if name == "U-Net" else cross_entropy
    optimizer: Any = torch.optim.SGD if name == "U-Net" else torch.optim.RMSprop
    return fxpipe.compile(
        made,
        ["cpu"] * (len(at) + 1),
        schedule=torchgpipe(1),
        microbatches=1 if baseline else batch,
        loss=loss,
        optimizer=lambda parameters: optimizer(parameters, lr=0.1),
        partition=at or "auto",
        example=((x,), {"target": y}),
        costs=replace(P40, context=0),  # what torch's allocator reports
    )


def two_steps(sizes: Sizes) -> Sizes:
    """Sizes with gradients that are there from the start, to which each backward adds."""
    resident = {s: size + sizes.gradients[s] for s, size in sizes.parameters.items()}
    runs = {**sizes.runs, **sizes.adding}
    return replace(sizes, parameters=resident, gradients={}, elements={}, runs=runs)


Runs = Mapping[tuple[str, int], Workspace]


def winograd(pipe: fxpipe.Pipeline, runs: Runs) -> Runs:
    """Runs with the transformed filters of 3 × 3 convolutions."""
    found = dict(runs)
    for stage in pipe.plan.stages:
        for letters, module in (("FR", stage.forward), ("B", stage.backward)):
            assert module is not None
            nodes = [node for node in module.graph.nodes if node.op != "placeholder"]
            for letter in letters:
                run = found[letter, stage.index]
                levels = zip(run.levels, map(_transformed, nodes), strict=True)
                found[letter, stage.index] = replace(run, levels=tuple(a + b for a, b in levels))
    return found


WEIGHTS: Mapping[Any, int] = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Operation → which of its arguments are the filters."""


def _transformed(node: fx.Node) -> int:
    """The bytes of a convolution's transformed filters; 0 if Winograd's algorithm cannot do it."""
    if node.target not in WEIGHTS:
        return 0
    at = WEIGHTS[node.target]
    args: Any = node.args
    outer, inner, *sides = args[at].meta["val"].shape
    stride = [*args[at + 2]]
    return 36 * outer * inner * 4 if sides == [3, 3] and stride == [1, 1] else 0


def _sent(run: Simulation, device: int) -> int:
    """The bytes that a device sends in all forwards, or in all backwards, whatever is more."""
    assert run.sizes is not None
    sent = [0, 0]
    for x in run.program.lists[device]:
        if isinstance(x, ins.Send):
            sent[x.buffer.kind == "grad"] += run.sizes.crossing(x.buffer)
    return max(sent)
