"""What a contender is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Contender(ABC):
    """One process's part in the training of a case."""

    @abstractmethod
    def step(self) -> Tensor | None:
        """One update; the loss of the batch, in the process that has it."""

    def meet(self) -> None:  # noqa: B027 (most have nobody to wait for)
        """Wait for the other processes, before the clock starts."""

    def settle(self) -> None:  # noqa: B027 (most have done all when a step returns)
        """Wait until nothing of the steps so far is left to do; the clock still runs."""

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Nothing is asked of it any more."""


def index_of(model: nn.Sequential, name: str) -> int:
    """At which place a child of a sequence stands.

    Raises:
        ValueError: it has no such child.
    """
    return [child for child, _ in model.named_children()].index(name)
