"""Train a U-Net over two CPU devices to denoise photographs.

A plain loop on one device runs the same training without fxpipe, taking turns step by step, and
must give the same losses and weights to the last bit. Run it with ``make demo``. With ``make
demo-ranks`` each device is a process, and the first one also runs the trainings to compare with.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from skimage import io
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fxpipe
from examples import photographs, plain
from examples.photographs import Noisy
from examples.unet import UNet
from fxpipe.extensions.simulator import Simulation

DEVICES = 2
SKIPPING = 3
"""Devices of the plan that is drawn: a value that skips a stage is stashed and popped."""
MICROBATCHES = 8
BATCH = 16
SIDE = 48
STEPS = 160
COMPILING, PICTURES = 12, 20
"""How many steps take about as long."""


@dataclass
class Run:
    """One of the trainings.

    Attributes:
        name: its name in the table.
        model: the model or pipeline that is trained.
        optimizer: over all of its parameters.
        step: trains on a batch and returns the loss.
        losses: the loss of each step.
        seconds: the duration of each step.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    step: Callable[[Noisy], Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def train(self, batch: Noisy) -> None:
        start = time.perf_counter()
        self.losses.append(self.step(batch).item())
        self.seconds.append(time.perf_counter() - start)

    @property
    def milliseconds(self) -> float:
        """The median duration of a step."""
        return 1000 * median(self.seconds)


def main() -> int:
    """Run the demo; returns exit status 1 if pipeline and plain loop differ, else 0."""
    parser = argparse.ArgumentParser(description="Train a U-Net over two CPU devices.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # of each device
    mesh = processes()
    first = mesh is None or mesh.get_rank() == 0
    console = Console(quiet=not first)
    single = unet()
    batches = list(make_batches(arguments.steps))
    with overall(console) as progress, ExitStack() as stack:
        bar = progress.add_task("compiling", total=len(batches) + COMPILING + PICTURES)

        def pipeline(devices: int | DeviceMesh) -> fxpipe.Pipeline:
            return stack.enter_context(compiled(copy.deepcopy(single), devices, batches[0]))

        pipe = pipeline(mesh or DEVICES)
        count = len(pipe.devices)
        where = f"{count} devices" if mesh is None else f"{count} processes"
        runs = [pipelined(f"fxpipe, {where}", pipe)]
        if mesh is not None and first:
            runs.append(pipelined(f"fxpipe, {count} devices", pipeline(count)))
        if first:
            runs.append(looped("plain loop, 1 device", single))
        progress.advance(bar, COMPILING)
        for loss in train(runs, batches):
            progress.update(bar, advance=1, description=f"training, loss {loss:.5f}")
        weights = copy.deepcopy(pipe.state_dict(full=True))
        same = all(
            run.losses == runs[0].losses and equal(run.model.state_dict(), weights)
            for run in runs[1:]
        )
        progress.update(bar, description="drawing")
        measured = pipe.profile(batches[0].image, target=batches[0].noise)
        if not first:
            return 0
        three = pipeline(SKIPPING) if count < SKIPPING else pipe  # so that skips pass a stage
        paths = draw(pipe, three, measured, arguments.output)
        told = denoise(weights, arguments.output / "denoised.png")
        progress.advance(bar, PICTURES)
        table = str(pipe)
    console.print(comparison(runs), told, sep="\n")
    if same:
        console.print("[green]Equal bit for bit:[/] every loss, every weight, every statistic.")
    else:
        console.print("[red]The trainings differ.[/]")
    print(table, "", "pictures:", *paths, arguments.output / "denoised.png", sep="\n")
    print(f"\nnext: {Path(sys.executable).parent / 'fxpipe'} explore explorer.html")
    return 0 if same else 1


def overall(console: Console) -> Progress:
    """The one line that shows how far all is."""
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.description}"), console=console)


def processes() -> DeviceMesh | None:
    """The mesh of the processes that torchrun has started; None without torchrun."""
    if "WORLD_SIZE" not in os.environ:
        return None
    return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("pp",))


def make_batches(steps: int) -> Iterator[Noisy]:
    generator = torch.Generator().manual_seed(0)
    pictures = photographs.training()
    for _ in range(steps):
        crops = photographs.crops(pictures, BATCH, SIDE, generator)
        yield photographs.add_noise(crops, generator)


def unet() -> UNet:
    """A U-Net that halves the image three times."""
    return UNet(base=24, depth=3)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(parameters, lr=3e-3, betas=(0.9, 0.95))


def compiled(model: nn.Module, devices: int | DeviceMesh, batch: Noisy) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        devices,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        loss=mse_loss,
        optimizer=adam,
        example=((batch.image,), {"target": batch.noise}),
    )


def pipelined(name: str, pipe: fxpipe.Pipeline) -> Run:
    def step(batch: Noisy) -> Tensor:
        loss: Tensor = pipe.step(batch.image, target=batch.noise)
        return loss

    return Run(name, pipe, pipe.optimizer, step)


def looped(name: str, model: nn.Module) -> Run:
    optimizer = adam(model.parameters())

    def step(batch: Noisy) -> Tensor:
        return plain.step(model, mse_loss, optimizer, batch.image, batch.noise, MICROBATCHES)

    return Run(name, model, optimizer, step)


def train(runs: list[Run], batches: list[Noisy]) -> Iterator[float]:
    """Train all runs on the same batches, one step of each in turn; yields the losses."""
    rates = [LambdaLR(run.optimizer, lambda k: min(1, 4 * (1 - k / len(batches)))) for run in runs]
    for batch in batches:
        for run in runs:
            run.train(batch)
        for rate in rates:
            rate.step()
        yield runs[0].losses[-1]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two state dicts hold the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def comparison(runs: list[Run]) -> Table:
    table = Table("", "final loss", "a step (median)", "speed", title="The same, step by step")
    table.caption = "speed: the plain loop's is 1; other work on the machine's cores lowers it"
    for run in runs:
        time, speed = run.milliseconds, runs[-1].milliseconds / run.milliseconds
        table.add_row(run.name, repr(run.losses[-1]), f"{time:.0f} ms", f"{speed:.2f}")
    return table


def draw(
    pipe: fxpipe.Pipeline, three: fxpipe.Pipeline, measured: Simulation, folder: Path
) -> list[Path]:
    """Draw the plan over three devices, and the schedule, the program and the measured timeline of
    a step. Returns the files that a browser shows."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "plan": three.plan.draw(),
        "schedule": pipe.schedule.draw(),
        "program": pipe.program.draw(),
        "timeline": measured.draw(),
    }
    for name, picture in pictures.items():
        for ending in ("svg", "png"):
            picture.render(folder / f"{name}.{ending}")
    return [folder / f"{name}.svg" for name in pictures]


def denoise(weights: dict[str, Tensor], path: Path) -> str:
    """Denoise a photograph that was not trained on, and write it before and after as a picture.

    Returns:
        A line with the signal-to-noise ratios before and after.
    """
    model = unet()
    model.load_state_dict(weights)
    model.eval()
    # The part with the eyes; the U-Net needs sides that are multiples of 8.
    cat = photographs.unseen()[None, :, 22:278, 96:352]
    noisy = photographs.add_noise(cat, torch.Generator().manual_seed(1))
    with torch.inference_mode():
        denoised = noisy.image - model(noisy.image)
    strip = torch.cat([noisy.image, denoised, cat], dim=3)[0].clamp(0, 1)
    io.imsave(path, (255 * strip).byte().permute(1, 2, 0).numpy(), check_contrast=False)
    before, after = (decibels(image, cat) for image in (noisy.image, denoised))
    return f"An unseen photograph: {before:.1f} dB with noise, {after:.1f} dB after the U-Net."


def decibels(image: Tensor, clean: Tensor) -> float:
    """The peak signal-to-noise ratio of an image."""
    return float(-10 * torch.log10(mse_loss(image, clean)))


if __name__ == "__main__":
    sys.exit(main())
