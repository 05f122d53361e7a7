"""The arguments of ``fxpipe.compile``, checked, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fxpipe.compiler.objective import Objective
from fxpipe.extend import Extension
from fxpipe.ir.recipe import Recipe
from fxpipe.passes.partition.measure import GivenCosts
from fxpipe.passes.partition.options import Partition
from fxpipe.passes.schedule import RecomputeLike
from fxpipe.runtime.batch import BatchDims
from fxpipe.runtime.choice import Dispatches
from fxpipe.runtime.group import Group
from fxpipe.runtime.weights.optimizer import GivenOptimizer
from fxpipe.torchtools.accelerator import Place
from fxpipe.torchtools.pytrees import size_in_bytes

WHOLE = 1 << 26
"""A model with at most this many bytes on the meta device gets data while it is compiled; and one
with at most this many is compared with its plan, as a whole on the first rank's device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The checked arguments of ``fxpipe.compile``, read by everything that compiles and runs a
    pipe.

    Attributes:
        devices: device → its torch.device or stream, as the user named it.
        torch_devices: device → its torch.device.
        recipe: the schedule of training steps with its delay, which also places the stages.
        objective: the loss, and how the losses of micro-batches make the loss of the batch.
        dispatch: whether one thread or one per device runs the instruction lists; None to decide
            by predicted times.
        threads: intra-op threads of a device.
        places: device → its torch.device, for devices with streams; empty for CPU devices.
        group: the ranks that run the devices' lists, one each; a group of one runs all.
        hollow: the bytes of the model's parameters and buffers if some of them were on the meta
            device when it was given, or, over ranks on CPUs, from the first run on; else 0.
        replicas: how many pipelines train the model side by side.
        sharded: whether each replica is to update some of the parameters, and have no state of the
            others.
        sharded_weights: whether each replica is also to keep only these parameters between uses.
        bucket_bytes: the bytes of gradients that are summed over replicas in one bucket.
        in_order: whether gradients are added in the order of the replicas on every kind of device.
        decides: the name of what chooses the schedule at the first step, such as "auto", else "";
            ``recipe`` then only says where the stages are.
        costs: what nodes cost; nothing of the model is then run, timed or compared.

    All others are as in ``fxpipe.compile``.
    """

    model: nn.Module
    devices: tuple[Place, ...]
    torch_devices: tuple[torch.device, ...]
    recipe: Recipe
    microbatches: int | None = None
    objective: Objective = field(default_factory=Objective)
    optimizer: GivenOptimizer | None = None
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    recompute: RecomputeLike = "never"
    batch_dims: BatchDims = field(default_factory=dict)
    partition: Partition = field(default_factory=Partition)
    dispatch: Dispatches | None = None
    threads: int = 1
    places: tuple[torch.device, ...] = ()
    extensions: tuple[Extension, ...] = ()
    group: Group = field(default_factory=Group)
    hollow: int = 0
    replicas: int = 1
    sharded: bool = False
    sharded_weights: bool = False
    bucket_bytes: float = 25 * 2**20
    in_order: bool = False
    decides: str = ""
    costs: GivenCosts | None = None

    @cached_property
    def loss(self) -> Callable[..., Any] | None:
        """The loss function; None if the model returns its loss."""
        return self.objective.loss

    @property
    def transport(self) -> Callable[..., Any] | None:
        """What carries values from rank to rank, if an extension has it."""
        return next((t for e in self.extensions if (t := e.transport()) is not None), None)

    @property
    def holds_saved(self) -> str:
        """The extension in whose memory stages keep what their backwards read, or ""."""
        return next((type(e).__name__ for e in self.extensions if e.holds_saved), "")

    @property
    def clips(self) -> bool:
        """Whether every stage clips or unscales its gradients before it updates."""
        return self.clip_norm is not None or self.scaler is not None

    @property
    def shards(self) -> bool:
        """Whether there are several replicas, each of which updates some of the parameters."""
        return self.sharded and self.replicas > 1

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage → the device that runs it, in training steps and in calls."""
        return self.recipe.place(len(self.devices))

    @property
    def here(self) -> torch.device:
        """This process's own device; the first device if it runs all of them."""
        return self.torch_devices[self.group.device]

    @property
    def whole(self) -> bool:
        """Whether this process may hold the whole model while it is compiled."""
        return (self.size if self.ranks else self.hollow) <= WHOLE

    @property
    def size(self) -> int:
        """The bytes of the model's parameters and buffers."""
        return sum(map(size_in_bytes, (*self.model.parameters(), *self.model.buffers())))

    @property
    def apart(self) -> bool:
        """Whether no device may hold the whole model while it is compiled, but only stages that it
        runs: if there are several with memory of their own."""
        several = len(self.devices if self.ranks else set(self.places)) > 1
        return bool(self.places) and several and not (self.ranks and self.whole)

    def owns(self, stage: int) -> bool:
        """Whether this process runs a stage, updates its weights and keeps its state, which a
        process with a copy of the stage does not."""
        return self.group.size == 1 or self.placement[stage] == self.group.device

    def runs(self, stage: int) -> bool:
        """Whether this process runs a stage, or a copy of it."""
        copies = self.recipe.copies(len(self.devices))
        return self.owns(stage) or (bool(copies) and self.group.device in copies[stage])

    @cached_property
    def ranks(self) -> bool:
        """Whether the devices are those of several ranks."""
        return self.group.size > 1

    @property
    def names(self) -> tuple[str, ...]:
        """Device → its name in messages."""
        return tuple(f"device {i} ({device})" for i, device in enumerate(self.torch_devices))
