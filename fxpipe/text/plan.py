"""Print and parse plans and traced graphs: graphs, with what they read and write.

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
    stage 1 leaves
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

After ``leaves``, a line without ``=`` such as ``parameter conv.weight`` or ``write
bn.running_mean`` names what a leaf module reads or writes itself. Names of the model are quoted if
they contain anything but letters, digits, ``_`` and ``.``. The text leaves out a plan's shapes,
costs and kernels. Of a traced graph it leaves out how the outputs nest, the values of constants,
and the sizes for which the graph holds.
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
from fxpipe.text.form import Form, options
from fxpipe.text.graph import read_graph
from fxpipe.text.program import read_edge
from fxpipe.text.scan import Line, end_of, is_name, lines_of
from fxpipe.text.target import Function, named
from fxpipe.text.value import ValueReader, print_value
from fxpipe.torchtools.moments import DeferredNorm

_PLAN = Form("plan stages={stages}", "plan stages=4")
_STAGE = Form("stage {index}", "stage 0 leaves")
_VALUE = Form("{name:value}", "relu_3")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_TARGET = re.compile(r"""[A-Za-z0-9_.]+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_WORD = re.compile(r"\w+")
_NONE = re.compile(r"None\b")
_CODE = re.compile(r"""(?:[^#'"]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")*""")
_OUTPUT = re.compile(r"(literal[ \t]+)?(.+)[ \t]+(None|\((?:(?:0|[1-9][0-9]{0,8}),? ?)*\))[ \t]*")

_ITEMS = "'parameter name = target', 'buffer name = target', 'write target = name' and then 'graph'"
_OUTPUT_FORM = "write 'output name (0,)' or 'output literal 3 ()', with the dimensions or None"
_NORM_FORM = "write 'norm (moments, running mean, running variance, counter, momentum)'"


def print_plan(plan: Plan) -> str:
    """Print a plan as text that ``parse_plan`` reads back to an equal value."""
    lines = [f"plan stages={len(plan.stages)}", *(f"edge {edge}" for edge in plan.edges)]
    for stage in plan.stages:
        lines.append(f"stage {stage.index}" + (" leaves" if stage.leaves else ""))
        lines.extend(_body(stage))
    return "\n".join(lines) + "\n"


def print_traced(traced: Traced) -> str:
    """Print a traced graph as text that ``parse_traced`` reads back to an equal value.

    Raises:
        InputError: a literal output, or an argument of a node, has no text.
    """
    lines = ["traced" + (" leaves" if traced.leaves else "")]
    lines += [f"  input {name}" for name in traced.inputs]
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
    """Print what a graph reads and writes, and the graph, as indented lines."""
    for word, arguments in (("parameter", holder.parameters), ("buffer", holder.buffers)):
        for argument in arguments:
            target = _print_target(argument.target)
            in_leaf = holder.leaves and argument.name == argument.target
            yield f"  {word} {target}" if in_leaf else f"  {word} {argument.name} = {target}"
    for write in holder.writes:
        target = _print_target(write.target)
        in_leaf = holder.leaves and write.value == write.target
        yield f"  write {target}" + ("" if in_leaf else f" = {write.value}")
    yield "  graph"
    for line in holder.text.split("\n"):
        yield f"    {line}"


def _print_target(target: str) -> str:
    return target if _PLAIN.fullmatch(target) else repr(target)


def parse_plan(
    text: str, root: nn.Module | None = None, functions: Iterable[Function] = ()
) -> Plan:
    """Read a plan, as ``Plan.parse`` does. Raises ParseError with line and column."""
    reader = _Reader(text, root, functions)
    header = reader.header("a plan starts with 'plan stages=<number>'")
    count = _PLAN.read(header)["stages"]
    header.end()
    edges: list[Edge] = []
    stages: list[Stage] = []
    while (line := reader.peek()) is not None:
        reader.position += 1
        if line.indent:
            raise line.error("only a stage has indented lines")
        if not stages and line.starts("edge"):
            edges.append(read_edge(line))
        elif line.starts("stage"):
            index = _STAGE.read(line)["index"]
            leaves = list(options(line, "leaves")) != []
            body = reader.body(f"stage {index}", "a stage", leaves)
            stages.append(Stage(index, *body, leaves))
        else:
            expected = "'stage <number>'" if stages else "'edge …' or 'stage <number>'"
            raise line.error(f"expected {expected}")
    if len(stages) != count:
        message = f"the plan has {count} stages by this line, but {len(stages)} follow"
        raise header.error(message, header.text.index("=") + 1)
    return Plan(tuple(stages), tuple(edges))


def parse_traced(
    text: str, root: nn.Module | None = None, functions: Iterable[Function] = ()
) -> Traced:
    """Read a traced graph, as ``Traced.parse`` does. Raises ParseError with line and column."""
    form = "a traced graph starts with 'traced' or 'traced leaves'"
    reader = _Reader(text, root, functions)
    header = reader.header(form)
    header.literal("traced", form)
    leaves = list(options(header, "leaves")) != []
    inputs: list[str | None] = []
    outputs: list[Value | Literal] = []
    norms: list[DeferredNorm] = []
    loss: str | None = None
    while (line := reader.peek()) is not None:
        start = line.at
        word = line.take(_WORD)
        if word not in ("input", "output", "loss", "norm"):
            line.at = start
            break
        reader.position += 1
        line.gap("what it is")
        match word:
            case "input":
                inputs.append(None if line.take(_NONE) else _VALUE.read(line)["name"])
            case "output":
                outputs.append(reader.output(line))
            case "norm":
                norms.append(reader.norm(line))
            case _ if loss is not None:
                raise line.error("an earlier line already names the loss", start)
            case _:
                loss = _VALUE.read(line)["name"]
        line.end()
    parameters, buffers, writes, graph = reader.body("the traced graph", "a traced graph", leaves)
    if (left := reader.peek()) is not None:
        raise left.error("nothing may follow the graph's 'return'")
    return Traced(
        graph,
        parameters,
        buffers,
        {},
        tuple(inputs),
        writes,
        tuple(outputs),
        pytree.tree_structure([0] * len(outputs)),
        leaves=leaves,
        loss=loss,
        deferred=tuple(norms),
    )


_Body = tuple[tuple[Argument, ...], tuple[Argument, ...], tuple[Write, ...], fx.GraphModule]
"""The parameters and buffers that a graph reads, what it writes, and the graph."""


class _Reader:
    """Reads the lines of a text; ``position`` is the index of the next one."""

    def __init__(self, text: str, root: nn.Module | None, functions: Iterable[Function]) -> None:
        self.root = root
        self.functions = tuple(functions)
        self.lines = lines_of(text)
        self.position = 0

    def header(self, form: str) -> Line:
        """Take the first line, or raise an error with the message ``form`` if it is indented."""
        line = self.next(form)
        if line.indent:
            raise line.error(form)
        return line

    def body(self, subject: str, kind: str, leaves: bool) -> _Body:
        """Read the indented lines of a subject such as ``stage 2``; ``kind`` is ``a stage``."""
        arguments: dict[str, list[Argument]] = {"parameter": [], "buffer": []}
        writes: list[Write] = []
        while True:
            line = self.next(f"{subject} has no graph")
            if not line.indent:
                raise line.error(f"{subject} has no graph above; {kind} has {_ITEMS}")
            word = line.take(_WORD)
            if word == "graph":
                line.end()
                break
            if word != "write" and word not in arguments:
                raise line.error(f"{kind} has {_ITEMS}", line.indent)
            line.gap("a name")
            start, first = line.at, _read_target(line)
            if line.ended() and leaves:
                second = first
            else:
                line.literal("=")
                line.ended()
                if word == "write":
                    second = _VALUE.read(line)["name"]
                else:
                    second = _read_target(line)
                    if not is_name(first):
                        raise line.error(f"{first!r} is no name of a value", start)
                line.end()
            if word == "write":
                writes.append(Write(first, second))
            else:
                arguments[word].append(Argument(first, second))
        start = self.position
        for inner in self.lines[start:]:
            if not inner.is_blank and not inner.indent:
                break
            self.position += 1
        body = self.lines[start : self.position]
        if all(inner.is_blank for inner in body):
            raise end_of([line]).error(f"the graph of {subject} has no lines")
        graph = read_graph(body, self.root, self.functions)
        return tuple(arguments["parameter"]), tuple(arguments["buffer"]), tuple(writes), graph

    def peek(self) -> Line | None:
        """Return the next line that is not blank, positioned after its indentation."""
        while self.position < len(self.lines):
            if not self.lines[self.position].ended():
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

    def output(self, line: Line) -> Value | Literal:
        start = line.at
        match = _OUTPUT.fullmatch(line.take(_CODE) or "")
        if match is None:
            raise line.error(_OUTPUT_FORM, start)
        dims = self._value(line, match[3], start + match.start(3))
        if dims is not None and not isinstance(dims, tuple):
            raise line.error(_OUTPUT_FORM, start + match.start(3))
        if match[1] is not None:
            return Literal(self._value(line, match[2], start + match.start(2)), dims)
        if not is_name(match[2]):
            raise line.error(_OUTPUT_FORM, start)
        return Value(match[2], dims)

    def norm(self, line: Line) -> DeferredNorm:
        start = line.at
        match self._value(line, line.take(_CODE) or "", start):
            case (str(moments), str(mean), str(variance), str() | None as tracked, momentum) if (
                momentum is None or isinstance(momentum, float)
            ):
                return DeferredNorm(moments, mean, variance, tracked, momentum)
        raise line.error(_NORM_FORM, start)

    def _value(self, line: Line, text: str, at: int) -> Any:
        """Read the value of an expression at an index of a line."""
        part = Line(" " * at + text, line.number)
        match part.statement():
            case ast.Expr(value=value):
                return ValueReader(part, {}, named(self.functions)).read(value)
        raise line.error("this is no value", at)


def _read_target(line: Line) -> str:
    """Read a name of the model, with or without quotes."""
    start = line.at
    text = line.need(_TARGET, "a name of the model, in quotes unless it is a plain word")
    if _PLAIN.fullmatch(text):
        return text
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        raise line.error(f"{text} cannot be read as a string", start) from None
