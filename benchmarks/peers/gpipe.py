"""torchgpipe: Kim et al., arXiv 2004.09910. It takes sequences alone, with declared skips."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torchgpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable, stash

from benchmarks.peers.case import Case
from benchmarks.peers.contender import Contender, index_of
from examples.unet import UNet


@skippable(stash=["across"])
class Keep(nn.Module):
    """Hands what it is given on, and across to the Join of the same namespace."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("across", x)
        return x


@skippable(pop=["across"])
class Join(nn.Module):
    """Puts the channels that came across before those that it is given."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        across = yield pop("across")
        return torch.cat([across, x], dim=1)


def sequence(model: nn.Module) -> nn.Sequential:
    """The same parameters as a sequence, with the same names for what both have.

    Raises:
        TypeError: nobody has written the model down as one.
    """
    if isinstance(model, nn.Sequential):
        return model
    if not isinstance(model, UNet):
        raise TypeError(f"a {type(model).__name__} is no sequence")
    levels = [Namespace() for _ in model.downs]
    parts: dict[str, nn.Module] = {}
    for level, down in enumerate(model.downs):
        parts[f"downs {level}"] = down
        parts[f"keep {level}"] = isolated(Keep(), levels[level])
        parts[f"halve {level}"] = nn.MaxPool2d(2)
    parts["bottom"] = model.bottom
    for level, (widen, up) in enumerate(zip(model.widens, model.ups, strict=True)):
        parts[f"widens {level}"] = widen
        parts[f"join {level}"] = isolated(Join(), levels[-1 - level])
        parts[f"ups {level}"] = up
    parts["head"] = model.head
    made = nn.Sequential()
    for name, part in parts.items():
        made.add_module(name, part)  # a name may hold no dot
    return made


def isolated(part: Any, namespace: Namespace) -> nn.Module:
    """Its skip is another one than those of the same name in other namespaces."""
    made: nn.Module = part.isolate(namespace)
    return made


class TorchGPipe(Contender):
    """By default without recomputation; its devices of one name share a worker thread."""

    def __init__(self, case: Case, checkpoint: str = "never") -> None:
        torch.set_num_threads(case.devices)
        self.case = case
        model, self.x, self.y = case.make()
        if case.parts:
            layers, cuts = nn.Sequential(*case.parts(model)), list(range(1, case.devices))
        else:
            layers = sequence(model)
            cuts = [index_of(layers, cut.replace(".", " ")) for cut in case.cuts]
        ends = [*cuts, len(layers)]
        self.model = GPipe(
            layers,
            balance=[end - start for start, end in zip([0, *cuts], ends, strict=True)],
            devices=["cpu"] * case.devices,
            chunks=case.microbatches,
            checkpoint=checkpoint,
        )
        self.optimizer = case.optimizer(self.model.parameters())

    def step(self) -> Tensor:
        """See Contender.step."""
        self.optimizer.zero_grad()
        loss = self.case.loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
