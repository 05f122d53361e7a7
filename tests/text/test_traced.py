"""Traced graphs as text: what is printed is read back equal, and what is malformed has a place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import InputError, ParseError
from fxpipe.ir.traced import Literal, Traced, Value
from fxpipe.passes.graph.defer_batchnorm import defer_batchnorm
from fxpipe.torchtools.moments import DeferredNorm
from tests.helpers.exported import cases
from tests.helpers.faults import changed
from tests.helpers.fronted import front_end

CASES = cases()
TEXT = """\
traced
  input x
  input None
  output add (0,)
  output literal [1, 'two'] ()
  output add None
  loss sum_1
  norm ('moments', 'bn.mean', 'bn.var', None, 0.1)
  parameter p_weight = 'my linear.weight'
  buffer b_mean = bn.mean
  write bn.mean = mul
  graph
    p_weight = placeholder()
    b_mean = placeholder()
    x = placeholder()
    fxpipe_seed = placeholder()
    add = torch.ops.aten.addmm.default(b_mean, x, p_weight)
    mul = torch.ops.aten.mul.Tensor(b_mean, 0.9)
    sum_1 = torch.ops.aten.sum.default(add)
    return (mul, add, add, sum_1)
"""


def test_a_graph_is_read_and_printed_as_it_was() -> None:
    traced = Traced.parse(TEXT)
    assert str(traced) == TEXT
    assert traced == Traced.parse(TEXT) != Traced.parse(TEXT.replace("0.9", "0.8"))
    assert hash(traced) == hash(Traced.parse(TEXT))
    assert traced.inputs == ("x", None)
    assert traced.outputs == (Value("add", (0,)), Literal([1, "two"], ()), Value("add", None))
    assert traced.loss == "sum_1" and traced.seeded and not traced.leaves
    assert traced.deferred == (DeferredNorm("moments", "bn.mean", "bn.var", None, 0.1),)
    assert traced.parameters[0].target == "my linear.weight"
    assert traced.writes[0].value == "mul"


def test_names_and_texts_may_hold_what_begins_a_comment_and_be_called_as_nothing_is() -> None:
    text = TEXT.replace("bn.var'", "bn#1.var'").replace("  input x", "  input none")
    text = text.replace("[1, 'two']", '"two () # \'three"').replace("    x =", "    none =")
    text = text.replace("b_mean, x, p", "b_mean, none, p")
    traced = Traced.parse(text.replace(" ()\n", " () # four ()\n"))
    assert str(traced) == text
    assert traced.inputs == ("none", None)
    assert traced.outputs[1] == Literal("two () # 'three", ())
    assert traced.deferred[0].running_var == "bn#1.var"


@pytest.mark.models
@pytest.mark.parametrize("name", CASES)
def test_what_is_traced_is_valid_and_is_read_back_equal(name: str) -> None:
    traced = front_end(CASES[name].model, *CASES[name].args)
    assert Traced.parse(str(traced.verify())) == traced


@pytest.mark.models
def test_deferred_statistics_are_valid_and_are_read_back_equal() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    traced = defer_batchnorm(front_end(model, torch.randn(5, 3)), model)
    assert len(traced.deferred) == 2
    assert Traced.parse(str(traced.verify())) == traced


@pytest.mark.models
@pytest.mark.parametrize("tracer", ["export", "symbolic"])
def test_graphs_with_leaf_modules_and_a_loss_are_valid_and_are_read_back_equal(
    tracer: Any,
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    pipe = fxpipe.compile(
        model, ["cpu"] * 2, loss=mse_loss, tracer=tracer, leaf_modules=[model[1]], microbatches=2
    )
    with pipe:
        pipe.step(x, target=y)
        traced = pipe.traced
        assert traced.leaves and traced.loss is not None
        assert Traced.parse(str(traced.verify()), traced.module) == traced


@pytest.mark.parametrize(
    ("old", "new", "message", "line", "column"),
    [
        ("traced\n", "plan\n", "starts with 'traced'", 1, 1),
        ("input x", "input 3x", "'3x' is no name of a value", 2, 9),
        ("add (0,)", "add", r"'output name \(0,\)'", 4, 10),
        ("add (0,)", "add (0)", r"'output name \(0,\)'", 4, 14),
        ("[1, 'two']", "[1,, 2]", "cannot be read", 5, 21),
        ("[1, 'two']", "add", "no line above makes a node 'add'", 5, 18),
        ("  norm", "  loss add\n  norm", "an earlier line already names the loss", 8, 3),
        ("None, 0.1)", "None)", "write 'norm", 8, 8),
        ("write bn.mean = mul", "writes bn.mean", "a traced graph has 'parameter", 11, 3),
        ("    return (mul, add, add, sum_1)\n", "", "the graph has no end", 19, 44),
        ("sum_1)\n", "sum_1)\nstage 0\n", "nothing may follow the graph's 'return'", 21, 1),
    ],
)
def test_what_is_malformed_is_refused_with_its_place(
    old: str, new: str, message: str, line: int, column: int
) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        Traced.parse(changed(TEXT, old, new))
    assert (caught.value.line, caught.value.column) == (line, column)


def test_an_output_without_text_is_named() -> None:
    traced = replace(Traced.parse(TEXT), outputs=(Literal(object()),))
    with pytest.raises(InputError, match=r"an output that is no value of the graph: .*object"):
        str(traced)
