"""The models that the GPU scripts train, with a batch, a loss, and where a stage may begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.gpu.setting import Setting
from benchmarks.models.amoebanet import AmoebaNetD
from benchmarks.models.gpt2 import GPT2, next_words
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet

Maker = Callable[[], nn.Module]
Draw = Callable[[int], tuple[Tensor, Tensor]]
"""Samples → inputs and target."""


@dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
        name: as the papers call it, with its size.
        model: makes it.
        draw: makes a batch of so many samples, on the CPU.
        loss: ``loss(output, target)``.
        batch: samples of a step.
    """

    name: str
    model: Maker
    draw: Draw
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int


def workload(name: str, setting: Setting, batch: int | None = None) -> Workload:
    """A model of NAMES, tiny in a dry run, with a batch of another size if one is given."""
    found = (_tiny if setting.dry_run else _full)()[name]
    return found if batch is None else replace(found, batch=batch)


def layers(model: nn.Module) -> list[str]:
    """The submodules at which a stage may begin, in their order, the first among them."""
    match model:
        case UNet():
            stacks = [f"downs.{level}" for level in range(len(model.downs))]
            stacks += ["bottleneck", *(f"ups.{level}" for level in range(len(model.ups)))]
            inner = [
                f"{stack}.{index}"
                for stack in stacks
                for index, _ in enumerate(model.get_submodule(stack).children())
            ]
            return [*inner, "segment"]
        case AmoebaNetD():
            return ["stem", *(f"cells.{index}" for index in range(len(model.cells))), "head"]
        case ResNet():
            return ["stem", *(f"blocks.{index}" for index in range(len(model.blocks))), "head"]
        case GPT2():
            return ["embed", *(f"blocks.{index}" for index in range(len(model.blocks))), "head"]
    raise TypeError(f"the layers of {type(model).__name__} are not known")


def balance(
    model: nn.Module, inputs: Tensor, stages: int, synchronize: Callable[[], None]
) -> list[int]:
    """How many layers each stage has, so that the slowest forward takes the least time.

    Args:
        model: the model.
        inputs: a micro-batch, where the model is.
        stages: how many.
        synchronize: waits for the device.
    """
    names = layers(model)
    times: list[float] = []

    def begin(*_: object) -> None:
        synchronize()
        times.append(perf_counter())

    handles = [model.get_submodule(name).register_forward_pre_hook(begin) for name in names]
    # BatchNorm's statistics stay as they are, and dropout takes no time worth a thought
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(inputs)  # the first forward takes longer
            times.clear()
            model(inputs)
            begin()
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return fair([after - before for before, after in pairwise(times)], stages)


def fair(costs: Sequence[float], parts: int) -> list[int]:
    """The lengths of so many consecutive parts, none empty, the greatest sum least."""

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(costs[first:]), (len(costs) - first,)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            rest, lengths = best(end, left - 1)
            found.append((max(sum(costs[first:end]), rest), (end - first, *lengths)))
        return min(found)

    return list(best(0, parts)[1])


def begins(names: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """The layer at which each stage but the first begins."""
    return [names[sum(lengths[:stage])] for stage in range(1, len(lengths))]


def _images(side: int, classes: int = 1000) -> Draw:
    return lambda rows: (torch.randn(rows, 3, side, side), torch.randint(classes, (rows,)))


def _maps(side: int) -> Draw:
    return lambda rows: (torch.randn(rows, 3, side, side), torch.randn(rows, 1, side, side))


def _tokens(words: int, length: int) -> Draw:
    def draw(rows: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(words, (rows, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


def _full() -> dict[str, Workload]:
    return {
        "unet": Workload("U-Net (5, 64)", lambda: UNet(5, 64), _maps(192), mse_loss, 64),
        "amoebanet": Workload(
            "AmoebaNet-D (18, 256)", lambda: AmoebaNetD(18, 256), _images(224), cross_entropy, 256
        ),
        "gpt2": Workload("GPT-2 124M", GPT2, _tokens(50257, 1024), next_words, 16),
        "resnet": Workload("ResNet-101", ResNet, _images(224), cross_entropy, 256),
    }


def _tiny() -> dict[str, Workload]:
    return {
        "unet": Workload(
            "tiny U-Net", lambda: UNet(1, 4, depth=3, dropout=0.0), _maps(16), mse_loss, 32
        ),
        "amoebanet": Workload(
            "tiny AmoebaNet-D", lambda: AmoebaNetD(3, 16, 5), _images(64, 5), cross_entropy, 8
        ),
        "gpt2": Workload("tiny GPT-2", lambda: GPT2(29, 6, 7, 8, 2), _tokens(29, 6), next_words, 8),
        "resnet": Workload(
            "tiny ResNet", lambda: ResNet((1, 1), 2, 5), _images(16, 5), cross_entropy, 8
        ),
    }


NAMES = ("unet", "amoebanet", "gpt2", "resnet")
