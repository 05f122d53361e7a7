"""Refuse backward hooks of a model, which would be lost in its graphs."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules import module as module_hooks

from fxpipe.compiler.looking import hooked
from fxpipe.errors import TraceError, way_out


def refuse_hooks(model: nn.Module, is_leaf: Callable[[str, nn.Module], bool]) -> None:
    """Check that no parameter has a hook on its gradient, and no module a backward hook.

    Args:
        model: the model.
        is_leaf: whether a submodule, given its name, is a leaf module, which keeps its hooks.

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
    leaves = [name for name, module in model.named_modules() if is_leaf(name, module)]
    for name, module in model.named_modules():
        if any(name == leaf or name.startswith(f"{leaf}.") for leaf in leaves):
            continue
        if module._backward_hooks or module._backward_pre_hooks:
            what = f"submodule {name!r}" if name else type(model).__name__
            raise TraceError(
                f"{what} has a backward hook, which no graph would call; remove it, or "
                f"{way_out(name)}"
            )
