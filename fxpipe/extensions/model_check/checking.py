"""Compare each new plan with the model, and find out why they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.compiler.front_end import Call
from fxpipe.compiler.plans import Plans
from fxpipe.compiler.preflight import trained_by
from fxpipe.errors import TraceError, way_out
from fxpipe.extensions.model_check.check import CloseError, check
from fxpipe.formatting import bytes_text
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.log import LOGGER
from fxpipe.passes.runner import Pass, run_all
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import taken_apart
from fxpipe.torchtools.state import autocasts, intra_op_threads, under, untouched

_CHECK = Pass(
    check,
    "traced, plan, values, state, call, differentiated, own",
    "",
    when="whole",
)


class Checking:
    """Compares the plans of a model with it. The model's state is not changed."""

    def __init__(self, plans: Plans) -> None:
        self._plans, self._options, self._front_end = plans, plans.options, plans.front_end
        self._doubted = False  # whether there was a warning of what may be rounding

    def __call__(self, call: Call, traced: Traced, plan: Plan) -> None:
        """Compare a plan with the model on the example of a call, unless no device may hold the
        model as a whole.

        Raises:
            TraceError: they differ; names the line or the value if it can be found.
        """
        options, model, gradients = self._options, self._options.model, call.purpose != "infer"
        outputs: list[Any] = []
        casts = autocasts()

        def run() -> tuple[Any, Tensor | None]:
            with under(casts):
                output, loss = self._front_end.call(call, call.with_loss)
            outputs[:] = [output]
            return output, loss

        facts = {
            **call.facts(traced, model),
            "plan": plan,
            "call": run,
            "differentiated": gradients,
            "own": [s.index for s in plan.stages if options.owns(s.index)],
            "whole": options.whole,
        }
        left_out = f"the compiled {call.purpose} is not compared with the model, "
        cure = "; compile a smaller one of its kind to check it"
        if not options.whole and options.hollow:
            size = bytes_text(options.hollow)
            LOGGER.info("%swhich has %s, not all with data%s", left_out, size, cure)
        elif not options.whole:
            LOGGER.info("%swhich no device holds as a whole%s", left_out, cure)
        with untouched(model), intra_op_threads(options.threads):
            try:
                with under(()):  # in graphs, casts are operations
                    run_all((_CHECK,), facts)
            except Exception as error:
                if not isinstance(error, TraceError):
                    raise
                if not (self._plans.proven and isinstance(error, CloseError)):
                    self._find_kept_values(call)
                    self._find_two_traces(call, error)
                    if given := [each for each in options.extensions if each.given]:
                        error.add_note(f"without extensions={given}?")
                    raise
                if not self._doubted:
                    LOGGER.warning("%s. Earlier graphs were right, so training goes on", error)
                self._doubted = True
            if gradients:
                with torch.enable_grad():
                    self._find_hidden(call, outputs.pop() if outputs else run()[0])

    def _find_two_traces(self, call: Call, error: TraceError) -> None:
        """Trace twice after a graph was found to be wrong. Raises TraceError with the line in which
        the traces differ, if they do: then tracing is not deterministic."""
        graphs = [self._front_end.trace(call) for _ in range(2)]
        line = _differing_line(*(traced.graph for traced in graphs))
        if line:
            raise TraceError(
                f"{type(self._options.model).__name__} cannot be traced at {line} (tracing is not "
                "deterministic: two traces differ there); let it depend on the inputs and the "
                f"model's parameters and buffers alone, or {way_out('')}"
            ) from error

    def _find_hidden(self, call: Call, output: Any) -> None:
        """Raise TraceError if a backward from the model's ``output`` would give a gradient to a
        tensor that is neither a parameter nor an input."""
        args, kwargs, _ = call.batch.unflatten(call.leaves)

        def again() -> Any:
            return taken_apart(self._front_end.call(call, False)[0])

        _refuse_hidden(self._options.model, (args, kwargs), taken_apart(output), again)

    def _find_kept_values(self, call: Call) -> None:
        """Raise TraceError if the loss reads a value that the model computes and keeps elsewhere
        than in its output, such as a forward hook's."""
        loss = self._options.objective.loss
        if loss is None or not call.with_loss:
            return
        _, _, targets = call.batch.unflatten(call.leaves)
        with torch.enable_grad():
            output, _ = self._front_end.call(call, False)
            _refuse_kept_values(self._options.model, loss, output, targets)


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


def _refuse_kept_values(
    model: nn.Module, loss: Callable[..., Any], output: Any, targets: Sequence[Any]
) -> None:
    """Check that the loss reads nothing of the model's run but its ``output``.

    Raises:
        TraceError: it does, so that a gradient to the model's parameters comes another way.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    alone = pytree.tree_map_only(Tensor, Tensor.detach, output)
    if any(id(tensor) in parameters for tensor in trained_by(loss(alone, *targets))):
        raise TraceError(
            f"the loss reads a value that {type(model).__name__} computes and keeps elsewhere than "
            "in its output, as a forward hook does; a stage hands on what forward returns alone, "
            "so return that value beside the output, and let the loss take it from there: "
            "loss(output, ...) gets all that forward returns"
        )


def _differing_line(first: fx.Graph, second: fx.Graph) -> str:
    """The first line at which two traces of a model differ, or ""."""
    for a, b in zip(first.nodes, second.nodes, strict=False):
        texts = {(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in (a, b)}
        if len(texts) > 1:
            return source.of_node(b) or source.of_node(a)
    return ""
