"""What a pipe is called with: checked, and split into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.compiler.compiler import Compiler
from fxpipe.errors import InputError
from fxpipe.runtime.batch import Batch, BatchDims


class Intake:
    """Makes batches and micro-batches of the arguments of calls."""

    def __init__(
        self,
        model: nn.Module,
        compiler: Compiler,
        devices: Sequence[torch.device],
        microbatches: int | None,
        batch_dims: BatchDims | None,
    ) -> None:
        """Nothing is taken yet.

        Args:
            model: the model.
            compiler: knows the loss, and how many micro-batches the schedule can be for.
            devices: where the stages are.
            microbatches: into how many a batch is split; by default four a device.
            batch_dims: input → its dimension that is split.
        """
        self._model = model
        self._compiler = compiler
        self._device_type = devices[0].type
        self._microbatches = microbatches or 4 * len(devices)
        self._batch_dims = batch_dims

    def batch(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None) -> Batch:
        """The inputs and targets of a call. Raises InputError where they do not fit."""
        targets = () if target is None else target if isinstance(target, tuple) else (target,)
        if targets and self._compiler.objective.loss is None:
            raise InputError(
                "there is a target but no loss to compare it with; give compile(..., "
                "loss=function), or leave out target"
            )
        batch = Batch.of(self._model, args, kwargs, targets, self._batch_dims)
        batch.check_devices("cpu", self._device_type)
        return batch

    def parts(self, batch: Batch, *, step: bool) -> list[list[Any]]:
        """The leaves of each micro-batch, of a step or of a call.

        A step's schedule may know one number of micro-batches alone; a call has at most as many
        as samples.
        """
        fixed = step and self._compiler.timetable.recipe.microbatches is not None
        count = self._microbatches
        return batch.split(count if fixed else min(count, batch.size))
