"""How PyTorch's joint export is to capture a model: with its lines, and operations as they run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, sym_int
from torch._functorch import config as functorch
from torch._subclasses import fake_impls
from torch.distributions import Distribution
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from fxpipe.errors import TraceError, way_out
from fxpipe.torchtools import source
from fxpipe.torchtools.functions import checkpoints_opened

aten = torch.ops.aten

_DATA: Any = torch.Tensor.data
_GET, _SET = _DATA.__get__, _DATA.__set__
_WATCHED = frozenset((_GET, _SET, torch.istft, Tensor.istft))


@contextmanager
def capturing(as_export: bool, symbolic: bool) -> Iterator[None]:
    """Inside, PyTorch captures.

    Args:
        as_export: whether the model behaves as under ``torch.export``, else as under
            ``torch.compile``.
        symbolic: whether sizes are symbols.
    """
    from torch.fx.experimental import proxy_tensor  # slow to import
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    with (
        warnings.catch_warnings(),
        announced(as_export),
        patch.object(PythonKeyTracer, "create_node", _with_lines(PythonKeyTracer.create_node)),
        # nobody reads the metadata that PyTorch gives its nodes, nor runs its graph
        patch.object(proxy_tensor, "_extract_tensor_metadata", lambda value: None),
        _use_lazy_graph_module(True),
        _kept_whole(symbolic),
        functorch.patch(backward_pass_autocast="off"),
        # a trace has no values, which distributions would validate, and modules of transformers
        # compare with a causal mask, to choose a faster kernel with the same result
        patch.object(Distribution, "_validate_args", False),
        patch.object(transformer, "_detect_is_causal_mask", _as_said),
        checkpoints_opened(),
        DataDetached(),
    ):
        warnings.simplefilter("ignore")
        yield


def announced(as_export: bool) -> AbstractContextManager[Any]:
    """Inside, ``torch.compiler.is_compiling()`` is True, and ``is_exporting()`` as asked."""
    return patch.multiple(torch.compiler, _is_exporting_flag=as_export, _is_compiling_flag=True)


def _with_lines(create: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
    """A tracer's ``create_node`` whose nodes get the user's line that makes them. PyTorch's own
    way, with all frames, would take as long as all else."""

    def with_line(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = create(tracer, *args, **kwargs)
        frame = sys._getframe(1)
        while frame is not None and not source.is_users(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            code = frame.f_code
            line = f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
            node.meta["stack_trace"] = line
        return node

    return with_line


_APART = (
    *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_lanczos2d_aa"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("gru", "lstm", "rnn_relu", "rnn_tanh", "hardshrink", "softshrink"),
    *("multi_margin_loss", "multilabel_margin_loss_forward"),
)
_FOR_SYMBOLS = (
    *("broadcast_tensors", "istft", "matmul", "one_hot", "pad_sequence", "stft", "tensor_split"),
    "unsafe_chunk",
)
"""Operations that PyTorch would write in others while it captures, which may round otherwise; and
those that it has to, where sizes are symbols."""


@contextmanager
def _kept_whole(symbolic: bool) -> Iterator[None]:
    """Inside, PyTorch captures operations as they run."""
    hidden: list[tuple[Any, dict[Any, Any]]] = []
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    for name in (*_APART, *(() if symbolic else _FOR_SYMBOLS)):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            operation = getattr(packet, overload)
            if kernels := {
                key: operation.py_kernels[key] for key in _WRITTEN & operation.py_kernels.keys()
            }:
                hidden.append((operation, kernels))
    try:
        for operation, kernels in hidden:
            for key in kernels:
                del operation.py_kernels[key]
            if symbolic and operation._overloadname == "vec":
                operation.py_kernels[composite] = partial(_resized, operation.overloadpacket)
            operation._dispatch_cache.clear()
        yield
    finally:
        for operation, kernels in hidden:
            operation.py_kernels.pop(composite, None)
            operation.py_kernels.update(kernels)
            operation._dispatch_cache.clear()


def _resized(operation: Any, x: Tensor, size: Any, *options: Any) -> Tensor:
    """An ``upsample`` to ``size`` or by factors, which come last, that computes the size itself:
    PyTorch's own would make numbers of symbols."""
    *corners, factors = options
    shape = x.shape[2:]
    if size is None:
        size = [
            int(n * f) if isinstance(n, int) else sym_int(n * f)
            for n, f in zip(shape, factors, strict=True)
        ]
    resized: Tensor = operation.default(x, size, *corners, *(factors or [None] * len(shape)))
    return resized


_WRITTEN = {torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd}


_UNEQUAL = {aten.equal.default: lambda mode, func, *args: False}
"""istft looks for gaps in its windows by ``equal``, and there was none in the model's own run."""


class DataDetached(TorchFunctionMode):
    """Inside, trace ``tensor.data`` as ``tensor.detach()``: no trace sees ``.data``. And ``istft``
    finds no gaps.

    On exit, refuse writes into such a tensor: autograd does not notice them in the model, but would
    notice them in the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._read: list[tuple[Tensor, int, str]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _WATCHED:  # PyTorch's own code gets here ten thousands of times
            return func(*args, **kwargs) if kwargs else func(*args)
        if func not in (_GET, _SET):
            with patch.dict(fake_impls.op_implementations_dict, _UNEQUAL):
                return func(*args, **(kwargs or {}))
        frame = sys._getframe(source.users_level() - 1)
        where = source.of_frame(frame, frame.f_lineno)
        if func == _SET and where:
            raise _unseen(where)
        if args[0].requires_grad:
            self._read.append((args[0], args[0]._version, where))
        return args[0].detach() if func == _GET else func(*args)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for tensor, version, where in self._read:
            if tensor._version != version:
                raise _unseen(where) from error


def _unseen(where: str) -> TraceError:
    return TraceError(
        f"the model writes into the .data of a tensor, or into the tensor after that, at {where}, "
        "which no graph can hold; write under torch.no_grad() into a buffer, or work on a copy "
        f"(x = x.clone()); clamp weights where their optimizer has stepped; or {way_out('')}"
    )


def _as_said(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Whether an attention mask is causal, by what the caller says of it."""
    return is_causal is True
