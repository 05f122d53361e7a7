"""Measure what overlapped copies, direct skips and CUDA graphs gain, on a U-Net.

Without overlap a value is copied to a device only after all that was launched there before.
Without direct skips every stage between producer and consumer passes the skip on. With CUDA graphs
a stage's forward and backward are launched as a whole instead of operation by operation. Random
operations cannot be captured, so this row, and a row to compare it with, have no dropout.
Run it with ``python -m benchmarks.gpu.ablation``; see the README beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.gpu.groups import Groups, split
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.setting import HOW, Setting, add_dispatch, arguments, read
from benchmarks.gpu.workloads import Workload, balance, begins, layers, workload
from benchmarks.models.unet import UNet
from benchmarks.report import Figure, Grid
from fxpipe.extensions.streams.events import Streams

SECONDS = 15.0

TITLE = "U-Net without and with overlapped copies, direct skips and CUDA graphs"

SGD = partial(torch.optim.SGD, lr=1e-4)


@torch.library.custom_op("fxpipe_benchmarks::carry", mutates_args=())
def carry(x: Tensor) -> Tensor:
    """The same value, as one that the stage makes and sends."""
    return x.clone()


@carry.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(_: Any, gradient: Tensor) -> Tensor:
    handed: Tensor = carry(gradient)
    return handed


carry.register_autograd(_backward)


class Carrying(nn.Module):
    """A U-Net in which every stage hands on the skips that are on their way."""

    def __init__(self, unet: UNet, cuts: Sequence[str]) -> None:
        """Wrap a U-Net.

        Args:
            unet: the model.
            cuts: the layers at which stages begin.
        """
        super().__init__()
        self.unet = unet
        self.cuts = frozenset(cuts)

    def forward(self, image: Tensor) -> Tensor:
        unet, across = self.unet, list[Tensor]()
        x = image
        for level, down in enumerate(unet.downs):
            x = self._stack(f"downs.{level}", down, x, across)
            across.append(x)
            x = unet.halve(x)
        x = self._stack("bottleneck", unet.bottleneck, x, across)
        for level, up in enumerate(unet.ups):
            x = torch.cat([unet.enlarge(x), across.pop()], dim=1)
            x = self._stack(f"ups.{level}", up, x, across)
        y: Tensor = unet.segment(x)
        return y

    def _stack(self, name: str, stack: nn.Module, x: Tensor, across: list[Tensor]) -> Tensor:
        for index, layer in enumerate(stack.children()):
            if f"{name}.{index}" in self.cuts:
                across[:] = map(carry, across)
            x = layer(x)
        return x


class Variant(NamedTuple):
    """One row.

    Attributes:
        name: of it.
        overlap: whether copies overlap computations.
        direct: whether skips go straight to their consumers.
        dropout: whether the model has any.
        graphs: whether stages are captured; not in a dry run, as CPU devices have no graphs.
    """

    name: str
    overlap: bool
    direct: bool
    dropout: bool = True
    graphs: bool = False


VARIANTS = (
    Variant("without either", False, False),
    Variant("without overlap", False, True),
    Variant("without direct skips", True, False),
    Variant("with both", True, True),
    Variant("with both, no dropout", True, True, dropout=False),
    Variant("with both and CUDA graphs, no dropout", True, True, dropout=False, graphs=True),
)


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a row is missing, or the GPU cannot be split."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--devices", type=int, help="by default 4, in a dry run 2")
    parser.add_argument("--microbatches", type=int, help="by default 16, in a dry run 4")
    parser.add_argument("--batch", type=int, help="samples per step")
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument(
        "--recompute", choices=("never", "except_last", "always"), default="except_last"
    )
    add_dispatch(parser)
    setting, own = read(parser, given)
    count = own.devices or (2 if setting.dry_run else 4)
    parts = own.microbatches or (4 if setting.dry_run else 16)
    work = workload("unet", setting, own.batch)
    try:
        groups = split(setting, count)
    except Exception as error:  # whatever the driver's bindings raise
        rows = Rows(setting, "ablation", TITLE, {})
        rows.lose("groups of multiprocessors", error)
        return rows.end()
    settings: dict[str, str | int] = {
        "model": work.name,
        "batch": work.batch,
        "micro-batches": parts,
        "groups": f"{count} of {groups.multiprocessors} multiprocessors, {groups.how}",
        "schedule": own.schedule,
        "launched by": HOW[own.dispatch],
        "recomputation": own.recompute,
        "skips handed on": "each stage copies them once, besides the copy between devices",
        "memory": "the peak of a step on the whole GPU, by torch's allocator",
    }
    rows = Rows(setting, "ablation", TITLE, settings)
    cells: list[tuple[str, ...]] = []
    rows.grids.append(Grid(("variant", "samples a second", "memory"), cells))
    for variant in VARIANTS:
        run = partial(measure, variant, work, groups, parts, setting, own)
        found = rows.measure(variant.name, run)
        if found is None:
            cells.append((variant.name, "–", "–"))
        else:
            rows.figures.append(Figure(f"{variant.name}: throughput", found[0], "samples/s"))
            cells.append((variant.name, f"{found[0]:.4g}", f"{found[1] / 2**30:.3f} GiB"))
        rows.publish()
    return rows.end()


def measure(
    variant: Variant, work: Workload, groups: Groups, parts: int, setting: Setting, own: Any
) -> tuple[float, int]:
    """Samples a second and bytes."""
    torch.manual_seed(0)
    model = work.model().to(setting.device)
    assert isinstance(model, UNet)
    x, y = (value.to(setting.device) for value in work.draw(work.batch))
    part = x[: max(1, len(x) // parts)]
    lengths = balance(model, part, len(groups.devices), setting.synchronize)
    cuts = begins(layers(model), lengths)
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.train(variant.dropout)
    whole: nn.Module = model if variant.direct else Carrying(model, cuts)
    prefix = "" if variant.direct else "unet."
    step: Callable[[], Any]
    with (
        nullcontext() if variant.overlap else no_overlap(),
        fxpipe.compile(
            whole,
            groups.devices,
            schedule=own.schedule,
            microbatches=parts,
            loss=work.loss,
            optimizer=SGD,
            recompute=own.recompute,
            extensions=[
                fxpipe.Dispatch(own.dispatch),
                *([fxpipe.CudaGraphs()] if variant.graphs and not setting.dry_run else []),
            ],
            partition=[prefix + name for name in cuts],
        ) as pipe,
    ):
        step = partial(pipe.step, x, target=y)
        took = setting.seconds({"step": step}, SECONDS)["step"]
        return work.batch / took, setting.peak(step)


@contextmanager
def no_overlap() -> Iterator[None]:
    """Inside, pipes are compiled so that no copy is launched ahead of a computation."""
    with mock.patch.object(Streams.__init__, "__defaults__", (0,)):
        assert Streams().ahead == 0
        yield


if __name__ == "__main__":
    sys.exit(main())
