"""A stage whose batches read predicted weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.extensions.prediction.prediction import check_predictable, predict_weights
from fxpipe.runtime.weights.stage_weights import (
    Buffers,
    StageWeights,
    Versions,
    copy_of,
    retire,
    trained,
)


class PredictedStage(StageWeights):
    """The newest version of a stage, and what it predicts of later ones.

    Attributes:
        predicted: version → the predicted weights that its batches read.

    Raises:
        InputError: the optimizer has no momentum to predict from.
    """

    predicts = True
    optimizer: Optimizer

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, delay: int
    ) -> None:
        check_predictable(optimizer)
        super().__init__(parameters, optimizer, delay)
        self.predicted: dict[int, Buffers] = {}

    def restart(self, version: int) -> None:
        super().restart(version)
        self.predicted = {}
        self._predict()

    def resume(self, newest: int, base: int, known: Versions) -> None:
        self.restart(newest)
        self.oldest = max(base, newest - self.delay)
        for version in range(self.oldest, newest + 1):
            self.predicted[version] = self._restored(version, known)

    def follow(self, delay: int) -> None:
        if delay != self.delay:
            self.delay = delay
            self.predicted.clear()
            self._predict()
            self.oldest = self.newest

    def kept(self) -> dict[int, Buffers]:
        return {
            version: trained(tensors)
            for version, tensors in self.predicted.items()
            if version >= self.newest - self.delay
        }

    @property
    def alive(self) -> list[Buffers]:
        return [*super().alive, *self.predicted.values()]

    @property
    def behind(self) -> int:
        """None: the update writes the newest version in place."""
        return 0

    def read(self, version: int) -> Buffers:
        return self.predicted[max(version, self.oldest)]

    def update(
        self, gradients: Mapping[str, Tensor | None], groups: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        changed = super().update(gradients, groups)
        self._predict(groups)
        return changed

    def _predict(self, groups: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Predict the weights that the batches of the newest version read, with these settings of
        the optimizer's groups, or the current ones."""
        groups = self.optimizer.param_groups if groups is None else groups
        tensors = copy_of(self.live[self.newest], retire(self.predicted, self.newest - self.delay))
        weights: dict[Tensor, Tensor] = {
            parameter: tensors[name]
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }
        with torch.no_grad():
            predict_weights(self.optimizer, groups, weights, self.delay)
        self.predicted[self.newest] = tensors
