"""Traced graphs and plans written as the text that they print, for tests that make wrong ones."""

from __future__ import annotations

import ast
import math
import operator
import re
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxpipe.random
from fxpipe.ir.plan import Argument, Plan, Stage, Write
from fxpipe.ir.traced import DeferredNorm, Literal, Traced, Value
from fxpipe.text.program import read_edge
from fxpipe.text.scan import Line

SCOPE = {"torch": torch, "math": math, "operator": operator, "fxpipe": fxpipe}
_Body = tuple[tuple[Argument, ...], tuple[Argument, ...], tuple[Write, ...], fx.GraphModule]


def plan(text: str, root: nn.Module | None = None) -> Plan:
    """The plan of a text."""
    lines = text.splitlines()
    edges = tuple(read_edge(Line(line, 1)) for line in lines if line.startswith("edge"))
    stages = []
    for part in re.split(r"^(?=stage )", text, flags=re.MULTILINE)[1:]:
        _, index = part.split("\n")[0].split()
        stages.append(Stage(int(index), *_body(part.splitlines()[1:], root)))
    forward = tuple(edge for edge in edges if not edge.gradient)
    return Plan(tuple(stages), forward, tuple(edge for edge in edges if edge.gradient))


def traced(text: str, root: nn.Module | None = None) -> Traced:
    """The traced graph of a text."""
    _, *lines = text.splitlines()
    inputs: list[str | None] = []
    outputs: list[Value | Literal] = []
    norms: list[DeferredNorm] = []
    loss = None
    logged: dict[str, str] = {}
    for line in lines[: lines.index("  graph")]:
        word, _, rest = line.strip().partition(" ")
        match word:
            case "input":
                inputs.append(None if rest == "None" else rest)
            case "output":
                name, at = re.fullmatch(r"(.*) (None|\(.*\))", rest).groups()  # type: ignore[union-attr]
                dims = eval(at)
                literal = name.removeprefix("literal ")
                outputs.append(
                    Value(name, dims) if literal == name else Literal(eval(literal), dims)
                )
            case "loss":
                loss = rest
            case "logged":
                name, _, value = rest.rpartition(" = ")
                logged[ast.literal_eval(name)] = value
            case "norm":
                norms.append(DeferredNorm(*eval(rest)))
    parameters, buffers, writes, module = _body(lines, root)
    return Traced(
        module,
        parameters,
        buffers,
        {},
        tuple(inputs),
        writes,
        tuple(outputs),
        pytree.tree_structure([0] * len(outputs)),
        loss=loss,
        logged=logged,
        deferred=tuple(norms),
    )


def _body(lines: list[str], root: nn.Module | None) -> _Body:
    found: dict[str, list[Any]] = {"parameter": [], "buffer": [], "write": []}
    start = lines.index("  graph")
    for line in lines[:start]:
        word, _, rest = line.strip().partition(" ")
        if word in found:
            first, _, second = (re.sub("^'|'$", "", part) for part in rest.partition(" = "))
            found[word].append((Write if word == "write" else Argument)(first, second or first))
    parameters, buffers, writes = map(tuple, found.values())
    return parameters, buffers, writes, graph("\n".join(lines[start + 1 :]), root)


def graph(text: str, root: nn.Module | None = None) -> fx.GraphModule:
    """The graph of a text. It runs what the text names, so the text must be the test's own."""
    made = fx.Graph()
    nodes: dict[str, Any] = {}

    def value(node: ast.expr) -> Any:
        code = ast.Expression(node)
        return eval(compile(code, "text", "eval"), {**SCOPE, **nodes})

    for statement in ast.parse("\n".join(line.strip() for line in text.splitlines())).body:
        match statement:
            case ast.Return(value=ast.expr() as returned):
                made.output(value(returned))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                args = tuple(map(value, call.args))
                kwargs = {str(word.arg): value(word.value) for word in call.keywords}
                op, target = "call_function", ast.unparse(call.func)
                holder, _, method = target.rpartition(".")
                if target == "placeholder":
                    op, target, args = "placeholder", *(args or (name,)), ()
                elif target.startswith("self."):
                    op, target = "call_module", re.sub(r"\[(\w+)\]", r".\1", target[5:])
                elif holder in nodes:
                    op, target, args = "call_method", method, (nodes[holder], *args)
                else:
                    target = value(call.func)
                nodes[name] = made.create_node(op, target, args, kwargs, name=name)
                nodes[name].name = name  # fx renames what would hide a builtin
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as path):
                target = ast.unparse(path).removeprefix("self.")
                nodes[name] = made.create_node("get_attr", target, name=name)
            case _:
                raise AssertionError(ast.unparse(statement))
    return fx.GraphModule(root or nn.Module(), made)
