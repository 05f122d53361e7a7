"""Compare a pipe's first step with torch.export.export of the same model, in processor time.

A first step traces the model, times its operations, cuts and differentiates it, compares the plan
with the model, and trains on the batch. Each measurement is made in a new process, by one thread.
Run it with ``python -m benchmarks.first_steps`` on an idle machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Report

DEVICES = MICROBATCHES = 2

What = Literal["export", "first step", "plain step"]


class Work(NamedTuple):
    """A model with a batch of a sample for each micro-batch."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor
    loss: Callable[..., Tensor]


class Level(nn.Sequential):
    """Two convolutions of volumes with BatchNorm."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(
            *(nn.Conv3d(into, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU()),
            *(nn.Conv3d(out, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU()),
        )


class UNet3d(nn.Module):
    """A U-Net of volumes, with four levels."""

    def __init__(self, widths: Sequence[int] = (16, 32, 64, 128)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.downs = nn.ModuleList([Level(1, widths[0]), *(Level(*pair) for pair in pairs)])
        ups = pairs[::-1]
        self.ups = nn.ModuleList(nn.ConvTranspose3d(low, high, 2, 2) for high, low in ups)
        self.joins = nn.ModuleList(Level(2 * high, high) for high, _ in ups)
        self.last = nn.Conv3d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for down in self.downs:
            x = down(functional.max_pool3d(x, 2) if skips else x)
            skips.append(x)
        for up, join, skip in zip(self.ups, self.joins, skips[-2::-1], strict=True):
            x = join(torch.cat([up(x), skip], 1))
        made: Tensor = self.last(x)
        return made


def _classes(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def gpt2() -> Work:
    from transformers import GPT2Config, GPT2LMHeadModel

    words, target = (torch.randint(50257, (MICROBATCHES, 64)) for _ in range(2))
    return Work(GPT2LMHeadModel(GPT2Config(use_cache=False)), (words,), target, _classes)


def vit() -> Work:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    images = torch.randn(MICROBATCHES, 3, 224, 224)
    return Work(ViTForImageClassification(config), (images,), torch.tensor([0, 1]), _classes)


def resnet() -> Work:
    from transformers import ResNetConfig, ResNetForImageClassification

    images = torch.randn(MICROBATCHES, 3, 64, 64)
    model = ResNetForImageClassification(ResNetConfig())
    return Work(model, (images,), torch.tensor([0, 1]), _classes)


def unet2d() -> Work:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        layers_per_block=2,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    images = torch.randn(MICROBATCHES, 3, 32, 32)

    def loss(output: Any, target: Tensor) -> Tensor:
        return functional.mse_loss(output.sample, target)

    return Work(model, (images, torch.tensor([1, 2])), images, loss)


def unet3d() -> Work:
    volumes = torch.randn(MICROBATCHES, 1, 16, 16, 16)
    target = torch.randint(2, (MICROBATCHES, 16, 16, 16))
    return Work(UNet3d(), (volumes,), target, functional.cross_entropy)


class Transcribing(nn.Module):
    """Whisper, with the inputs that it is trained on in their order."""

    def __init__(self) -> None:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        super().__init__()
        sizes = {"encoder_layers": 4, "decoder_layers": 4, "max_source_positions": 100}
        heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
        inner = {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "d_model": 384}
        config = WhisperConfig(**sizes, **heads, **inner, use_cache=False)
        self.whisper = WhisperForConditionalGeneration(config)

    def forward(self, sound: Tensor, words: Tensor) -> Any:
        return self.whisper(input_features=sound, decoder_input_ids=words)


def whisper() -> Work:
    words, target = (torch.randint(50000, (MICROBATCHES, 16)) for _ in range(2))
    return Work(Transcribing(), (torch.randn(MICROBATCHES, 80, 200), words), target, _classes)


WORKS: Mapping[str, tuple[Callable[[], Work], str]] = {
    "GPT-2": (gpt2, "124 million parameters, 64 tokens"),
    "ViT-S": (vit, "patches of 16, images of 224 × 224"),
    "ResNet-50": (resnet, "images of 64 × 64"),
    "UNet2D": (unet2d, "diffusers, 3 levels of 32 to 64 channels, images of 32 × 32"),
    "3-D U-Net": (unet3d, "4 levels of 16 to 128 channels, volumes of 16 × 16 × 16"),
    "Whisper": (whisper, "tiny, 2 seconds of sound, 16 tokens"),
}
"""Name → the work, and what of it is not the model's own."""


def taken(name: str, what: What) -> float:
    """Seconds of the processor, in a new process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_take, args=(name, what, there))
    process.start()
    there.close()  # so that its end is noticed when the process dies
    seconds: float = here.recv()
    process.join()
    return seconds


def _take(name: str, what: What, end: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = WORKS[name][0]()
    if what == "first step":
        pipe = fxpipe.compile(work.model, DEVICES, microbatches=MICROBATCHES, loss=work.loss)
        start = time.process_time()
        pipe.step(*work.inputs, target=work.target)
    elif what == "export":
        part = tuple(x[:1] for x in work.inputs)
        start = time.process_time()
        torch.export.export(work.model, part)
    else:
        _plain(work)
        start = time.process_time()
        _plain(work)
    end.send(time.process_time() - start)


def _plain(work: Work) -> None:
    for index in range(MICROBATCHES):
        output = work.model(*(x[index : index + 1] for x in work.inputs))
        (work.loss(output, work.target[index : index + 1]) / MICROBATCHES).backward()


def main() -> int:
    parser = argparse.ArgumentParser(description="Time first steps beside torch.export.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="append", choices=WORKS, help="by default all")
    arguments = parser.parse_args()
    machine, figures = describe(), list[Figure]()
    whats: tuple[What, ...] = ("export", "first step", "plain step")
    for name in arguments.model or WORKS:
        found: dict[What, list[float]] = {what: [] for what in whats}
        for _ in range(arguments.rounds):
            for what in whats:
                found[what].append(taken(name, what))
        medians = {what: median(each) for what, each in found.items()}
        figures += [Figure(f"{name}: {what}", medians[what], "s") for what in whats]
        ratio = medians["first step"] / medians["export"]
        figures.append(Figure(f"{name}: first step over export", ratio))
        print(f"{name}: {ratio:.2f}", file=sys.stderr, flush=True)
    settings = {
        "models": "; ".join(f"{name}: {told}" for name, (_, told) in WORKS.items()),
        "batch": f"{MICROBATCHES} micro-batches of one sample, {DEVICES} CPU devices",
        "export": "torch.export.export of the model for one sample",
        "plain step": "a second loop over the micro-batches, forward and backward",
        "time": f"of the processor, one thread; medians of {arguments.rounds}, a process each",
    }
    title = "First steps beside torch.export"
    Report("first-steps", title, settings, figures, machine).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
