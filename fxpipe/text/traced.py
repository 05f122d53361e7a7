"""A traced graph as text, and back: its inputs and outputs, what it reads and writes, its graph::

    traced
      input x
      input none                       # an input of the call that is no value of the graph
      output linear (0,)               # and the dimensions that are the batch, None if unknown
      output literal 3 ()
      loss mse_loss
      norm ('moments', 'bn.running_mean', 'bn.running_var', None, 0.1)
      parameter p_weight = linear.weight
      buffer b_mean = bn.running_mean
      write bn.running_mean = getitem_3
      graph
        p_weight = placeholder()
        …

``traced leaves`` calls leaf modules, and reads and writes as a stage with ``leaves`` does. How the
outputs nest, the values of constants and the sizes for which the graph holds are no part of the
text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError
from fxpipe.ir.traced import Literal, Traced, Value
from fxpipe.text.plan import BodyReader, print_body
from fxpipe.text.scan import Line, is_name
from fxpipe.text.target import Function, named
from fxpipe.text.value import ValueReader, print_value
from fxpipe.torchtools.moments import DeferredNorm

_HEADER = re.compile(r"traced([ \t]+leaves)?[ \t]*(?:#.*)?")
_ITEM = re.compile(r"(input|output|loss|norm)[ \t]+([^#\s].*)")
_OUTPUT = re.compile(r"(literal[ \t]+)?(.+?)[ \t]+(None|\([0-9, ]*\))[ \t]*(?:#.*)?")
_WORD = re.compile(r"(\S+)[ \t]*(?:#.*)?")
_FORM = {
    "input": "write 'input name', or 'input none'",
    "output": "write 'output name (0,)' or 'output literal 3 ()', with the dimensions or None",
    "loss": "write 'loss name'",
    "norm": "write 'norm (moments, running mean, running variance, counter, momentum)'",
}


def print_traced(traced: Traced) -> str:
    """The graph as text that ``parse_traced`` reads back to an equal value.

    Raises:
        InputError: a literal output, or an argument of a node, has no text.
    """
    return "\n".join(_lines(traced)) + "\n"


def _lines(traced: Traced) -> Iterator[str]:
    yield "traced" + (" leaves" if traced.leaves else "")
    for name in traced.inputs:
        yield f"  input {'none' if name is None else name}"
    for out in traced.outputs:
        what = out.name if isinstance(out, Value) else f"literal {_literal(out)}"
        yield f"  output {what} {out.dims}"
    if traced.loss is not None:
        yield f"  loss {traced.loss}"
    for norm in traced.deferred:
        fields = (norm.moments, norm.running_mean, norm.running_var, norm.tracked, norm.momentum)
        yield f"  norm {print_value(fields)}"
    yield from print_body(traced)


def _literal(out: Literal) -> str:
    try:
        return print_value(out.value)
    except InputError as error:
        raise InputError(f"an output that is no value of the graph: {error}") from None


def parse_traced(
    text: str, root: nn.Module | None = None, functions: Iterable[Function] = ()
) -> Traced:
    """Read a traced graph. Nothing that the text names is run.

    Args:
        text: what ``print_traced`` gave; blank lines and comments mean nothing.
        root: the module that holds the leaf modules which the graph calls, if it calls any.
        functions: what the text may name beside the list in ``fxpipe.text.target``.

    Raises:
        ParseError: with line and column of the first thing that is wrong.
    """
    return _TracedReader(text, root, tuple(functions)).read()


class _TracedReader(BodyReader):
    """Reads a traced graph."""

    def read(self) -> Traced:
        form = "a traced graph starts with 'traced' or 'traced leaves'"
        header = self.next(form)
        match = header.match(_HEADER)
        if match is None or header.indent:
            raise header.error(form, header.indent)
        inputs: list[str | None] = []
        outputs: list[Value | Literal] = []
        norms: list[DeferredNorm] = []
        loss: str | None = None
        while (line := self.peek()) is not None and (item := line.match(_ITEM)):
            self.position += 1
            word, rest, at = item[1], item[2], item.start(2)
            match word:
                case "input":
                    name = _name(line, word, rest, at)
                    inputs.append(None if name == "none" else name)
                case "output":
                    outputs.append(self._output(line, rest, at))
                case "loss" if loss is None:
                    loss = _name(line, word, rest, at)
                case "norm":
                    norms.append(self._norm(line, rest, at))
                case _:
                    raise line.error("an earlier line already names the loss", line.indent)
        leaves = match[1] is not None
        body = self.body("the traced graph", "a traced graph", leaves)
        if (left := self.peek()) is not None:
            raise left.error("nothing may follow the graph's 'return'", left.indent)
        return Traced(
            body.graph,
            body.parameters,
            body.buffers,
            {},
            tuple(inputs),
            body.writes,
            tuple(outputs),
            pytree.tree_structure([0] * len(outputs)),
            leaves=leaves,
            loss=loss,
            deferred=tuple(norms),
        )

    def _output(self, line: Line, text: str, at: int) -> Value | Literal:
        match = _OUTPUT.fullmatch(text)
        if match is None:
            raise line.error(_FORM["output"], at)
        dims = ast.literal_eval(match[3])
        if dims is not None and not isinstance(dims, tuple):
            raise line.error(_FORM["output"], at + match.start(3))
        if match[1] is None:
            return Value(_name(line, "output", match[2], at), dims)
        return Literal(self._value(line, match[2], at + match.start(2)), dims)

    def _norm(self, line: Line, text: str, at: int) -> DeferredNorm:
        match self._value(line, text.partition("#")[0], at):
            case (str(moments), str(mean), str(variance), str() | None as tracked, momentum) if (
                momentum is None or isinstance(momentum, float)
            ):
                return DeferredNorm(moments, mean, variance, tracked, momentum)
        raise line.error(_FORM["norm"], at)

    def _value(self, line: Line, text: str, at: int) -> Any:
        """What an expression in a line says."""
        part = Line(" " * at + text, line.number)
        match part.statement():
            case ast.Expr(value=value):
                return ValueReader(part, {}, named(self.functions)).read(value)
        raise line.error("this is no value", at)


def _name(line: Line, word: str, text: str, at: int) -> str:
    match = _WORD.fullmatch(text)
    if match is None or not is_name(match[1]):
        raise line.error(_FORM[word], at)
    return match[1]
