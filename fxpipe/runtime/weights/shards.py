"""What the optimizers of stages are if each replica trains a part of every parameter.

An extension cuts the parameters; see ``sharding`` of ``fxpipe.compiler.options.Options``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.runtime.weights.optimizer_state import OptimizerState
from fxpipe.runtime.weights.stage_weights import StageWeights


class Shards(ABC):
    """One replica's parts of the parameters of a stage.

    Attributes:
        of: parameter → this replica's part, which the optimizer trains in its place.
    """

    of: dict[nn.Parameter, nn.Parameter]

    @abstractmethod
    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[Any], replica: int, replicas: int
    ) -> None:
        """Let a stage's new optimizer, made over all these parameters, train this replica's parts
        in their place; its groups and their settings stay."""

    @staticmethod
    @abstractmethod
    def check(optimizer: Optimizer) -> None:
        """Raise InputError if an optimizer computes something else on parts than on the whole."""

    @abstractmethod
    def follow(self) -> None:
        """Make the parts equal to the current parameters again, if possible as views of them."""

    @abstractmethod
    def parts_of(self, parameters: Sequence[Tensor]) -> list[nn.Parameter]:
        """This replica's part of each of these parameters."""

    @abstractmethod
    def trained(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """This replica's parts of those parameters that are trained, for the other replicas."""

    @abstractmethod
    def named(self, names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """Part → its parameter's name."""

    @abstractmethod
    def cut_out(self, saved: OptimizerState, names: Mapping[nn.Parameter, str]) -> OptimizerState:
        """Cut the state of whole parameters down to these parts."""

    @abstractmethod
    def told(self, state: OptimizerState, names: Mapping[nn.Parameter, str]) -> OptimizerState:
        """Add to each tensor in the state of these parts its place in the whole, see ``Parts``."""

    @abstractmethod
    def versions(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, delay: int
    ) -> StageWeights:
        """The versions of a stage whose optimizer trains these parts."""
