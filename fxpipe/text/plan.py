"""Print plans and traced graphs: graphs, with what they read and write.

A plan lists its edges, then its stages::

    plan stages=2
    edge in x host->0
    edge act relu 0->1 gradient
    edge out linear 1->host gradient
    stage 0
      parameter p_conv_weight = conv.weight
      buffer b_bn_running_mean = bn.running_mean
      write bn.running_mean = getitem_3
      graph
        p_conv_weight = placeholder()
        …
        return (relu, getitem_3)
    stage 1 autograd
      …

A traced graph lists the inputs and outputs of the whole model::

    traced
      input x
      input None                       # an input of the call that is no value of the graph
      output linear (0,)               # with its batch dimensions, or None if they are unknown
      output literal 3 ()
      loss mse_loss
      norm ('moments', 'bn.running_mean', 'bn.running_var', None, 0.1)
      parameter p_weight = linear.weight
      graph
        …

After ``autograd``, a line without ``=`` such as ``parameter conv.weight`` or ``write
bn.running_mean`` names what a module that is called reads or writes itself. Names of the model are
quoted if they contain anything but letters, digits, ``_`` and ``.``. The text leaves out a plan's
shapes, costs and kernels. Of a traced graph it leaves out how the outputs nest, the values of
constants, and the sizes for which the graph holds. Nothing reads it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.traced import Traced, Value
from fxpipe.text.graph import print_value

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


def print_plan(plan: Plan) -> str:
    """Print a plan as text."""
    lines = [f"plan stages={len(plan.stages)}", *(f"edge {edge}" for edge in plan.edges)]
    for stage in plan.stages:
        lines.append(f"stage {stage.index}" + (" autograd" if stage.under_autograd else ""))
        lines.extend(_body(stage))
    return "\n".join(lines) + "\n"


def print_traced(traced: Traced) -> str:
    """Print a traced graph as text."""
    lines = ["traced" + (" autograd" if traced.under_autograd else "")]
    lines += [f"  input {name}" for name in traced.inputs]
    for out in traced.outputs:
        what = out.name if isinstance(out, Value) else f"literal {print_value(out.value)}"
        lines.append(f"  output {what} {out.dims}")
    if traced.loss is not None:
        lines.append(f"  loss {traced.loss}")
    for norm in traced.deferred:
        fields = (norm.moments, norm.running_mean, norm.running_var, norm.tracked, norm.momentum)
        lines.append(f"  norm {print_value(fields)}")
    return "\n".join([*lines, *_body(traced)]) + "\n"


def _body(holder: Stage | Traced) -> Iterator[str]:
    """Print what a graph reads and writes, and the graph, as indented lines."""
    for word, arguments in (("parameter", holder.parameters), ("buffer", holder.buffers)):
        for argument in arguments:
            target = _print_target(argument.target)
            in_module = holder.under_autograd and argument.name == argument.target
            yield f"  {word} {target}" if in_module else f"  {word} {argument.name} = {target}"
    for write in holder.writes:
        target = _print_target(write.target)
        in_module = holder.under_autograd and write.value == write.target
        yield f"  write {target}" + ("" if in_module else f" = {write.value}")
    yield "  graph"
    for line in holder.text.split("\n"):
        yield f"    {line}"


def _print_target(target: str) -> str:
    return target if _PLAIN.fullmatch(target) else repr(target)
