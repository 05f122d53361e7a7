"""Refuse what no graph could hold, and run the model and its loss before they are traced.

Errors in the inputs or the loss are thus reported in terms of the user's own code, not of the
tracer's.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxpipe.compiler.guard import Guard
from fxpipe.compiler.objective import Objective, apart
from fxpipe.errors import InputError, TraceError, told, way_out
from fxpipe.formatting import plural
from fxpipe.log import LOGGER
from fxpipe.passes.tracing.loss_module import own_loss
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import detached, taken_apart
from fxpipe.torchtools.state import hooked, on_fakes, same_sizes, tried


def _called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The model's output, detached."""
    try:
        with warnings.catch_warnings():
            # torch.utils.checkpoint warns of this, which is true only here
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
            return detached(tried(lambda: model(*args, **kwargs)))
    except Exception as error:
        if source.lacks_memory(error):
            raise
        cure = "give it inputs that it takes, or correct that line"
        if "more than 1 value per channel when training" in str(error):
            cure = (
                "BatchNorm cannot train on a micro-batch of one sample: give larger batches or "
                "fewer micro-batches, and drop_last=True to the DataLoader if the last is smaller"
            )
        raise InputError(
            f"{type(model).__name__} fails on the first micro-batch{_told(error)}; {cure}"
        ) from error


def run_model(
    model: nn.Module,
    guard: Guard,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run the model under its guard.

    Raises:
        InputError: the model itself raises; names its line.
        TraceError: the guard refuses what it does.
    """
    with same_sizes(model):
        return guard.checked(lambda: _called(model, args, kwargs))


def tell_checkpoints(
    model: nn.Module, guard: Guard, called: Collection[str], told: set[str]
) -> None:
    """Warn once if a model that has run uses ``torch.utils.checkpoint``, which graphs leave out.

    Some models use it only where there are gradients: ``gradient_checkpointing_enable()`` of
    transformers and diffusers sets an attribute of their modules. Those ``called`` as they are keep
    it.
    """
    asks = any(
        getattr(module, "gradient_checkpointing", False) is True
        for name, module in model.named_modules()
        if not _is_inside(name, called)
    )
    if "checkpoints" not in told and (asks or guard.ran(inspect.unwrap(checkpoint).__code__)):
        told.add("checkpoints")
        LOGGER.warning(
            "%s uses torch.utils.checkpoint (gradient checkpointing), which graphs leave out: "
            'stages keep all their activations. With compile(..., recompute="always") or '
            '"except_last", each stage keeps its inputs only, and runs its forward again',
            type(model).__name__,
        )


def refuse_tensors(model: nn.Module) -> None:
    """Check that all parameters and buffers are dense, and that all buffers have shapes. Those of
    ``nn.LazyBatchNorm1d`` get theirs in the first run, with the statistics of that run.

    Raises:
        InputError: a tensor is sparse, or a buffer has no shape yet.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) and not isinstance(tensor, nn.Parameter):
            raise InputError(
                f"the model's buffer {name!r} has no shape before the model has run; run the model "
                "once in evaluation mode, which gives shapes to all that is lazy: model.eval(), "
                "model(one micro-batch), model.train()"
            )
        if tensor.layout is not torch.strided:
            raise InputError(
                f"{name!r} of the model is {tensor.layout}, and stages keep dense tensors; keep "
                "its indices and values, and make the sparse tensor of them in the forward of a "
                "leaf module (torch.sparse_coo_tensor(indices, values, size)), see docs/tracing.md"
            )


def refuse_hooks(model: nn.Module, called: Collection[str]) -> None:
    """Check that no parameter has a hook on its gradient, and no module a backward hook.

    Modules that are ``called`` as they are may have backward hooks.

    Raises:
        TraceError: there is such a hook; names the parameter or the module.
    """
    for name, parameter in model.named_parameters():
        if hooked(parameter):
            raise TraceError(
                f"parameter {name!r} has a hook on its gradient, which a pipeline would never "
                "call: its gradients are sums over micro-batches, made without autograd; remove "
                "it, and change .grad after step, or give an optimizer that does"
            )
    if module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks:
        raise TraceError(
            "there is a backward hook for all modules, which no graph would call; remove it "
            "(the handle that register_module_full_backward_hook gave has .remove())"
        )
    for name, module in model.named_modules():
        hooks = module._backward_hooks or module._backward_pre_hooks
        if hooks and not _is_inside(name, called):
            what = f"submodule {name!r}" if name else type(model).__name__
            raise TraceError(
                f"{what} has a backward hook, which no graph would call; remove it, or "
                f"{way_out(name)}"
            )


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a module is one of these, or inside of one."""
    return f"{name}.".startswith(tuple(f"{each}." for each in modules))


def output_dims(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Sequence[tuple[int, ...]],
    outputs: Sequence[Any],
    size: int,
) -> list[tuple[int, ...]] | None:
    """For each flat output its batch dimensions, found by a run on a batch of twice the size.

    The run is on tensors without data; returns None if the model refuses them. A number of samples
    counts as an output with batch dimension 0.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def doubled(leaf: Any, dims: tuple[int, ...]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        fake: Tensor = mode.from_tensor(leaf.detach())
        for dim in dims:
            fake = torch.cat([fake, fake], dim)
        return fake

    try:
        with on_fakes(model), mode, torch.no_grad():
            leaves, spec = pytree.tree_flatten((args, kwargs))
            doubles = [doubled(leaf, batch) for leaf, batch in zip(leaves, dims, strict=True)]
            args, kwargs = pytree.tree_unflatten(doubles, spec)
            doubled_outputs = pytree.tree_leaves(taken_apart(model(*args, **kwargs)))
    except Exception:
        return None
    if len(outputs) != len(doubled_outputs):
        return None
    return [_growing(a, b, size) for a, b in zip(outputs, doubled_outputs, strict=True)]


def _growing(once: Any, twice: Any, size: int) -> tuple[int, ...]:
    """The dimensions of an output that are as large as the batch and double with it."""
    if isinstance(once, Tensor) and isinstance(twice, Tensor) and once.dim() == twice.dim():
        sizes = enumerate(zip(once.shape, twice.shape, strict=True))
        return tuple(dim for dim, pair in sizes if pair == (size, 2 * size))
    counts = type(once) is int and (once, twice) == (size, 2 * size)
    return (0,) if counts else ()


def run_loss(
    model: nn.Module,
    objective: Objective,
    output: Any,
    targets: Sequence[Any],
    size: int,
) -> tuple[str, ...]:
    """Check the loss: it must be a scalar, or one loss per sample, and have a gradient. There may
    be numbers beside it, whose names are returned.

    Raises:
        InputError: the loss raises (the error names its line), returns something else, has no
            gradient to the output, or has one to another tensor.
    """
    loss = objective.loss
    assert loss is not None
    _check_signature(loss, targets)
    held = taken_apart(output)
    leaves, spec = pytree.tree_flatten(output)
    inputs = [
        leaf.detach().requires_grad_()
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
        else leaf
        for leaf in leaves
    ]
    try:
        with torch.enable_grad():
            # no autograd leaves, as the loss could not write to these in place
            results = [x * 1 if _requires_grad(x) else x for x in inputs]
            value, numbers = apart(loss(pytree.tree_unflatten(results, spec), *targets))
    except Exception as error:
        if source.lacks_memory(error):
            raise
        cure = "give it outputs and targets that it takes, or correct that line"
        if not targets:
            cure = "if it wants a target, give step(..., target=...); else correct that line"
        raise InputError(
            f"the loss fails on the first micro-batch{_told(error)}; {cure}"
        ) from error
    if not isinstance(value, Tensor):
        raise InputError(
            f"the loss returns {_a(value)}; return one tensor, a scalar such as the mean, or a "
            'pair of it and a dict of numbers to log, {"accuracy": …}'
        )
    _check_scalar(value[0] if value.dim() == 1 and len(value) == size else value, "the loss")
    _refuse_hidden_in_loss(model, value, (inputs, held, targets))
    if not value.requires_grad and any(map(_requires_grad, inputs)):
        raise InputError(
            "the loss has no gradient to the model's output; compute it with differentiable "
            "operations, without detach, argmax or item"
        )
    for name, number in numbers.items():
        one = number.numel() == 1 if isinstance(number, Tensor) else isinstance(number, float | int)
        if not one or (isinstance(number, Tensor) and number.is_complex()):
            shape = f" of shape {tuple(number.shape)}" if isinstance(number, Tensor) else ""
            raise InputError(
                f"the loss returns {_a(number)}{shape} as {name!r} beside the loss; return numbers "
                "or scalars there, such as a mean"
            )
    return tuple(map(str, numbers))


def _refuse_hidden_in_loss(model: nn.Module, loss: Any, inputs: Any) -> None:
    """Raise InputError if the loss has a gradient to another tensor than its inputs."""
    known = {id(leaf) for leaf in pytree.tree_leaves(inputs)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for tensor in trained_by(loss):
        if id(tensor) in known:
            continue
        if id(tensor) in names:
            raise InputError(
                f"the loss reads the model's parameter {names[id(tensor)]!r}, to which it would "
                "give no gradient: it gets the model's output and the targets; return the loss "
                "from the model, and leave out loss=, or let the optimizer decay the weights"
            )
        raise InputError(
            f"the loss reads a tensor of shape {tuple(tensor.shape)} that requires a gradient, "
            "which no stage would train; make it a parameter of the model, return the loss from "
            "it, and leave out loss=, or detach it"
        )


def trained_by(output: Any) -> Iterator[Tensor]:
    """The tensors to whose ``.grad`` a backward from ``output`` adds."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    yield from (leaf for leaf in tensors if leaf.is_leaf and leaf.requires_grad)
    nodes: list[Any] = [leaf.grad_fn for leaf in tensors if leaf.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                nodes.append(parent)


def try_own_loss(output: Any) -> None:
    """Check that the model returns a loss: its output, or the output's ``.loss``.

    Raises:
        InputError: it does not.
    """
    value = own_loss(output)
    if value is output and (not isinstance(value, Tensor) or value.dim()):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _a(value)
        raise InputError(
            f"there is no loss: the model returns {what}, neither a scalar nor something with "
            ".loss; give compile(..., loss=function)"
        )
    _check_scalar(value, "the loss that the model returns")


def _check_signature(loss: Callable[..., Any], targets: Sequence[Any]) -> None:
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        inspect.signature(function).bind(None, *targets)
    except TypeError as error:
        count = "no target" if not targets else plural(len(targets), "target")
        raise InputError(
            f"the loss does not fit the model's output and {count}: {error}; give step(..., "
            "target=...) what it takes, or a tuple for several"
        ) from None
    except ValueError:
        return  # a function written in C has no signature


def _check_scalar(value: Any, name: str) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is {_a(value)}; return one tensor, a scalar such as the mean")
    if value.dim():
        raise InputError(
            f"{name} has shape {tuple(value.shape)}; reduce it to a scalar, as with .mean()"
        )
    if not value.is_floating_point():
        raise InputError(f"{name} is of {value.dtype}; return a floating-point number")


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _told(error: Exception) -> str:
    line = source.of_exception(error)
    return (f" at {line}" if line else "") + f" ({told(error).splitlines()[0][:300]})"


def _a(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
