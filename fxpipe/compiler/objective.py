"""The loss of a batch, made of the losses of its micro-batches, and their weights in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fxpipe.runtime.batch import MicroBatches

if TYPE_CHECKING:
    from fxpipe.compiler.compiled import Compiled
    from fxpipe.runtime.host import Watch

Loss = Callable[..., Any]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    Micro-batch i has n_i samples and the loss l_i. The loss of the batch is Σ n_i l_i / Σ n_i for
    "mean", and Σ l_i for "sum".

    Attributes:
        loss: ``loss(output, *targets)`` → a scalar, or one loss per sample, alone or with numbers
            beside it, see ``apart``; None if the model returns its loss.
        reduction: whether losses of samples are averaged or added up.
    """

    loss: Loss | None = None
    reduction: Reduction = "mean"

    def __call__(self, output: Any, *targets: Any) -> Any:
        """Compute the loss of a micro-batch, a scalar; see ``joined``."""
        return self.with_logged(output, *targets)[0]

    def with_logged(self, output: Any, *targets: Any) -> tuple[Any, dict[str, Any]]:
        """Compute the loss of a micro-batch, and the numbers beside it as scalars without
        gradients."""
        assert self.loss is not None
        value, logged = apart(self.loss(output, *targets))
        value = self.joined(value, *targets) if getattr(value, "ndim", 0) else value
        return value, {str(name): _scalar(number) for name, number in logged.items()}

    def joined(self, losses: Any, *targets: Any) -> Any:
        """Average one loss per sample, or add them up."""
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def counts(self, micro: MicroBatches) -> Sequence[float]:
        """What each micro-batch has of what the loss is a mean over: its samples."""
        return micro.sizes

    def weights(self, counts: Sequence[float]) -> Sequence[float]:
        """The factor of each micro-batch's loss, from the ``counts`` of all micro-batches."""
        if self.reduction == "sum":
            return [1.0] * len(counts)
        total = sum(counts)
        return [count / total for count in counts]

    @property
    def averages(self) -> bool:
        """Whether the losses of micro-batches are averaged by their samples."""
        return self.reduction == "mean"


def apart(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """The loss, and the numbers beside it by name, in what a loss function returns: a loss, a pair
    ``(loss, {"accuracy": …})``, or a mapping with the loss as ``"loss"``."""
    match returned:
        case (loss, Mapping() as logged):
            return loss, logged
        case Mapping() if "loss" in returned:
            return returned["loss"], {n: x for n, x in returned.items() if n != "loss"}
    return returned, {}


def _scalar(number: Any) -> Tensor:
    """A number that a loss returns beside it, as a floating-point scalar of its own."""
    if not isinstance(number, Tensor):
        # a number of samples is a symbol in a trace, and stays one
        return torch.scalar_tensor(number, dtype=torch.get_default_dtype())
    scalar = number.detach().reshape(())
    return scalar.clone() if scalar.is_floating_point() else scalar.float()


class Weighed(NamedTuple):
    """A call whose losses are weighed.

    Attributes:
        compiled: the call.
        micro: its micro-batches, each with the weight of its loss in the batch's loss.
        watch: what looks at the outputs of a step, if anything does. All ranks decide alike.
    """

    compiled: Compiled
    micro: MicroBatches
    watch: Watch | None = None


def with_weights(micro: MicroBatches, weights: Sequence[float]) -> MicroBatches:
    """The micro-batches of this replica, with the weights of those of all replicas."""
    if len(weights) == len(micro):
        return replace(micro, weights=weights)
    cut = [weights[first : first + len(micro)] for first in range(0, len(weights), len(micro))]
    return replace(micro, weights=cut[micro.replica], all_weights=cut)
