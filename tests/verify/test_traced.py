"""The verifier of traced graphs: each way to be wrong is reported, with node and cure."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from fxpipe.errors import VerificationError
from tests.helpers import written
from tests.helpers.faults import changed, faults_of
from tests.helpers.fronted import front_end
from tests.helpers.lines import lines

TEXT = """\
traced
  input x
  input None
  output relu (0,)
  loss sum_1
  norm ('bn.moments', 'bn.mean', 'bn.var', None, 0.1)
  parameter p_weight = weight
  buffer b_moments = bn.moments
  write bn.moments = mul
  graph
    p_weight = placeholder()
    b_moments = placeholder()
    x = placeholder()
    fxpipe_seed = placeholder()
    mm = torch.ops.aten.mm.default(x, p_weight)
    relu = torch.ops.aten.relu.default(mm)
    mul = torch.ops.aten.mul.Tensor(b_moments, 0.9)
    sum_1 = torch.ops.aten.sum.default(relu)
    return (mul, relu, sum_1)
"""


def test_a_valid_graph_is_returned() -> None:
    traced = written.traced(TEXT)
    assert traced.verify() is traced


def test_the_loss_may_be_an_output() -> None:
    text = TEXT.replace("output relu (0,)", "output sum_1 ()")
    written.traced(text.replace("(mul, relu, sum_1)", "(mul, sum_1)")).verify()


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("relu.default(mm)", "relu_.default(mm)", "node relu: .*writes in place; make the graph"),
        ("relu = torch.ops.aten.relu.default(mm)", "relu = self.act(mm)", "calls the module act"),
        ("  input x\n", "", "a superfluous placeholder for 'x'; take exactly the parameters"),
        ("input x", "input y", "no placeholder for 'y'"),
        ("input None", "input x", "reads 2 things named 'x'; rename them"),
        (
            "buffer b_moments",
            "parameter b_2 = weight\n  buffer b_moments",
            "parameter weight: is read as 2 arguments; read it once",
        ),
        (
            "write bn.moments = mul",
            "write bn.moments = mul\n  write bn.moments = relu",
            "buffer bn.moments: is written 2 times",
        ),
        ("write bn.moments = mul", "write bn.other = mul", "gathers moments, and is not written"),
        ("output relu", "output lost", "the output is 'lost', which no node makes"),
        ("loss sum_1", "loss lost", "the loss is 'lost', which no node makes"),
        ("aten.relu.default(mm)", "aten.max.dim(mm, 0)", "relu: is the output, but not a single"),
        (
            "return (mul, relu, sum_1)",
            "return (relu, mul, sum_1)",
            r"returns \(relu, mul, sum_1\), but its writes, outputs and loss are \(mul, relu, su",
        ),
        ("return (mul, relu, sum_1)", "return mul", "returns no tuple of values"),
    ],
)
def test_each_fault_is_reported(old: str, new: str, fault: str) -> None:
    root = nn.Module()
    root.act = nn.ReLU()
    traced = written.traced(changed(TEXT, old, new), root)
    assert any(re.search(fault, str(each)) for each in faults_of(traced))


def test_a_constant_that_is_not_read_is_reported() -> None:
    traced = replace(written.traced(TEXT), constants={"table": torch.ones(2)})
    with pytest.raises(VerificationError, match="buffer table: is a constant that the graph does"):
        traced.verify()


def test_all_faults_are_reported_at_once() -> None:
    text = TEXT.replace("input x", "input y").replace("loss sum_1", "loss lost")
    with pytest.raises(VerificationError) as caught:
        written.traced(text.replace("output relu", "output gone")).verify()
    said = str(caught.value)
    assert all(word in said for word in ("'x'", "'y'", "'lost'", "'gone'"))
    assert said.startswith(f"the traced graph has {len(caught.value.faults)} faults:")


@pytest.mark.models
def test_verification_takes_time_in_proportion_to_the_graph() -> None:
    def work(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        traced = front_end(model, torch.randn(2, 4))
        return lines(traced.verify)

    first, second = work(16), work(64)
    assert second < 5 * first
