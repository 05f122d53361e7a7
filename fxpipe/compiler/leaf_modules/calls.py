"""Let a capture see each call of a leaf module as one operation that it cannot look into.

before:    class Net(nn.Module): forward(x) = self.head(self.experts(x)[0])      experts is a leaf
captured:  leaf = fxpipe.leaf([x], [weight], 0);  getitem = leaf[0];  linear = …
after:     leaf = called experts([x], [weight]);  getitem = leaf[0];  linear = …

The model runs once for real, to record what its leaf modules return. Then it is captured with a
stand-in for each leaf module, which has a backward of one operation, too. In the graphs, functions
take the place of both, which call the module with its own hooks, control flow and autograd
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.compiler.leaf_modules.nests import Nest, UnfitLeaf
from fxpipe.compiler.leaf_modules.nodes import (
    LeafBackward,
    LeafCall,
    LeafForward,
    Look,
)
from fxpipe.compiler.leaf_modules.trial import Trial
from fxpipe.ir.traced import AUTOCAST, DRAWS, Traced
from fxpipe.passes.tracing.loss_module import LossModule
from fxpipe.torchtools.state import tried

LOSS = "fxpipe_loss"
"""The name of the loss among leaf modules."""

_LIBRARY = torch.library.Library("fxpipe", "FRAGMENT")
_LIBRARY.define("leaf(Tensor[] given, Tensor[] state, int call) -> Tensor[]")
_LIBRARY.define(
    "leaf_backward(Tensor[] gradients, Tensor held, Tensor[] given, Tensor[] trained, int[] which, "
    "int[] wanted, int call) -> Tensor[]"
)
_LEAF = torch.ops.fxpipe.leaf.default
_BACKWARD = torch.ops.fxpipe.leaf_backward.default

_known: dict[int, LeafCall] = {}
"""Number of a call → the call, while its model is being captured."""


def _results(given: Sequence[Tensor], state: Sequence[Tensor], call: int) -> list[Tensor]:
    known = _known[call]
    written = dict(zip(known.state, state, strict=True))
    return [
        *(look.on_meta() for look in known.looks),
        *(torch.empty_like(written[name]) for name in known.written),
        torch.empty(known.held, dtype=torch.uint8, device="meta"),
    ]


def _gradients(
    gradients: Sequence[Tensor],
    held: Tensor,
    given: Sequence[Tensor],
    trained: Sequence[Tensor],
    which: Sequence[int],
    wanted: Sequence[int],
    call: int,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (*(given[at] for at in wanted), *trained)]


_LIBRARY.impl("leaf", _results, "Meta")
_LIBRARY.impl("leaf_backward", _gradients, "Meta")


class _StandIn(torch.autograd.Function):
    """A call of a leaf module as one operation, whose backward is one, too."""

    @staticmethod
    def forward(ctx: Any, number: int, given: int, *tensors: Tensor) -> Any:
        call = _known[number]
        results = torch.ops.fxpipe.leaf(tensors[:given], tensors[given:], number)
        trained = zip(tensors[given:], call.needs[given:], strict=True)
        # not saved by PyTorch's ways, which refuse what is written later: no value of them is read
        ctx.number, ctx.held, ctx.given = number, results[-1], tensors[:given]
        ctx.trained = [x for x, needs in trained if needs]
        flags = (*call.differentiable, *(False for _ in call.written), False)
        pairs = zip(results, flags, strict=True)
        ctx.mark_non_differentiable(*(x for x, flag in pairs if not flag))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call = _known[ctx.number]
        which = [at for at, gradient in enumerate(gradients) if gradient is not None]
        reached = frozenset[int]().union(*(call.reached[at] for at in which))
        wanted = [at for at in sorted(reached) if call.needs[at]]
        found: Sequence[Tensor] = ()
        if wanted or ctx.trained:
            found = torch.ops.fxpipe.leaf_backward(
                [gradients[at] for at in which],
                ctx.held,
                ctx.given,
                ctx.trained,
                which,
                wanted,
                ctx.number,
            )
        rest = iter(found)
        of_given = [next(rest) if at in wanted else None for at in range(len(ctx.given))]
        of_state = [next(rest) if needs else None for needs in call.needs[len(ctx.given) :]]
        return None, None, *of_given, *of_state


class LeafCalls:
    """The calls of leaf modules in one run of a model, and of its loss if that is one."""

    def __init__(self, leaves: Mapping[str, nn.Module], loss: bool = False) -> None:
        """Take the leaf modules by name, and whether the loss is one."""
        self.leaves = dict(leaves)
        self.loss = loss
        self.calls: list[LeafCall] = []
        self.trials: list[Trial] = []
        self._indices: Iterator[int] = iter(())
        self._inside = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, record the calls of leaf modules while the model runs once for real."""
        with _called_instead(self.leaves, self._record):
            yield

    @contextmanager
    def opaque(self, model: nn.Module) -> Iterator[None]:
        """Inside, each call of a leaf module is one operation, for the model to be captured."""

        def begin(model: nn.Module, args: Any) -> None:
            self._indices = iter(range(len(self.calls)))

        hook = model.register_forward_pre_hook(begin)
        try:
            with _called_instead(self.leaves, self._stand_in):
                yield
        finally:
            hook.remove()

    def forget(self) -> None:
        """Forget the calls; to be called after the capture."""
        for call in self.calls:
            del _known[call.number]
        self.calls.clear()
        self.trials.clear()

    def _record(self, name: str, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # a leaf inside of a leaf
            return module._call_impl(*args, **kwargs)
        self._inside = True
        try:
            trial = Trial(name, module, args, kwargs)
            output = trial.output
            if torch.is_grad_enabled():  # the model may differentiate it
                output = module._call_impl(*args, **kwargs)
        finally:
            self._inside = False
        call = trial.call(max(_known, default=-1) + 1)
        _known[call.number] = call
        self.calls.append(call)
        self.trials.append(trial)
        return output

    def _stand_in(self, name: str, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        index = next(self._indices, -1)
        call = self.calls[index] if index >= 0 else None
        placed = Nest.of((args, kwargs))
        if call is None or call.name != name or not placed.can_be_given(call.given):
            raise UnfitLeaf(
                name,
                "is called otherwise when the model is traced than when it runs; let its calls "
                "depend on nothing but its inputs' shapes",
            )
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        own = dict((*module.named_parameters(), *module.named_buffers()))
        state = [own[at] for at in call.state]
        recording = torch.is_grad_enabled()
        needs = tuple(
            recording and x.requires_grad and at not in call.written
            for at, x in zip(("",) * len(given) + call.state, (*given, *state), strict=True)
        )
        call = replace(call, given=placed, needs=needs, recording=recording)
        self.calls[index] = _known[call.number] = call
        results = _StandIn.apply(call.number, len(given), *given, *state)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for at, value in zip(call.written, results[len(call.looks) :], strict=False):
                own[at].copy_(value)
        return call.returned.filled(results)


def record_leaves(
    model: nn.Module,
    loss_module: LossModule | None,
    calls: LeafCalls,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Sequence[Any],
    targets: Sequence[Any],
) -> None:
    """Run the model once for real, and its loss on the flat ``output``, to record what its leaf
    modules return."""

    def run() -> None:
        calls.forget()
        model(*args, **kwargs)

    if calls.loss and loss_module is not None:
        calls.leaves[LOSS] = loss_module
    with calls.recorded():
        tried(run)
        if calls.loss and loss_module is not None:
            loss_module(*output, *targets)


def call_leaves(traced: Traced, calls: LeafCalls) -> Traced:
    """Let the graphs call their leaf modules, in place of the operations that stand for them.

    Raises:
        UnfitLeaf: one does what no leaf module may do.
    """
    assert traced.backward is not None
    by_number = {call.number: call for call in calls.calls}
    for trial in calls.trials:
        trial.refuse_constants(traced.constants.values())
    for node in traced.graph.find_nodes(op="call_function", target=_BACKWARD):
        raise UnfitLeaf(
            by_number[int(str(node.args[-1]))].name,
            "is differentiated in the model's forward, and has no gradient of its gradient; mark "
            "the module as the leaf that differentiates it",
        )
    for node in traced.graph.find_nodes(op="call_function", target=_LEAF):
        given, state, number = node.args
        call, module = by_number[int(str(number))], calls.leaves[by_number[int(str(number))].name]
        node.target, node.args = LeafForward(call, module), (given, state)
        node.meta[AUTOCAST] = call.casts
        node.meta[DRAWS] = node.target if call.draws else None
        for each in (node, *node.users):
            if call.name != LOSS:
                stack = each.meta.get("nn_module_stack", {})
                each.meta["nn_module_stack"] = {**stack, call.name: (call.name, type(module))}
    for node in traced.backward.graph.find_nodes(op="call_function", target=_BACKWARD):
        *operands, which, wanted, number = node.args
        call = by_number[int(str(number))]
        looks = [Look.of(x) for x in node.meta["val"]]
        results, inputs = ([int(str(at)) for at in each] for each in (which, wanted))
        node.target, node.args = LeafBackward(call, results, inputs, looks), tuple(operands)
    return traced


@contextmanager
def _called_instead(
    modules: Mapping[str, nn.Module], function: Callable[..., Any]
) -> Iterator[None]:
    """Inside, ``function(name, module, *args, **kwargs)`` is called instead of each of these
    modules and its hooks."""
    with ExitStack() as stack:
        for name, module in modules.items():
            # the attribute that nn.Module.compile sets: it replaces hooks and forward
            call = partial(function, name, module)
            stack.enter_context(patch.object(module, "_compiled_call_impl", call))
        yield
