"""Trace a model with ``torch.export``, as the front end does unless an extension has a tracer.

before:  class Net(nn.Module): forward(x) = relu_(bn(conv(x)))
after:   ExportedProgram of ATen operations over the very same Parameter objects
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.distributions import Distribution
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError, way_out
from fxpipe.passes.tracing.explain import untraceable
from fxpipe.torchtools import source
from fxpipe.torchtools.functions import OwnBackwardError, checkpoints_opened
from fxpipe.torchtools.pytrees import returning_parts

Dims = Sequence[tuple[int, ...]]
"""Flat input → some of its dimensions."""

Shapes = Sequence[tuple[int, ...] | None]
"""Flat input → its shape; None if it is no tensor."""

_DATA: Any = torch.Tensor.data
_TORCH_LOG = logging.getLogger("torch.fx.experimental.symbolic_shapes")


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    free: Dims = (),
) -> ExportedProgram:
    """Export the model in its present mode, for any size of some dimensions where it can be.

    Args:
        model: any module; its training flags decide what is traced. Its state is not changed.
        args: positional inputs of one micro-batch.
        kwargs: keyword inputs of one micro-batch.
        free: for each flat input the dimensions whose size may change; none if empty. A graph for
            size 1 holds for no other size, and graphs for other sizes do not hold for size 1.

    Raises:
        TraceError: the model cannot be traced; names its source line and the cure.
    """
    shapes: list[dict[str, Any] | None] = [None]
    if any(free):
        shapes.insert(0, _dynamic(model, args, kwargs, free))
    errors: list[Exception] = []
    for dynamic in shapes:
        for as_export in (False, True):
            # new dynamic dimensions for each try, because export changes them
            new_args, new_kwargs = pytree.tree_map_only(
                torch.Tensor, _no_view, (args, dict(kwargs))
            )
            try:
                return _export(model, new_args, new_kwargs, dynamic, as_export)
            except TraceError:
                raise
            except OwnBackwardError as error:
                raise untraceable(model, error) from error
            except Exception as error:
                errors.append(error)
    raise untraceable(model, errors[-1]) from errors[0]


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    free: Dims,
) -> tuple[ExportedProgram, Callable[[Shapes], bool]]:
    """The model's program of ATen operations, and a test of the shapes that it holds for.

    Arguments and errors are those of ``trace``.
    """
    program = trace(model, args, kwargs, free)
    return program, accepts(program, args, kwargs)


def accepts(
    program: ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Callable[[Shapes], bool]:
    """A test of whether a program, exported by ``trace`` with these arguments, holds for shapes."""
    symbolic = shapes_of([node.meta.get("val") for node in user_inputs(program)])
    traced = shapes_of(pytree.tree_leaves((args, dict(kwargs))))
    free = [
        (leaf, dim)
        for leaf, shape in enumerate(symbolic)
        for dim, size in enumerate(shape or ())
        if is_free(size)
    ]
    if not free:
        return lambda shapes: [*shapes] == traced
    # the test is kept for long and must not keep the batch: it needs only the inputs' shapes
    given = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, dict(kwargs)))
    program.example_inputs = given
    leaves = pytree.tree_leaves(given)
    strides = [
        x.stride() if isinstance(x, torch.Tensor) else ()
        for x in pytree.tree_leaves((args, dict(kwargs)))
    ]
    guards: list[nn.Module | None] = []

    def holds(shapes: Shapes) -> bool:
        if any((shapes[leaf] or ())[dim] < 2 for leaf, dim in free):
            return False  # sizes of 1 broadcast: the dynamic graph assumes at least 2
        if not guards:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                guards.append(getattr(program.module(), "_guards_fn", None))
        if guards[0] is None:
            return True
        try:
            guards[0](*map(resized, leaves, strides, shapes))
        except Exception:
            return False
        return True

    return holds


def user_inputs(program: ExportedProgram) -> list[fx.Node]:
    """The placeholders of a program's flat inputs, in order."""
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    return [placeholders[s.arg.name] for s in specs if s.kind is InputKind.USER_INPUT]


def is_free(size: Any) -> bool:
    """Whether a size is an expression of symbols, which the export did not make a number."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    """The shapes of flat inputs."""
    return [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves]


def resized(leaf: Any, strides: Sequence[int], shape: tuple[int, ...] | None) -> Any:
    """A tensor without data of another shape, laid out like one with these strides: with as much
    room after each dimension, such as after ``x[:, :-1]``."""
    if shape is None:
        return leaf
    if not strides:
        return torch.empty(shape, dtype=leaf.dtype, device="meta")
    made, last = [0] * len(shape), -1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] and last < 0:
            made[dim], last = strides[dim], dim
        elif strides[dim]:
            room = max(strides[dim] // strides[last] - leaf.shape[last], 0)
            made[dim], last = made[last] * (shape[last] + room), dim
    return torch.empty_strided(shape, made, dtype=leaf.dtype, device="meta")


def _no_view(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, but not as a view of another: for views, export fails on a guard of its own
    (``'NoneType' object has no attribute 'stride'``)."""
    return x.detach().requires_grad_(x.requires_grad)


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic: dict[str, Any] | None,
    as_export: bool,
) -> ExportedProgram:
    """Export a model, which behaves as under ``torch.compile`` or, if ``as_export``, as under
    ``torch.export``: some models then avoid control flow that depends on values, with results that
    are equal up to rounding."""
    from torch.export import _trace as exporter  # imported here because it is slow

    level = _TORCH_LOG.level
    # a failure is reported once, by our own error, without a dump of the graph so far
    _TORCH_LOG.setLevel(logging.CRITICAL)
    vars(exporter)["print"] = lambda *args, **kwargs: None
    try:
        with (
            warnings.catch_warnings(),
            checkpoints_opened(refuses=True),
            returning_parts(model),
            _announced(model, as_export),
            distributions_unchecked(),
            masks_unread(),
            DataDetached(),
            _use_lazy_graph_module(True),  # only graphs are read, so that no code is generated
        ):
            warnings.simplefilter("ignore")  # about attributes that the model itself assigns
            return torch.export.export(
                model, args, dict(kwargs), dynamic_shapes=dynamic, strict=False
            )
    finally:
        vars(exporter).pop("print", None)
        _TORCH_LOG.setLevel(level)


@contextmanager
def _announced(model: nn.Module, as_export: bool) -> Iterator[None]:
    """Inside, ``torch.compiler.is_exporting()`` returns ``as_export`` to the model.

    ``torch.vmap`` itself always sees True: else it hides from the trace what it computes.
    """
    from torch._export import utils  # imported here because it is slow

    name = "_maybe_find_pre_dispatch_tf_mode_for_export"  # torch.vmap calls it
    find: Callable[[], Any] = vars(utils).get(name, lambda: None)
    flags = vars(torch.compiler)

    def announce(module: nn.Module, args: Any) -> None:
        # export sets the flag before the model runs, and resets it afterwards
        flags["_is_exporting_flag"] = as_export

    def find_while_exporting() -> Any:
        announced, flags["_is_exporting_flag"] = flags["_is_exporting_flag"], True
        try:
            return find()
        finally:
            flags["_is_exporting_flag"] = announced

    hook = model.register_forward_pre_hook(announce)
    vars(utils)[name] = find_while_exporting
    try:
        yield
    finally:
        vars(utils)[name] = find
        hook.remove()


class DataDetached(TorchFunctionMode):
    """Inside, trace ``tensor.data`` as ``tensor.detach()``: export cannot trace ``.data``.

    On exit, refuse writes into such a tensor: autograd does not notice them in the model, but would
    notice them in the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._read: list[tuple[torch.Tensor, int, str]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in (_DATA.__get__, _DATA.__set__):
            return func(*args, **(kwargs or {}))
        frame = sys._getframe(source.users_level() - 1)
        where = source.of_frame(frame, frame.f_lineno)
        if func == _DATA.__set__ and where:
            raise _unseen(where)
        if args[0].requires_grad:
            self._read.append((args[0], args[0]._version, where))
        return args[0].detach() if func == _DATA.__get__ else func(*args)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for tensor, version, where in self._read:
            if error is None and tensor._version != version:
                raise _unseen(where)


def _unseen(where: str) -> TraceError:
    return TraceError(
        f"the model writes into the .data of a tensor, or into the tensor after that, at {where}, "
        "which no graph can hold; write under torch.no_grad() into a buffer, or work on a copy "
        f"(x = x.clone()); clamp weights where their optimizer has stepped; or {way_out('')}"
    )


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Inside, ``torch.distributions`` do not validate their arguments: a trace has no values."""
    validate = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validate)


@contextmanager
def masks_unread() -> Iterator[None]:
    """Inside, ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` apply attention masks without
    comparing their values with a causal mask, which would choose a faster kernel with the same
    result."""
    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


def _dynamic(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], free: Dims
) -> dict[str, Any]:
    """Parameter of ``forward`` → its dynamic dimensions, in the exporter's form."""
    flat = [dict.fromkeys(of_leaf, Dim.AUTO) or None for of_leaf in free]
    spec = pytree.tree_structure((args, dict(kwargs)))
    like_args, like_kwargs = pytree.tree_unflatten(flat, spec)
    return dict(inspect.signature(model.forward).bind(*like_args, **like_kwargs).arguments)
