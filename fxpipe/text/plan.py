"""Plans and traced graphs as text, and back: graphs with what they read and write.

A plan has its edges, then each stage::

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
    stage 1 leaves
      …

A traced graph has the inputs and outputs of the whole model::

    traced
      input x
      input none                       # an input of the call that is no value of the graph
      output linear (0,)               # and the dimensions that are the batch, None if unknown
      output literal 3 ()
      loss mse_loss
      norm ('moments', 'bn.running_mean', 'bn.running_var', None, 0.1)
      parameter p_weight = linear.weight
      graph
        …

With ``leaves`` a line such as ``parameter conv.weight`` or ``write bn.running_mean``, with no
``=``, names what a leaf module reads or writes itself. A name of the model that is more than
letters, digits, ``_`` and ``.`` stands in quotes. No part of the text are a plan's shapes, costs
and kernels, and of a traced graph how the outputs nest, the values of constants and the sizes for
which it holds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError
from fxpipe.ir.plan import Argument, Plan, Stage, Write
from fxpipe.ir.traced import Literal, Traced, Value
from fxpipe.ir.value import Edge
from fxpipe.text.graph import parse_graph
from fxpipe.text.program import parse_edge
from fxpipe.text.scan import Line, end_of, is_name, lines_of
from fxpipe.text.target import Function, named
from fxpipe.text.value import ValueReader, print_value
from fxpipe.torchtools.moments import DeferredNorm

_END = r"[ \t]*(?:#.*)?"
_COUNT = r"(0|[1-9][0-9]{0,8})"
_PLAN = re.compile(rf"plan[ \t]+stages={_COUNT}{_END}")
_STAGE = re.compile(rf"stage[ \t]+{_COUNT}([ \t]+leaves)?{_END}")
_EDGE = re.compile(r"edge(?=[ \t])([^#]*)(?:#.*)?")
_GRAPH = re.compile(rf"graph{_END}")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_TARGET = r"""([A-Za-z0-9_.]+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_NAME = r"([A-Za-z_][A-Za-z0-9_]*)"
_ARGUMENT = re.compile(rf"(parameter|buffer)[ \t]+{_NAME}[ \t]*=[ \t]*{_TARGET}{_END}")
_WRITE = re.compile(rf"write[ \t]+{_TARGET}[ \t]*=[ \t]*{_NAME}{_END}")
_HELD = re.compile(rf"(parameter|buffer|write)[ \t]+{_TARGET}{_END}")

_ITEMS = "'parameter name = target', 'buffer name = target', 'write target = name' and then 'graph'"
_TRACED = re.compile(rf"traced([ \t]+leaves)?{_END}")
_ITEM = re.compile(r"(input|output|loss|norm)[ \t]+([^#\s].*)")
_OUTPUT = re.compile(rf"(literal[ \t]+)?(.+?)[ \t]+(None|\([0-9, ]*\)){_END}")
_WORD = re.compile(rf"(\S+){_END}")
_FORM = {
    "input": "write 'input name', or 'input none'",
    "output": "write 'output name (0,)' or 'output literal 3 ()', with the dimensions or None",
    "loss": "write 'loss name'",
    "norm": "write 'norm (moments, running mean, running variance, counter, momentum)'",
}


def print_plan(plan: Plan) -> str:
    """The plan as text that ``parse_plan`` reads back to an equal value."""
    lines = [f"plan stages={len(plan.stages)}", *(f"edge {edge}" for edge in plan.edges)]
    for stage in plan.stages:
        lines.append(f"stage {stage.index}" + (" leaves" if stage.leaves else ""))
        lines.extend(_body(stage))
    return "\n".join(lines) + "\n"


def print_traced(traced: Traced) -> str:
    """The graph as text that ``parse_traced`` reads back to an equal value.

    Raises:
        InputError: a literal output, or an argument of a node, has no text.
    """
    lines = ["traced" + (" leaves" if traced.leaves else "")]
    lines += [f"  input {'none' if name is None else name}" for name in traced.inputs]
    for out in traced.outputs:
        what = out.name if isinstance(out, Value) else f"literal {_literal(out)}"
        lines.append(f"  output {what} {out.dims}")
    if traced.loss is not None:
        lines.append(f"  loss {traced.loss}")
    for norm in traced.deferred:
        fields = (norm.moments, norm.running_mean, norm.running_var, norm.tracked, norm.momentum)
        lines.append(f"  norm {print_value(fields)}")
    return "\n".join([*lines, *_body(traced)]) + "\n"


def _literal(out: Literal) -> str:
    try:
        return print_value(out.value)
    except InputError as error:
        raise InputError(f"an output that is no value of the graph: {error}") from None


def _body(holder: Stage | Traced) -> Iterator[str]:
    """What a graph reads and writes, and the graph, indented."""
    for word, arguments in (("parameter", holder.parameters), ("buffer", holder.buffers)):
        for argument in arguments:
            target = _print_target(argument.target)
            held = holder.leaves and argument.name == argument.target
            yield f"  {word} {target}" if held else f"  {word} {argument.name} = {target}"
    for write in holder.writes:
        target = _print_target(write.target)
        held = holder.leaves and write.value == write.target
        yield f"  write {target}" + ("" if held else f" = {write.value}")
    yield "  graph"
    for line in holder.text.split("\n"):
        yield f"    {line}"


def _print_target(target: str) -> str:
    return target if _PLAIN.fullmatch(target) else repr(target)


def parse_plan(
    text: str, root: nn.Module | None = None, functions: Iterable[Function] = ()
) -> Plan:
    """Read a plan, as ``Plan.parse`` does. Raises ParseError with line and column."""
    form = "a plan starts with 'plan stages=<number>'"
    reader = _Reader(text, root, functions)
    header = reader.next(form)
    match = header.match(_PLAN)
    if match is None or header.indent:
        raise header.error(form, header.indent)
    edges: list[Edge] = []
    stages: list[Stage] = []
    while (line := reader.peek()) is not None:
        reader.position += 1
        if line.indent:
            raise line.error("only a stage has indented lines", line.indent)
        if not stages and (edge := line.match(_EDGE)):
            edges.append(parse_edge(edge[1], line.number, edge.start(1) + 1))
        elif stage := line.match(_STAGE):
            index, leaves = int(stage[1]), stage[2] is not None
            own = reader.body(f"stage {index}", "a stage", leaves)
            stages.append(Stage(index, *own, leaves))
        else:
            expected = "'stage <number>'" if stages else "'edge …' or 'stage <number>'"
            raise line.error(f"expected {expected}", line.indent)
    if len(stages) != int(match[1]):
        message = f"the plan has {match[1]} stages by this line, but {len(stages)} follow"
        raise header.error(message, match.start(1))
    return Plan(tuple(stages), tuple(edges))


def parse_traced(
    text: str, root: nn.Module | None = None, functions: Iterable[Function] = ()
) -> Traced:
    """Read a traced graph, as ``Traced.parse`` does. Raises ParseError with line and column."""
    form = "a traced graph starts with 'traced' or 'traced leaves'"
    reader = _Reader(text, root, functions)
    header = reader.next(form)
    match = header.match(_TRACED)
    if match is None or header.indent:
        raise header.error(form, header.indent)
    inputs: list[str | None] = []
    outputs: list[Value | Literal] = []
    norms: list[DeferredNorm] = []
    loss: str | None = None
    while (line := reader.peek()) is not None and (item := line.match(_ITEM)):
        reader.position += 1
        word, rest, at = item[1], item[2], item.start(2)
        match word:
            case "input":
                name = _name(line, word, rest, at)
                inputs.append(None if name == "none" else name)
            case "output":
                outputs.append(reader.output(line, rest, at))
            case "loss" if loss is None:
                loss = _name(line, word, rest, at)
            case "norm":
                norms.append(reader.norm(line, rest, at))
            case _:
                raise line.error("an earlier line already names the loss", line.indent)
    leaves = match[1] is not None
    parameters, buffers, writes, graph = reader.body("the traced graph", "a traced graph", leaves)
    if (left := reader.peek()) is not None:
        raise left.error("nothing may follow the graph's 'return'", left.indent)
    spec = pytree.tree_structure([0] * len(outputs))
    return Traced(
        graph,
        parameters,
        buffers,
        {},
        tuple(inputs),
        writes,
        tuple(outputs),
        spec,
        leaves=leaves,
        loss=loss,
        deferred=tuple(norms),
    )


_Body = tuple[tuple[Argument, ...], tuple[Argument, ...], tuple[Write, ...], fx.GraphModule]
"""What a graph reads, parameters and buffers, what it writes, and the graph."""


class _Reader:
    """The lines of a text, and the index of the next one."""

    def __init__(self, text: str, root: nn.Module | None, functions: Iterable[Function]) -> None:
        self.root = root
        self.functions = tuple(functions)
        self.lines = lines_of(text)
        self.position = 0

    def body(self, subject: str, kind: str, leaves: bool) -> _Body:
        """The indented lines from here on, of a subject such as ``stage 2``, which is of a kind."""
        arguments: dict[str, list[Argument]] = {"parameter": [], "buffer": []}
        writes: list[Write] = []
        while True:
            line = self.next(f"{subject} has no graph")
            if not line.indent:
                raise line.error(f"{subject} has no graph above; {kind} has {_ITEMS}", line.indent)
            if line.match(_GRAPH):
                break
            if found := line.match(_ARGUMENT):
                name = _read_name(line, found, 2)
                arguments[found[1]].append(Argument(name, _read_target(line, found, 3)))
            elif found := line.match(_WRITE):
                writes.append(Write(_read_target(line, found, 1), _read_name(line, found, 2)))
            elif leaves and (found := line.match(_HELD)):
                target = _read_target(line, found, 2)
                if found[1] == "write":
                    writes.append(Write(target, target))
                else:
                    arguments[found[1]].append(Argument(target, target))
            else:
                raise line.error(f"{kind} has {_ITEMS}", line.indent)
        start = self.position
        for inner in self.lines[start:]:
            if not inner.is_blank and not inner.indent:
                break
            self.position += 1
        body = self.lines[start : self.position]
        if all(inner.is_blank for inner in body):
            raise end_of([line]).error(f"the graph of {subject} has no lines")
        graph = parse_graph(
            "\n".join(inner.text for inner in body),
            self.root,
            self.functions,
            first_line=body[0].number,
        )
        return tuple(arguments["parameter"]), tuple(arguments["buffer"]), tuple(writes), graph

    def peek(self) -> Line | None:
        """The next line that is not blank."""
        while self.position < len(self.lines):
            if not self.lines[self.position].is_blank:
                return self.lines[self.position]
            self.position += 1
        return None

    def next(self, missing: str) -> Line:
        """Take the next line that is not blank; ``missing`` is the error if there is none."""
        line = self.peek()
        if line is None:
            raise end_of(self.lines).error(missing)
        self.position += 1
        return line

    def output(self, line: Line, text: str, at: int) -> Value | Literal:
        match = _OUTPUT.fullmatch(text)
        if match is None:
            raise line.error(_FORM["output"], at)
        dims = ast.literal_eval(match[3])
        if dims is not None and not isinstance(dims, tuple):
            raise line.error(_FORM["output"], at + match.start(3))
        if match[1] is None:
            return Value(_name(line, "output", match[2], at), dims)
        return Literal(self._value(line, match[2], at + match.start(2)), dims)

    def norm(self, line: Line, text: str, at: int) -> DeferredNorm:
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


def _read_name(line: Line, match: re.Match[str], group: int) -> str:
    name = match[group]
    if not is_name(name):
        raise line.error(f"{name!r} is no name of a value", match.start(group))
    return name


def _read_target(line: Line, match: re.Match[str], group: int) -> str:
    """A name of the model, with or without quotes."""
    text = match[group]
    if _PLAIN.fullmatch(text):
        return text
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        raise line.error(f"{text} cannot be read as a string", match.start(group)) from None
