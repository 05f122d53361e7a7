"""Operations by their FLOPs, their bytes and the shape of their product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fxpipe.log import LOGGER
from fxpipe.torchtools.pytrees import size_in_bytes

Shape = tuple[int, int, int, int]
"""Of a product: how many pairs of matrices, the rows and columns of each result, and the length of
the sums."""


class Operation(NamedTuple):
    """What an operation takes of a device.

    Attributes:
        name: such as ``mm``.
        flops: floating-point operations of its matrix products.
        bytes: that it reads and writes.
        shape: of its product; None if it is none.
        itemsize: bytes of a number.
    """

    name: str
    flops: float
    bytes: float
    shape: Shape | None = None
    itemsize: int = 4

    def divided(self, parts: int) -> Operation:
        """One part of it: a product has a part of its columns."""
        if parts == 1:
            return self
        shape = self.shape
        if shape is not None:
            pairs, rows, columns, length = shape
            if pairs % parts == 0:  # heads of an attention
                shape = pairs // parts, rows, columns, length
            else:
                shape = pairs, rows, max(1, columns // parts), length
        return self._replace(flops=self.flops / parts, bytes=self.bytes / parts, shape=shape)


_FREE = {
    *("view", "t", "expand", "permute", "_unsafe_view", "detach", "transpose", "reshape", "alias"),
    *("unsqueeze", "squeeze", "slice", "select", "as_strided", "split", "split_with_sizes"),
    *("unbind", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("unfold", "diagonal", "chunk", "view_as", "lift_fresh", "view_as_real", "view_as_complex"),
    *("size", "stride", "sym_size", "sym_stride", "sym_numel", "is_same_size", "movedim"),
}
"""Operations that move no bytes."""

_UNCOUNTED = (
    "linalg_",
    "_linalg_det",
    "_linalg_eigh",
    "_linalg_solve",
    "_linalg_svd",
    "fft_",
    "_fft_",
    "cholesky",
    "lstm",
    "gru",
    "rnn",
    "einsum",
)
"""How the names of operations begin that have products of which torch counts no FLOPs."""


def operation(function: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Operation | None:
    """What a call of an operator takes, by its arguments and its result, which need no data. None
    if it moves no bytes."""
    packet = getattr(function, "_overloadpacket", None)
    name = packet.__name__ if packet is not None else getattr(function, "__name__", "call")
    if name in _FREE:
        return None
    flops = 0.0
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
        if _given(function, args, kwargs, "is_causal"):
            flops /= 2  # kernels leave out what is masked
    tensors = list(_tensors([args, kwargs]))
    moved = {id(x): size_in_bytes(x) for x in (*tensors, *_tensors(out))}
    if name in ("embedding", "index_select", "gather", "index") and isinstance(out, Tensor):
        moved = {0: 2 * size_in_bytes(out)}  # of the table it reads what it gives
    if name.startswith("nll_loss"):
        moved = {0: sum(map(size_in_bytes, _tensors(out)))}  # it picks a number of each row
    shape = _shape(name, tensors, args, out, flops)
    sized = (x.element_size() for x in tensors if x.is_floating_point())
    return Operation(name, flops, float(sum(moved.values())), shape, next(sized, 4))


def uncounted(function: Any) -> bool:
    """Whether an operator may have FLOPs that torch does not count: it is none of PyTorch's own, or
    one of those of which it is known."""
    packet = getattr(function, "_overloadpacket", None)
    if packet is None:
        module = getattr(function, "__module__", "") or ""
        return not module.startswith(("_operator", "builtins", "fxpipe"))
    if packet in flop_registry:
        return False
    if function.namespace not in ("aten", "prims", "prim", "fxpipe"):
        return True
    checks = not function._schema.returns  # one that returns nothing only raises errors
    return packet.__name__.startswith(_UNCOUNTED) and not checks


def warn_of(operators: Iterable[str]) -> None:
    """Warn of operators that may have FLOPs that torch does not count, if there are any."""
    if some := ", ".join(sorted(operators)):
        LOGGER.warning("torch counts no FLOPs of %s, so that only their bytes count", some)


def _given(function: Any, args: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument of an operator that has this name, if it has one."""
    names = [argument.name for argument in function._schema.arguments]
    return dict(zip(names, args, strict=False)).get(name, kwargs.get(name))


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))


def _shape(name: str, tensors: Sequence[Tensor], args: Any, out: Any, flops: float) -> Shape | None:
    """The shape of a product."""
    if not flops:
        return None
    first = next(iter(_tensors(out)), None)
    if first is None:
        return None
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
        pairs = left.shape[0] if left.dim() == 3 else 1
        return pairs, first.shape[-2], first.shape[-1], left.shape[-1]
    if name == "convolution":
        weight = tensors[1]
        rows = first.numel() // max(1, first.shape[1])
        return 1, rows, weight.shape[0], prod(weight.shape[1:])
    if name == "convolution_backward":
        gradient, _, weight = tensors[:3]
        rows = gradient.numel() // max(1, gradient.shape[1])
        return 1, rows, prod(weight.shape[1:]), weight.shape[0]
    if first.dim() == 4:  # attention: the products of its heads
        pairs, length = first.shape[0] * first.shape[1], first.shape[2]
        return pairs, length, length, first.shape[3]
    return 1, first.numel() // max(1, first.shape[-1]), first.shape[-1], first.shape[-1]
