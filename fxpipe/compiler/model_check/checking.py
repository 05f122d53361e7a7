"""Compare each new plan with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from fxpipe.compiler import passes
from fxpipe.compiler.front_end import Call
from fxpipe.compiler.model_check.check import CloseError, check
from fxpipe.compiler.preflight import trained_by
from fxpipe.errors import TraceError, told
from fxpipe.formatting import bytes_text
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.log import LOGGER
from fxpipe.passes.runner import Pass, run_all
from fxpipe.passes.tracing.loss_module import own_loss
from fxpipe.torchtools import source
from fxpipe.torchtools.functions import checkpoints_opened
from fxpipe.torchtools.pytrees import taken_apart
from fxpipe.torchtools.state import (
    assigned_in_place,
    autocasts,
    intra_op_threads,
    on_fakes,
    under,
    untouched,
)

T = TypeVar("T")

_CHECK = Pass(
    check,
    "traced, plan, values, state, call, differentiated, apart",
    "",
    when="whole",
)

if TYPE_CHECKING:
    from fxpipe.compiler.plans import Plans


class Checking:
    """Compares the plans of a model with it. The model's state is not changed."""

    def __init__(self, plans: Plans) -> None:
        self._plans, self._options = plans, plans.options
        self._doubted = False  # whether there was a warning of what may be rounding

    def __call__(self, call: Call, traced: Traced, plan: Plan) -> bool:
        """Compare a plan with the model on the example of a call.

        Returns:
            Whether it was compared, here or on the first rank, or cannot be as the model has no
            data; not if the first device has no memory for the values of all stages.

        Raises:
            TraceError: they differ; names the line or the value if it can be found.
        """
        options, model, gradients = self._options, self._options.model, call.purpose != "infer"
        if not options.group.checks and not passes.of(options, "compile"):
            return True  # all ranks have the same plan; but each compiles its own stages alone
        outputs: list[Any] = []
        casts = autocasts()

        def run() -> tuple[Any, Tensor | None]:
            with under(casts):
                output, loss = self._called(call, call.with_loss)
            outputs[:] = [output]
            return output, loss

        facts = {
            **call.facts(traced, model),
            "plan": plan,
            "call": run,
            "differentiated": gradients,
            "whole": options.whole,
            "apart": options.apart,
        }

        def left_out(why: str) -> None:
            cure = "compile a smaller one of its kind to check it"
            LOGGER.info(
                "the compiled %s is not compared with the model, %s; %s", call.purpose, why, cure
            )

        if not options.whole:
            size = bytes_text(options.hollow or options.size)
            left_out(f"which has {size}, not all with data or on one device")
        compared = True
        with untouched(model), intra_op_threads(options.threads):
            try:
                with under(()):  # in graphs, casts are operations
                    run_all((_CHECK,), facts)
            except Exception as error:
                if options.apart and source.lacks_memory(error):
                    left_out(f"for which {options.here} has no memory: {told(error)}")
                    compared = False
                    outputs.clear()
                elif not isinstance(error, TraceError):
                    raise
                elif not (self._plans.proven and isinstance(error, CloseError)):
                    if given := [each for each in options.extensions if each.given]:
                        error.add_note(f"without extensions={given}?")
                    raise
                else:
                    if not self._doubted:
                        LOGGER.warning("%s. Earlier graphs were right, so training goes on", error)
                    self._doubted = True
            if gradients:
                with torch.enable_grad(), under(casts):
                    self._find_hidden(call, outputs.pop() if outputs else None)
        return compared

    def _called(self, call: Call, with_loss: bool) -> tuple[Any, Tensor | None]:
        """Call the model itself on one micro-batch; returns its output, and its loss or None."""
        args, kwargs, targets = call.batch.unflatten(call.leaves)
        model = self._options.model
        with assigned_in_place(model), checkpoints_opened():
            output = model(*args, **kwargs)
            if not with_loss:
                return output, None
            if self._options.objective.loss is not None:
                return output, self._options.objective(output, *targets)
            return output, own_loss(output)

    def _find_hidden(self, call: Call, output: Any) -> None:
        """Raise TraceError if a backward from the model's ``output``, or from what another run
        gives if that is None, would give a gradient to a tensor that is neither a parameter nor an
        input."""
        args, kwargs, _ = call.batch.unflatten(call.leaves)

        def again() -> Any:
            return _without_activations(
                self._options.model, lambda: taken_apart(self._called(call, False)[0])
            )

        output = again() if output is None else taken_apart(output)
        _refuse_hidden(self._options.model, (args, kwargs), output, again)


def _without_activations(model: nn.Module, run: Callable[[], T]) -> T:
    """Run a model for its graph of autograd only, of which no activation is kept: on tensors
    without data, or on real ones where the model's code asks for values."""
    try:
        with on_fakes(model), FakeTensorMode(allow_non_fake_inputs=True):
            return run()
    except Exception:
        LOGGER.debug("the model does not run without data", exc_info=True)
    nothing: Callable[[Any], Any] = lambda _: None  # noqa: E731
    with saved_tensors_hooks(nothing, nothing):
        return run()


def _refuse_hidden(model: nn.Module, inputs: Any, output: Any, again: Callable[[], Any]) -> None:
    """Check that a backward through the model gives gradients to its parameters and inputs only.

    A graph would take another tensor, such as a parameter in a plain list, for a constant, which
    would silently get no gradient. A tensor that each run makes anew, such as
    ``torch.zeros(3, requires_grad=True)`` in forward, does no harm.

    Args:
        output: the model's output for the inputs, computed with gradients enabled.
        again: runs the model once more, to find the tensors that each run makes.

    Raises:
        TraceError: there is such a tensor.
    """
    known = {*map(id, model.parameters()), *map(id, pytree.tree_leaves(inputs))}
    hidden = [tensor for tensor in trained_by(output) if id(tensor) not in known]
    later = {id(tensor) for tensor in trained_by(again())} if hidden else set()
    for tensor in hidden:
        if id(tensor) in later:
            raise TraceError(
                f"{type(model).__name__} reads a tensor of shape {tuple(tensor.shape)} that "
                "requires a gradient and is no parameter of it, so that a pipeline would never "
                "give it one; register it (nn.Parameter as an attribute, nn.ParameterList for "
                "several), or detach it"
            )
