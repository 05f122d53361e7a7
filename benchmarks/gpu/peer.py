"""The same models for torchgpipe: sequences, with skip connections declared by hand."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.workloads import layers
from benchmarks.models.amoebanet import AmoebaNetD
from benchmarks.models.gpt2 import GPT2
from benchmarks.models.pairs import Cell, First, Twice
from benchmarks.models.unet import UNet

Loss = Callable[[Tensor, Tensor], Tensor]


def installed() -> bool:
    """Whether torchgpipe can be imported."""
    return importlib.util.find_spec("torchgpipe") is not None


class Peer:
    """A model under torchgpipe, trained a step a call."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        lengths: Sequence[int],
        devices: Sequence[torch.device],
        microbatches: int,
        recompute: str,
    ) -> None:
        """Wrap a model, whose parameters stay its own.

        Args:
            model: the model.
            loss: of the whole batch's output.
            optimizer: makes one from parameters.
            lengths: stage → how many of the model's ``layers`` it has.
            devices: stage → where it is.
            microbatches: how many.
            recompute: "never", "except_last" or "always".
        """
        groups = sequence(model)
        flat = nn.Sequential(*(module for group in groups for module in group))
        sizes = []
        for stage, length in enumerate(lengths):
            first = sum(lengths[:stage])
            sizes.append(sum(map(len, groups[first : first + length])))
        gpipe: Any = importlib.import_module("torchgpipe").GPipe
        self.pipe = gpipe(
            flat, sizes, devices=list(devices), chunks=microbatches, checkpoint=recompute
        )
        self.loss = loss
        self.optimizer = optimizer(list(self.pipe.parameters()))

    def step(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Forward, backward and update."""
        self.optimizer.zero_grad()
        loss = self.loss(self.pipe(inputs), target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def sequence(model: nn.Module) -> list[list[nn.Module]]:
    """The modules to run one after another, for each of the model's ``layers``."""
    match model:
        case UNet():
            return _unet(model)
        case AmoebaNetD():
            cells: list[list[nn.Module]] = [[Cell(cell)] for cell in model.cells]
            return [[model.stem, Twice()], *cells, [First(), model.head]]
        case GPT2():
            # torchgpipe shares no weights between layers: its head gets a copy of its own
            head = model.head[1]
            assert isinstance(head, nn.Linear)
            head.weight = nn.Parameter(head.weight.detach().clone())
    return [[model.get_submodule(name)] for name in layers(model)]


def _unet(model: UNet) -> list[list[nn.Module]]:
    """Each level's features are stashed behind its last convolution, and popped behind the last
    one below, where a plan has these operations too when it is cut at the same names."""
    groups: list[list[nn.Module]] = []
    levels = range(len(model.downs))
    for level in levels:
        groups += [[convolution] for convolution in model.downs[level].children()]
        # torchgpipe takes no module twice
        groups[-1] += [_stash(level), copy.deepcopy(model.halve)]
    groups += [[convolution] for convolution in model.bottleneck]
    for level, up in zip(reversed(levels), model.ups, strict=True):
        groups[-1] += [copy.deepcopy(model.enlarge), _join(level)]
        groups += [[convolution] for convolution in up.children()]
    return [*groups, [model.segment]]


def _stash(level: int) -> nn.Module:
    skip: Any = importlib.import_module("torchgpipe.skip")
    name = f"level{level}"

    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield skip.stash(name, x)
            return x

    made: nn.Module = skip.skippable(stash=[name])(Stash)()
    return made


def _join(level: int) -> nn.Module:
    skip: Any = importlib.import_module("torchgpipe.skip")
    name = f"level{level}"

    class Join(nn.Module):
        def forward(self, x: Tensor) -> Any:
            across = yield skip.pop(name)
            return torch.cat([x, across], dim=1)

    made: nn.Module = skip.skippable(pop=[name])(Join)()
    return made
