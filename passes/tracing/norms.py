"""Norms whose running statistics PyTorch hides from a trace, or lets a value decide.

``open_instance_norms`` makes what an InstanceNorm writes to its running statistics explicit.

before:  y = instance_norm(x, w, b, mean, var, True, 0.1, 1e-05, False)
after:   m = repeat(mean, [n]);  v = repeat(var, [n]);  …
         z = batch_norm(view(x, [1, n * c, …]), …, m, v, True, 0.1, 1e-05, False)
         copy_(mean, mean(view(m, [n, c]), 0));  copy_(var, mean(view(v, [n, c]), 0))
         y = view(z, shape of x)

The operation writes its statistics, but its schema does not say so, so that the writes would be
lost. It is replaced by its own definition in PyTorch: n samples of c channels as n * c channels.

``averages_traced`` is for a BatchNorm that averages over all its batches (``momentum=None``).

before:  batch_norm(x, w, b, mean, var, True, 1.0 / float(count), eps)       a value decides
after:   fxpipe.batch_norm(x, w, b, mean, var, True, 1.0 / count, eps)

Only the weight of a batch differs: a number for ``batch_norm``, a tensor for this operation.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxpipe.passes.graph.layouts import lie_alike
from fxpipe.torchtools.source import call_like

aten = torch.ops.aten


def open_instance_norms(module: fx.GraphModule) -> None:
    """Replace every InstanceNorm that updates its statistics.

    Args:
        module: an exported graph; it is changed.
    """
    opened = [
        node
        for node in module.graph.nodes
        if node.target is aten.instance_norm.default and node.args[3] is not None and node.args[5]
    ]
    for node in opened:
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(_open(node))
        module.graph.erase_node(node)
    if opened:
        module.graph.lint()
        module.recompile()


def _open(norm: fx.Node) -> fx.Node:
    x, weight, bias, mean, variance, _, momentum, eps, cudnn = norm.args
    make = functools.partial(call_like, norm)
    assert isinstance(x, fx.Node)
    with x.meta["val"].fake_mode, torch.no_grad():
        sizes: list[Any] = [
            make(aten.sym_size.int, x, dim) if isinstance(size, torch.SymInt) else size
            for dim, size in enumerate(x.meta["val"].shape)
        ]
        n, c, *rest = sizes
        channels = make(operator.mul, n, c) if isinstance(n, fx.Node) else n * c
        weight, bias, means, variances = (
            None if each is None else make(aten.repeat.default, each, [n])
            for each in (weight, bias, mean, variance)
        )
        flat = make(aten.view.default, make(aten.contiguous.default, x), [1, channels, *rest])
        normed = make(
            aten.batch_norm.default,
            *(flat, weight, bias, means, variances, True, momentum, eps, cudnn),
        )
        for each, updated in ((mean, means), (variance, variances)):
            rows = make(aten.view.default, updated, [n, c])
            make(aten.copy_.default, each, make(aten.mean.dim, rows, [0]))
        return make(aten.view.default, normed, sizes)


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
                vars(module)["forward"] = functools.partial(_averaging, module)
                undo.callback(vars(module).pop, "forward")
        yield


def _averaging(module: _BatchNorm, input: Tensor) -> Tensor:
    """The forward of a BatchNorm with ``momentum=None``."""
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
