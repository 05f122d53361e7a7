"""Let a BatchNorm that averages over all its batches (``momentum=None``) be traced.

before:  batch_norm(x, w, b, mean, var, True, 1.0 / float(count), eps)       a value decides
after:   fxpipe.batch_norm(x, w, b, mean, var, True, 1.0 / count, eps)

Only the weight of a batch differs: a number for ``batch_norm``, a tensor for this operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxpipe.passes.graph.layouts import lie_alike

_LIBRARY = torch.library.Library("fxpipe", "FRAGMENT")
_LIBRARY.define(
    "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
    "Tensor running_var, bool training, Tensor momentum, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
AVERAGED = torch.ops.fxpipe.batch_norm.default
"""As ``aten._native_batch_norm_legit_functional``, with the momentum a float64 tensor without
dimensions on the CPU; it is called in training alone."""

_FUNCTIONAL = torch.ops.aten._native_batch_norm_legit_functional.default


def _run(*operands: Any) -> Any:
    *others, momentum, eps = operands
    return _FUNCTIONAL(*others, momentum.item(), eps)


def _shapes(x: Tensor, *operands: Any) -> Any:
    *others, _, eps = operands
    x = x if lie_alike([x]) else x.contiguous()
    return _FUNCTIONAL(x, *others, 1.0, eps)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, mean, variance, _, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight, mean, variance, output[1], output[2])


def _backward(ctx: Any, gradient: Tensor, *others: Any) -> Any:
    x, weight, mean, variance, saved_mean, saved_rstd = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:3]]
    found = torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, mean, variance, saved_mean, saved_rstd, True, ctx.eps, wanted
    )
    return *found, None, None, None, None, None


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("batch_norm", _run, _key)
_LIBRARY.impl("batch_norm", _shapes, "Meta")
torch.library.register_autograd("fxpipe::batch_norm", _backward, setup_context=_keep, lib=_LIBRARY)


@contextmanager
def averages_traced(model: nn.Module) -> Iterator[None]:
    """Inside, BatchNorms with ``momentum=None`` do not read a number from a tensor."""
    with ExitStack() as undo:
        for module in model.modules():
            if (
                isinstance(module, _BatchNorm)
                and type(module).forward is _BatchNorm.forward
                and (module.momentum, module.training) == (None, True)
                and module.num_batches_tracked is not None
                and "forward" not in vars(module)
            ):
                vars(module)["forward"] = _Averaging(module)
                undo.callback(vars(module).pop, "forward")
        yield


class _Averaging:
    """The forward of a BatchNorm with ``momentum=None``."""

    def __init__(self, module: _BatchNorm) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        module = self.module
        module._check_input_dim(input)
        mean, variance, count = module.running_mean, module.running_var, module.num_batches_tracked
        assert mean is not None
        assert variance is not None
        assert count is not None
        count.add_(1)
        weight = 1.0 / count.double()
        y: Tensor
        y, _, _, new_mean, new_variance = AVERAGED(
            input, module.weight, module.bias, mean, variance, True, weight, module.eps
        )
        mean.copy_(new_mean.detach())
        variance.copy_(new_variance.detach())
        return y
