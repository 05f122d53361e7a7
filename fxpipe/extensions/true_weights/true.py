"""True weights, where parameters hold something else, such as a prediction of later weights.

An optimizer with a method ``true_weights`` tells them: parameter → tensor. Batches train on what
parameters hold; users see, evaluate, save and load the true weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpipe.errors import InputError
from fxpipe.torchtools.optimizers import Several


@contextmanager
def true_weights(optimizer: Optimizer) -> Iterator[frozenset[Tensor]]:
    """Let parameters hold their true weights in the block, and yield those that it changes. What is
    written to one in the block is what it holds from then on, and its true weight.

    Raises:
        InputError: ``true_weights`` returns a tensor that is no value of the parameter.
    """
    parts: Any = optimizer.alone() if isinstance(optimizer, Several) else [optimizer]
    telling = [part.true_weights for part in parts if hasattr(part, "true_weights")]
    true: dict[Tensor, Tensor] = {p: w for tell in telling for p, w in tell().items()}
    for parameter, weights in true.items():
        wanted, given = (f"{list(x.shape)}, {x.dtype}, {x.device}" for x in (parameter, weights))
        if wanted != given:
            raise InputError(
                f"true_weights() of the optimizer returns a tensor ({given}) for a parameter "
                f"({wanted}); return one like the parameter"
            )
    held = {parameter: (parameter.data, parameter._version) for parameter in true}
    try:
        for parameter, weights in true.items():
            parameter.data = weights.detach()
        yield frozenset(true)
    finally:
        for parameter, (data, version) in held.items():
            parameter.data = data
            if parameter._version != version:
                with torch.no_grad():
                    parameter.copy_(true[parameter])
