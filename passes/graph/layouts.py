"""Give tensors without data, and gradients, the strides that they have in a real run.

before:  y = batch_norm(x.transpose(1, 2), …)      without data, y has the strides of its input
after:   y = batch_norm(x.transpose(1, 2), …)      y is contiguous, as in a real run

A trace depends on strides: whether a view is possible, whether ``contiguous`` copies. On tensors
without data, PyTorch gives wrong strides for BatchNorm, and for many operations along dimensions of
size 1. Such operations are run once, on zeros. For gradients see ``lay_gradients``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.passes.graph.aliasing import may_alias
from fxpipe.torchtools.pytrees import memory

aten = torch.ops.aten

_NO_VIEWS = (aten.detach.default, aten._unsafe_view.default)
"""Operations whose results share another tensor's memory without being views to autograd."""

_RESHAPES = (aten.view.default, aten._unsafe_view.default)
"""Views that get other strides along sizes of 1 in a real run than without data."""

_REORDERINGS = frozenset(
    (aten._coalesce.default, aten.sparse_mask.default, aten.t.default, aten.transpose.int)
)
"""Operations on sparse tensors that keep the number of entries."""

_LIKE_ANOTHER = frozenset(
    (
        *(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default),
        *(aten.huber_loss_backward.default, aten.binary_cross_entropy.default),
        *(aten.binary_cross_entropy_backward.default, aten.softplus_backward.default),
        *(aten.elu_backward.default, aten.hardtanh_backward.default, aten.copysign.Tensor),
        *(aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.pow.Scalar),
        *(aten.log_sigmoid_forward.default, aten._log_softmax_backward_data.default),
        *(aten._weight_norm_interface.default, aten.channel_shuffle.default, aten.xlogy.Tensor),
        *(aten.floor_divide.default, aten.logit_backward.default, aten.special_xlog1py.default),
    )
)
"""Operations whose results take the strides of another operand without data than in a real run."""


class TrueLayouts(TorchDispatchMode):
    """Inside, with a fake tensor mode around it, operations give the strides of a real run.

    Operations that check something with ``equal``, which needs data, pass their check.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.equal.default:  # istft looks for a gap in its windows
            return False  # there was none in the model's own run
        result = func(*args, **kwargs)
        if isinstance(result, FakeTensor) and result.layout is torch.sparse_coo:
            return _with_entries(result, func, args)
        if not _in_doubt(func, (*args, *kwargs.values())):
            return result
        try:
            with unset_fake_temporarily(), torch.no_grad():
                real = func(*pytree.tree_map(_zeros, args), **pytree.tree_map(_zeros, kwargs))
        except Exception:  # the operation refuses zeros
            return result
        for pair in zip(pytree.tree_leaves(result), pytree.tree_leaves(real), strict=True):
            _lay_as(*pair)
        return result


class BatchNormsLaidOut(TorchFunctionMode):
    """Inside, while a model is exported, a BatchNorm's output has the strides of a real run."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_norm = func in (torch.batch_norm, functional.batch_norm)
        if is_norm and result.device.type == "cpu" and not _lie_alike(args[:1]):
            contiguous = torch.empty(result.shape, device="meta").stride()
            with disable_proxy_modes_tracing(), torch.no_grad():
                result.as_strided_(result.shape, contiguous)
        return result


def lay_gradients(module: fx.GraphModule) -> None:
    """Give the gradient of a tensor that is written through a view the tensor's own strides, as
    autograd in eager mode does.

    before:  view = permute(linear, …);  div_(view, 3)
    after:   flat = reshape(linear, [-1]);  laid = view_as(flat, linear)
             view = permute(laid, …);  div_(view, 3)

    The rounding of a sum depends on the strides of its operand, and in a functional graph a
    gradient has the strides of the incoming gradient. Both new nodes are views; their backward
    copies a gradient that has other strides.
    """
    graph = module.graph
    for base in dict.fromkeys(map(_written_base, graph.nodes)):
        if base is None:
            continue
        value = base.meta["val"]
        with graph.inserting_after(base):
            flat = graph.call_function(aten.reshape.default, (base, [-1]))
        with graph.inserting_after(flat):
            laid = graph.call_function(aten.view_as.default, (flat, base))
        with value.fake_mode, torch.no_grad():
            line = value.reshape([-1])
            flat.meta.update({**base.meta, "val": line})
            laid.meta.update({**base.meta, "val": line.view_as(value)})
        added = (flat, laid)
        base.replace_all_uses_with(laid, lambda user, added=added: user not in added)  # type: ignore[misc]


def _written_base(node: fx.Node) -> fx.Node | None:
    """The tensor that a node writes through a view, if it is contiguous and may need a gradient."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return None
    base, viewed = node, False
    while base.args and isinstance(source := base.args[0], fx.Node):
        here, there = base.meta.get("val"), source.meta.get("val")
        if not isinstance(here, FakeTensor) or not isinstance(there, FakeTensor):
            break
        shared = memory(here) == memory(there)
        if not shared or base.target in _NO_VIEWS:
            break
        viewed |= (here.shape, here.stride()) != (there.shape, there.stride())
        base = source
    value = base.meta.get("val")
    fits = isinstance(value, FakeTensor) and value.is_floating_point() and value.is_contiguous()
    return base if viewed and fits and base.op == "call_function" else None


def _with_entries(result: Tensor, func: Any, operands: tuple[Any, ...]) -> Tensor:
    """Give a sparse result as many entries as its operand has, where PyTorch gives it none.

    PyTorch does so for tensors that are transposed or otherwise reordered, or masked by another.
    """
    like = operands[1] if func is aten.sparse_mask.default else operands[0]
    if func not in _REORDERINGS or result._nnz() or not isinstance(like, FakeTensor):
        return result
    filled: Tensor = aten._sparse_coo_tensor_with_dims_and_tensors.default(
        result.sparse_dim(),
        result.dense_dim(),
        result.shape,
        torch.empty_like(like._indices()),
        torch.empty_like(like._values(), dtype=result.dtype),
        dtype=result.dtype,
        layout=result.layout,
        device=result.device,
        is_coalesced=result.is_coalesced(),
    )
    return filled


@cache
def _always_right(func: Any) -> bool:
    """Whether an operation gives the strides of a real run, whatever its operands are."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "fxpipe"):
        return True
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    writes = func._schema.is_mutable or may_alias(func) or seeded
    return writes and func not in _RESHAPES


def _in_doubt(func: Any, operands: Iterable[Any]) -> bool:
    """Whether an operation's results may have other strides in a real run."""
    if _always_right(func):
        return False
    lists = (x if isinstance(x, list | tuple) else (x,) for x in operands)
    tensors = [leaf for leaves in lists for leaf in leaves if isinstance(leaf, FakeTensor)]
    if func in _RESHAPES:
        return any(1 in x.shape for x in tensors)
    if not all(x.is_floating_point() or x.dtype is torch.bool for x in tensors):
        return False
    name, images = func._schema.name, [x for x in tensors if x.dim() > 1]
    turned = "batch_norm" in name and not _lie_alike(images)
    turned |= func in _LIKE_ANOTHER and not all(x.is_contiguous() for x in images)
    return turned or any(map(_has_ambiguous_strides, tensors))


def _lie_alike(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors are all contiguous, or all in channels-last format."""
    orders = {torch.contiguous_format, torch.channels_last}
    for x in tensors:
        orders = {order for order in orders if x.is_contiguous(memory_format=order)}
    return bool(orders)


def _has_ambiguous_strides(x: Tensor) -> bool:
    """Whether a dimension of size 1 has another stride than in a new tensor."""
    expected = 1
    if 1 not in x.shape or x.layout is not torch.strided:
        return False
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size == 1 and stride != expected:
            return True
        expected *= max(size, 1)
    return False


def _zeros(value: Any) -> Any:
    """Real zeros with the strides of a tensor without data."""
    if not isinstance(value, FakeTensor):
        return value
    if value.layout is not torch.strided:
        return torch.zeros_like(value, device=value.fake_device)
    zeros = torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.fake_device
    )
    return zeros.zero_()


def _lay_as(result: Any, real: Any) -> None:
    """Give a result the strides of a real one, in place: a tracer already knows this tensor."""
    dense = isinstance(result, Tensor) and result.layout is torch.strided
    # a BatchNorm returns None for results that are masked out, but a tensor without data
    if not dense or real is None or result.stride() == real.stride():
        return
    mode = get_proxy_mode()
    with disable_proxy_modes_tracing(), torch.no_grad():
        result.as_strided_(result.shape, real.stride())
        slot: Any = mode and get_proxy_slot(result, mode.tracer, None)
        if slot:
            slot.proxy.node.meta["val"] = result.detach()
