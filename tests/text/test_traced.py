"""Traced graphs as text: all that they hold is printed."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.traced import DeferredNorm, Literal, Value
from tests.helpers import written

TEXT = """\
traced
  input x
  input None
  output add (0,)
  output literal [1, 'two'] ()
  output add None
  loss sum_1
  logged 'my accuracy' = mul
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


def test_a_graph_is_printed_with_all_that_it_reads_and_gives() -> None:
    traced = written.traced(TEXT)
    assert traced.inputs == ("x", None)
    assert traced.outputs == (Value("add", (0,)), Literal([1, "two"], ()), Value("add", None))
    assert traced.loss == "sum_1" and traced.logged == {"my accuracy": "mul"}
    assert traced.seeded and not traced.calls
    assert traced.deferred == (DeferredNorm("moments", "bn.mean", "bn.var", None, 0.1),)
    assert traced.parameters[0].target == "my linear.weight"
    assert traced.writes[0].value == "mul"
    assert str(traced) == TEXT


def test_graphs_that_print_otherwise_are_not_equal() -> None:
    traced = written.traced(TEXT)
    assert traced == written.traced(TEXT) != written.traced(TEXT.replace("0.9", "0.8"))
    assert hash(traced) == hash(written.traced(TEXT))


def test_an_output_of_any_type_has_a_text_without_its_address() -> None:
    traced = replace(written.traced(TEXT), outputs=(Literal(object(), ()),))
    assert "  output literal <object object> ()" in str(traced)
