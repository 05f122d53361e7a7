"""A Plan as text, and back: its edges, then each stage with what it reads, writes and computes::

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

In a stage with ``leaves`` a line such as ``parameter conv.weight`` or ``write bn.running_mean``,
with no ``=``, names what a leaf module reads or writes itself.

A name of the model that is more than letters, digits, ``_`` and ``.`` stands in quotes. Shapes,
costs and kernels are no part of a plan's identity, nor of its text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx, nn

from fxpipe.ir.plan import Argument, Plan, Stage, Write
from fxpipe.ir.traced import Traced
from fxpipe.ir.value import Edge
from fxpipe.text.graph import parse_graph
from fxpipe.text.program import parse_edge
from fxpipe.text.scan import Line, end_of, is_name, lines_of
from fxpipe.text.target import Function

_END = r"[ \t]*(?:#.*)?"
_COUNT = r"(0|[1-9][0-9]{0,8})"
_HEADER = re.compile(rf"plan[ \t]+stages={_COUNT}{_END}")
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


def print_plan(plan: Plan) -> str:
    """The plan as text that ``parse_plan`` reads back to an equal value."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan stages={len(plan.stages)}"
    for edge in plan.edges:
        yield f"edge {edge}"
    for stage in plan.stages:
        yield f"stage {stage.index}" + (" leaves" if stage.leaves else "")
        yield from print_body(stage)


def print_body(holder: Stage | Traced) -> Iterator[str]:
    """The lines of what a graph reads and writes, and of the graph, indented."""
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
    """Read a plan. Nothing that the text names is run.

    Args:
        text: what ``print_plan`` gave; blank lines and comments mean nothing.
        root: the module that holds the leaf modules which the graphs call, if they call any.
        functions: what the text may name beside the list in ``fxpipe.text.target``.

    Raises:
        ParseError: with line and column of the first thing that is wrong.
    """
    return _PlanReader(text, root, tuple(functions)).read()


@dataclass(frozen=True)
class Body:
    """A graph, and what it reads and writes, as it was read."""

    parameters: tuple[Argument, ...]
    buffers: tuple[Argument, ...]
    writes: tuple[Write, ...]
    graph: fx.GraphModule


class BodyReader:
    """Reads lines in order, among them those of graphs with what these read and write.

    Attributes:
        root: where the graphs' leaf modules are looked up.
        functions: what the graphs may name beside the list.
        lines: all lines.
        position: the index of the next one.
    """

    def __init__(self, text: str, root: nn.Module | None, functions: tuple[Function, ...]) -> None:
        self.root = root
        self.functions = functions
        self.lines = lines_of(text)
        self.position = 0

    def body(self, subject: str, kind: str, leaves: bool) -> Body:
        """The indented lines from here on.

        Args:
            subject: what they belong to, such as ``stage 2``.
            kind: what that is, such as ``a stage``.
            leaves: whether the graph calls leaf modules.
        """
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
        while self.position < len(self.lines) and self._is_inside(self.lines[self.position]):
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
        return Body(tuple(arguments["parameter"]), tuple(arguments["buffer"]), tuple(writes), graph)

    def _is_inside(self, line: Line) -> bool:
        """Whether a line belongs to the graph above: it is indented or blank."""
        return line.is_blank or line.indent > 0

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


class _PlanReader(BodyReader):
    """Reads a plan."""

    def read(self) -> Plan:
        header = self.next("a plan starts with 'plan stages=<number>'")
        match = header.match(_HEADER)
        if match is None or header.indent:
            raise header.error("a plan starts with 'plan stages=<number>'", header.indent)
        edges: list[Edge] = []
        stages: list[Stage] = []
        while (line := self.peek()) is not None:
            self.position += 1
            if line.indent:
                raise line.error("only a stage has indented lines", line.indent)
            if not stages and (edge := line.match(_EDGE)):
                edges.append(parse_edge(edge[1], line.number, edge.start(1) + 1))
            elif stage := line.match(_STAGE):
                stages.append(self._stage(int(stage[1]), stage[2] is not None))
            else:
                expected = "'stage <number>'" if stages else "'edge …' or 'stage <number>'"
                raise line.error(f"expected {expected}", line.indent)
        if len(stages) != int(match[1]):
            message = f"the plan has {match[1]} stages by this line, but {len(stages)} follow"
            raise header.error(message, match.start(1))
        return Plan(tuple(stages), tuple(edges))

    def _stage(self, index: int, leaves: bool) -> Stage:
        body = self.body(f"stage {index}", "a stage", leaves)
        return Stage(index, body.parameters, body.buffers, body.writes, body.graph, leaves)


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
