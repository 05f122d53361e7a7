"""What no graph could hold is refused in terms of the user's code, before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.compiler.objective import Objective
from fxpipe.compiler.preflight import (
    output_dims,
    refuse_hooks,
    refuse_tensors,
    run_loss,
    trained_by,
    try_own_loss,
)
from fxpipe.errors import InputError, TraceError

Y, T = torch.randn(4, 3), torch.randn(4, 3)
MODEL = nn.Linear(3, 3)

LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "no tensor": (lambda y, t: 5.0, "returns a float; return one tensor"),
    "nothing": (lambda y, t: None, "returns nothing"),
    "several numbers": (lambda y, t: (y - t)[:, :2], r"has shape \(4, 2\)"),
    "whole numbers": (lambda y, t: (y > t).sum(), "of torch.int64"),
    "detached": (lambda y, t: F.mse_loss(y.detach(), t) * torch.ones(()), "no gradient to the"),
    "it raises": (lambda y, t: F.mse_loss(y, t[:, :1].view(2, 2)), "fails on the first micro"),
    "another signature": (lambda y: y.mean(), "does not fit the model's output and 1 target"),
    "a parameter": (lambda y, t: (y * MODEL.weight.sum()).mean(), "parameter 'weight'"),
    "a hidden tensor": (
        lambda y, t: (y * torch.ones((), requires_grad=True)).mean(),
        "a tensor of shape",
    ),
    "an image beside it": (lambda y, t: (y.mean(), {"image": y}), "'image' beside the loss"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_does_not_train_is_refused(name: str) -> None:
    loss, message = LOSSES[name]
    with pytest.raises(InputError, match=message):
        run_loss(MODEL, Objective(loss), Y, (T,), 4)


def test_a_scalar_or_one_loss_per_sample_passes_with_the_names_of_numbers_beside_it() -> None:
    assert run_loss(MODEL, Objective(F.mse_loss), Y, (T,), 4) == ()
    assert run_loss(MODEL, Objective(lambda y, t: (y - t).abs().sum(1)), Y, (T,), 4) == ()

    def logs(y: Tensor, t: Tensor) -> Any:
        return F.mse_loss(y, t), {"accuracy": 0.5, "most": y.max()}

    assert run_loss(MODEL, Objective(logs), Y, (T,), 4) == ("accuracy", "most")


def test_a_loss_may_write_to_what_it_is_given() -> None:
    before = Y.clone()
    assert run_loss(MODEL, Objective(lambda y, t: y.sub_(t).square_().mean()), Y, (T,), 4) == ()
    assert torch.equal(Y, before)


def test_a_model_has_to_return_its_loss_where_none_is_given() -> None:
    try_own_loss(torch.ones(()))
    try_own_loss({"loss": torch.ones(())})
    for output, message in (
        (Y, "neither a scalar"),
        ((Y, Y), "returns a tuple"),
        ({"loss": Y}, r"has shape \(4, 3\)"),
    ):
        with pytest.raises(InputError, match=message):
            try_own_loss(output)


def test_tensors_that_stages_cannot_keep_are_refused_by_name() -> None:
    refuse_tensors(nn.BatchNorm1d(3))
    model = nn.Module()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(InputError, match=r"'adjacency' of the model is torch\.sparse_coo"):
        refuse_tensors(model)
    with pytest.raises(InputError, match="run the model once"):
        refuse_tensors(nn.LazyBatchNorm1d())


def test_backward_hooks_are_refused_but_in_modules_that_are_called_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse_hooks(model, ())
    handle = model[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(TraceError, match="submodule '1' has a backward hook"):
        refuse_hooks(model, ())
    refuse_hooks(model, ["1"])
    handle.remove()
    next(model.parameters()).register_hook(lambda g: g)
    with pytest.raises(TraceError, match=r"parameter '0\.weight' has a hook"):
        refuse_hooks(model, ["0", "1"])


class Outputs(nn.Module):
    def forward(self, x: Tensor, table: Tensor) -> Any:
        return x * 2, x.t(), x.sum(), table + x.sum(), len(x), (x @ x.t())


def test_batch_dimensions_are_those_that_grow_with_the_batch() -> None:
    x, table = torch.randn(3, 2), torch.randn(3, 2)
    made = Outputs()(x, table)
    found = output_dims(Outputs(), (x, table), {}, [(0,), ()], made, 3)
    assert found == [(0,), (1,), (), (), (0,), (0, 1)]


def test_they_are_not_known_where_the_model_takes_no_other_size() -> None:
    model = nn.Bilinear(2, 2, 1)
    made = model(torch.ones(3, 2), torch.ones(3, 2))
    given = torch.ones(3, 2), torch.ones(3, 2)
    assert output_dims(model, given, {}, [(0,), ()], [made], 3) is None


def test_what_a_backward_would_train_is_found() -> None:
    w, x = torch.ones(2, requires_grad=True), torch.ones(2)
    hidden = torch.ones(2, requires_grad=True)
    found = [*trained_by({"y": (w * x) @ hidden, "z": w, "n": 5})]
    assert {id(each) for each in found} == {id(w), id(hidden)}
