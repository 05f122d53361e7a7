"""Train a U-Net over two CPU devices to find the noise in photographs, and so take it out.

The same training runs on one device without fxpipe, step by step in turn, and must give the same
losses and weights to the last bit. Run it with ``make demo``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from skimage import io
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fxpipe
from examples import photographs, plain
from examples.photographs import Noisy
from examples.unet import UNet

DEVICES = ("cpu", "cpu")
MICROBATCHES = 8
BATCH = 16
SIDE = 48
STEPS = 160


@dataclass
class Run:
    """What one of the two trainings did.

    Attributes:
        losses: one a step.
        seconds: one a step.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, step: Callable[[Noisy], Tensor], batch: Noisy) -> None:
        start = time.perf_counter()
        self.losses.append(step(batch).item())
        self.seconds.append(time.perf_counter() - start)

    @property
    def milliseconds(self) -> float:
        """The median of all steps."""
        return 1000 * median(self.seconds)


def main() -> int:
    """Returns the exit status: 1 where pipeline and plain loop differ."""
    parser = argparse.ArgumentParser(description="Train a U-Net over two CPU devices.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    console = Console()

    torch.manual_seed(0)
    torch.set_num_threads(len(DEVICES))  # one for each device
    model, single = unet(), unet()
    single.load_state_dict(model.state_dict())
    batches = list(make_batches(arguments.steps))
    with console.status("compiling"):
        pipe = fxpipe.compile(
            model,
            DEVICES,
            schedule="1f1b",
            microbatches=MICROBATCHES,
            loss=mse_loss,
            optimizer=adam,
            example=((batches[0].image,), {"target": batches[0].noise}),
        )
    with pipe:
        pipelined, alone = train(pipe, single, batches, console)
        weights = pipe.state_dict()
        same = pipelined.losses == alone.losses and equal(weights, single.state_dict())
        print(pipe)
        console.print(comparison(pipelined, alone))
        draw(pipe, arguments.output)
    console.print(denoise(weights, arguments.output / "denoised.png"))
    console.print(f"Pictures: {arguments.output.resolve()}", soft_wrap=True)
    if same:
        console.print("[green]Equal bit for bit:[/] every loss, every weight, every statistic.")
    else:
        console.print("[red]The two trainings differ.[/]")
    return 0 if same else 1


def make_batches(steps: int) -> Iterator[Noisy]:
    generator = torch.Generator().manual_seed(0)
    pictures = photographs.training()
    for _ in range(steps):
        crops = photographs.crops(pictures, BATCH, SIDE, generator)
        yield photographs.add_noise(crops, generator)


def unet() -> UNet:
    """Four levels: the image, and three that halve it."""
    return UNet(base=24, depth=3)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(parameters, lr=3e-3, betas=(0.9, 0.95))


def train(
    pipe: fxpipe.Pipeline, single: nn.Module, batches: list[Noisy], console: Console
) -> tuple[Run, Run]:
    """Train both, a step of each in turn on the same batches."""
    optimizer = adam(single.parameters())
    optimizers = [optimizer, *filter(None, pipe.optimizers)]
    rates = [LambdaLR(each, lambda k: min(1, 4 * (1 - k / len(batches)))) for each in optimizers]

    def pipe_step(batch: Noisy) -> Tensor:
        loss: Tensor = pipe.step(batch.image, target=batch.noise)
        return loss

    def single_step(batch: Noisy) -> Tensor:
        with plain.one_thread():
            return plain.step(single, mse_loss, optimizer, batch.image, batch.noise, MICROBATCHES)

    pipelined, alone = Run(), Run()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("", total=len(batches))
        for batch in batches:
            pipelined.step(pipe_step, batch)
            alone.step(single_step, batch)
            for rate in rates:
                rate.step()
            progress.update(bar, advance=1, description=f"loss {pipelined.losses[-1]:.5f}")
    return pipelined, alone


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two state dicts hold the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def comparison(pipelined: Run, alone: Run) -> Table:
    table = Table("", "final loss", "a step (median)", title="Two devices beside one")
    table.caption = "other work on the machine's cores lowers the ratio"
    table.add_row(
        f"fxpipe, {len(DEVICES)} devices",
        repr(pipelined.losses[-1]),
        f"{pipelined.milliseconds:.0f} ms",
    )
    table.add_row("plain loop, 1 device", repr(alone.losses[-1]), f"{alone.milliseconds:.0f} ms")
    table.add_row("ratio", "", f"{alone.milliseconds / pipelined.milliseconds:.2f}")
    return table


def draw(pipe: fxpipe.Pipeline, folder: Path) -> None:
    """Pictures of the three representations."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in (
        ("plan", pipe.plan.draw()),
        ("schedule", pipe.schedule.draw()),
        ("program", pipe.program.draw()),
    ):
        for ending in ("svg", "png"):
            picture.render(folder / f"{name}.{ending}")


def denoise(weights: dict[str, Tensor], path: Path) -> str:
    """Take the noise out of a photograph that was not trained on; draws it before and after.

    Returns:
        One line on how far each is from the clean photograph.
    """
    model = unet()
    model.load_state_dict(weights)
    model.eval()
    # The part with the eyes; its sides are multiples of what the U-Net asks for.
    cat = photographs.unseen()[None, :, 22:278, 96:352]
    noisy = photographs.add_noise(cat, torch.Generator().manual_seed(1))
    with torch.inference_mode():
        denoised = noisy.image - model(noisy.image)
    strip = torch.cat([noisy.image, denoised, cat], dim=3)[0].clamp(0, 1)
    io.imsave(path, (255 * strip).byte().permute(1, 2, 0).numpy(), check_contrast=False)
    before, after = (decibels(image, cat) for image in (noisy.image, denoised))
    return f"An unseen photograph: {before:.1f} dB with noise, {after:.1f} dB after the U-Net."


def decibels(image: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio."""
    return float(-10 * torch.log10(mse_loss(image, clean)))


if __name__ == "__main__":
    sys.exit(main())
