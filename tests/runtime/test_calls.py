"""What a pipe takes and returns: as the model would, with the loop over the micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.errors import InputError
from tests.oracles import loop

MICROBATCHES = 3


class Net(nn.Module):
    """Layers, BatchNorm and dropout, a skip over the middle, and two outputs in a dict."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(dropout)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> dict[str, Tensor]:
        early = self.norm(self.first(x))
        late = self.drop(self.second(early).tanh()) + early
        if gain is not None:
            late = late * gain
        return {"early": early, "late": self.third(late)}


def late_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return mse_loss(output["late"], target)


def two_nets(dropout: float = 0.0) -> tuple[Net, Net]:
    torch.manual_seed(0)
    model = Net(dropout).double()
    return model, copy.deepcopy(model)


def compiled(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(model, ["cpu"] * 2, **{"microbatches": MICROBATCHES, **options})


def rows(count: int, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, dtype=torch.float64, generator=random)


def called(model: nn.Module, *args: Any, microbatches: int = MICROBATCHES, **kwargs: Any) -> Any:
    """The model's output of each micro-batch, one after another."""
    parts = [model(*a, **k) for a, k in loop.split((args, kwargs), len(args[0]), microbatches)]
    return pytree.tree_map(lambda *tensors: torch.cat(tensors), *parts)


Pair = tuple[fxpipe.Pipeline, Net, Net]
"""A pipe, its model and the model's twin."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    model, alone = two_nets()
    with compiled(model, loss=late_loss) as pipe:
        yield pipe, model, alone


@pytest.mark.parametrize("grad", [False, True])
def test_in_eval_mode_a_call_is_the_models(grad: bool) -> None:
    model, alone = two_nets(dropout=0.5)
    with compiled(model) as pipe, torch.set_grad_enabled(grad):
        alone.eval()
        for count in (6, 7, 1, 13):
            made = pipe.eval()(rows(count))
            loop.assert_same(made, called(alone, rows(count), microbatches=min(count, 3)))
    loop.assert_same(model.state_dict(), alone.state_dict())


def test_without_gradients_a_call_is_the_models(pair: Pair) -> None:
    pipe, model, alone = pair
    with torch.no_grad():
        made, expected = pipe(rows(7)), called(alone, rows(7))
    assert not made["late"].requires_grad
    loop.assert_same(made, expected)
    loop.assert_same(model.state_dict(), alone.state_dict())  # the statistics are updated


def test_a_call_in_training_is_differentiable(pair: Pair) -> None:
    pipe, model, alone = pair
    x, gain = rows(7).requires_grad_(), rows(7, 2).requires_grad_()
    there, gain_there = x.detach().clone().requires_grad_(), gain.detach().clone().requires_grad_()
    made = pipe(x, gain=gain)
    expected = called(alone, there, gain=gain_there)
    loop.assert_same(
        {name: y.detach() for name, y in made.items()},
        {name: y.detach() for name, y in expected.items()},
    )
    for output in (made, expected):
        (output["late"].square().sum() + 3 * output["early"].sum()).backward()
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)
    loop.assert_same(
        {"x": x.grad, "gain": gain.grad}, {"x": there.grad, "gain": gain_there.grad}, 1e-12
    )
    loop.assert_same(model.state_dict(), alone.state_dict())


def test_several_live_calls_before_one_backward(pair: Pair) -> None:
    pipe, model, alone = pair
    outputs = [pipe(rows(6, seed)) for seed in range(3)]
    expected = [called(alone, rows(6, seed)) for seed in range(3)]
    for parts in (outputs, expected):
        (parts[0]["late"] * parts[2]["early"] + parts[1]["late"]).sum().backward()
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


def test_a_second_backward_through_one_call_is_refused(
    pair: Pair,
) -> None:
    total = pair[0](rows(6))["late"].sum()
    total.backward(retain_graph=True)
    before = loop.gradients(pair[1])
    with pytest.raises(InputError, match="a second time"):
        total.backward()
    loop.assert_same(loop.gradients(pair[1]), before)


def test_a_gradient_of_a_gradient_is_refused_before_anything_runs(pair: Pair) -> None:
    pipe = pair[0]
    x = rows(6).requires_grad_()
    loss = pipe(x)["late"].sum()
    with pytest.raises(InputError, match="create_graph=True asks for gradients of gradients"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss.backward()  # the call is still good
    assert x.grad is not None


def test_backward_after_a_parameter_changed_in_place_is_refused(
    pair: Pair,
) -> None:
    pipe, model, _ = pair
    total = pipe(rows(6))["late"].sum()
    with torch.no_grad():
        model.third.weight.mul_(2)
    with pytest.raises(InputError, match="changed in place"):
        total.backward()


def test_an_input_that_the_model_returns_comes_back_with_its_history() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, input: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return input, self.other(self.layer(input)) * level, level

    model = Through().double()
    x, level = rows(7).requires_grad_(), torch.tensor(0.1, dtype=torch.float64)
    with compiled(model) as pipe:
        same, made, given = pipe(x, level)
        (same.sum() * 2 + made.sum()).backward()
    (expected,) = torch.autograd.grad(model(x, level)[1].sum() + 2 * x.sum(), x)
    assert same is x and given is level
    torch.testing.assert_close(x.grad, expected)


class Beside(nn.Module):
    """Its second output depends on the input alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.first(x)), x.view(-1, 2, 2) ** 2


def test_an_output_may_depend_on_inputs_alone() -> None:
    model, other = Beside().double(), Beside().double()
    given, theirs = rows(4).requires_grad_(), rows(4).requires_grad_()
    with compiled(model, partition=["last"]) as pipe:
        output = pipe(given)
        (output[0].sum() + (output[1] ** 2).sum()).backward()
    for part in theirs.tensor_split(MICROBATCHES):
        output = other(part)
        (output[0].sum() + (output[1] ** 2).sum()).backward()
    loop.assert_same(loop.gradients(model), loop.gradients(other))
    loop.assert_same({"x": given.grad}, {"x": theirs.grad})


def test_a_step_returns_the_output_of_the_batch_if_asked(
    pair: Pair,
) -> None:
    pipe, _, alone = pair
    x, y = rows(7), rows(7, 2)
    loss, output = pipe.step(x, target=y, return_output=True)
    expected = loop.train(alone, MICROBATCHES, x, loss=late_loss, target=y)
    assert torch.equal(loss, expected.loss) and not loss.requires_grad
    loop.assert_same(output, expected.output)
    assert not any(tensor.requires_grad for tensor in output.values())


def test_gradients_add_up_over_steps_as_they_do_in_torch(
    pair: Pair,
) -> None:
    pipe, model, alone = pair
    held = None
    for seed in range(3):
        x, y = rows(7, seed), rows(7, seed + 9)
        pipe.step(x, target=y)
        loop.train(alone, MICROBATCHES, x, loss=late_loss, target=y)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        held = held if held is not None else model.first.weight.grad
    assert model.first.weight.grad is held  # the very tensor, which the user may hold


def test_batches_may_change_their_size_between_steps(
    pair: Pair,
) -> None:
    pipe, model, alone = pair
    for count in (7, 6, 31, 8, 7):
        loop.clear(model, alone)
        loss = pipe.step(rows(count), target=rows(count, 2))
        expected = loop.train(alone, 3, rows(count), loss=late_loss, target=rows(count, 2))
        assert torch.equal(loss, expected.loss)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))


@dataclass
class Answer:
    loss: Tensor
    scores: Tensor


pytree.register_dataclass(Answer)


class Judge(nn.Module):
    """Returns its loss in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self.how = how

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = self.layers(x)
        loss = cross_entropy(scores, labels)
        if self.how == "dict":
            return {"scores": scores, "loss": loss}
        return Answer(loss, scores) if self.how == "object" else loss


@pytest.mark.parametrize("how", ["tensor", "dict", "object"])
def test_a_model_may_return_its_loss(how: str) -> None:
    torch.manual_seed(0)
    model = Judge(how).double()
    alone = copy.deepcopy(model)
    alone.how = "dict"
    labels = torch.arange(7) % 3
    with compiled(model) as pipe:
        loss, output = pipe.step(rows(7), labels=labels, return_output=True)
    expected = loop.train(alone, MICROBATCHES, rows(7), labels=labels)
    assert torch.equal(loss, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    if how != "tensor":
        scores = output.scores if how == "object" else output["scores"]
        assert torch.equal(scores, torch.cat([part["scores"] for part in expected.outputs]))


def test_targets_may_be_several_and_inputs_without_rows_go_to_every_microbatch() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, level: Tensor, *, row: Tensor) -> tuple[Tensor, Tensor]:
            x = self.first(x * level)
            return x, self.second(x + row)

    def loss(output: tuple[Tensor, Tensor], one: Tensor, two: Tensor, weight: Tensor) -> Tensor:
        return mse_loss(output[0], one) + weight * mse_loss(output[1], two)

    model = Scaled().double()
    alone = copy.deepcopy(model)
    level, row = torch.tensor(0.5, dtype=torch.float64), rows(1, 5)
    target = (rows(7, 2), rows(7, 3), torch.tensor(3.0, dtype=torch.float64))
    with compiled(model, loss=loss) as pipe:
        made = pipe.step(rows(7), level, row=row, target=target)
    expected = loop.train(alone, 3, rows(7), level, row=row, loss=loss, target=target)
    assert torch.equal(made, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_checkpoints_move_both_ways(pair: Pair) -> None:
    pipe, model, alone = pair
    assert list(pipe.state_dict()) == list(alone.state_dict())
    assert dict(pipe.named_parameters()).keys() == dict(alone.named_parameters()).keys()
    pipe.step(rows(7), target=rows(7, 2))
    changed = {name: value + 1 for name, value in alone.state_dict().items()}
    pipe.load_state_dict(changed)
    alone.load_state_dict(pipe.state_dict())
    loop.clear(model)
    loss = pipe.step(rows(7), target=rows(7, 2))
    expected = loop.train(alone, 3, rows(7), loss=late_loss, target=rows(7, 2))
    assert torch.equal(loss, expected.loss)
    loop.assert_same(model.state_dict(), alone.state_dict())


def test_each_mode_has_its_graph() -> None:
    model, alone = two_nets(dropout=0.5)
    x = rows(6)
    with compiled(model) as pipe:
        first, second = pipe(x)["late"], pipe(x)["late"]
        assert not torch.equal(first, second)  # other masks
        alone.load_state_dict(model.state_dict())
        pipe.eval()
        assert not model.norm.training
        loop.assert_same(
            {"late": pipe(x)["late"].detach()}, {"late": called(alone.eval(), x)["late"].detach()}
        )
        pipe.train()
        assert model.norm.training
        assert not torch.equal(pipe(x)["late"], pipe(x)["late"])
        model.drop.eval()  # a part of the model alone
        assert torch.equal(pipe(x)["late"], pipe(x)["late"])


def test_frozen_parameters_get_no_gradient_also_when_frozen_later(
    pair: Pair,
) -> None:
    pipe, model, alone = pair
    frozen: list[list[str]] = [[], ["first.weight", "norm.bias"], ["third.weight"], []]
    for names in frozen:
        loop.clear(model, alone)
        for net in (model, alone):
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(name not in names)
        pipe.step(rows(7), target=rows(7, 2))
        loop.train(alone, 3, rows(7), loss=late_loss, target=rows(7, 2))
        gradients = loop.gradients(model)
        assert [name for name, gradient in gradients.items() if gradient is None] == names
        loop.assert_same(gradients, loop.gradients(alone))


class _Shared(nn.Module):
    """Returns something per sample, and something that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x * self.weight), self.weight * 2


@pytest.mark.parametrize("samples", [6, 3, 2])
def test_an_output_that_samples_share_is_not_joined_at_any_micro_batch_size(samples: int) -> None:
    pipe = fxpipe.compile(_Shared(), ["cpu", "cpu"], microbatches=3)
    with torch.no_grad():
        per_sample, shared = pipe(torch.rand(samples, 4))
    assert per_sample.shape == (samples, 4)
    assert shared.shape == (1, 4)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_backward_of_a_steps_loss_is_refused_and_all_else_is_a_tensors(
    schedule: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    expected = mse_loss(model(x), y).detach()
    with fxpipe.compile(
        model, 2, microbatches=3, loss=mse_loss, optimizer=made, schedule=schedule
    ) as pipe:
        loss = pipe.step(x, target=y)
        for each in (loss, pipe.step(x, target=y, return_output=True)[0]):
            with pytest.raises(InputError, match=r"step\(...\) has already run backward"):
                each.backward()
            with pytest.raises(InputError, match=r"loss\(pipe\(x\), y\).backward\(\)"):
                each.backward(retain_graph=True)
    torch.testing.assert_close(loss.detach(), expected)
    assert isinstance(loss, Tensor) and not loss.requires_grad and loss.shape == ()
    torch.save({"loss": loss}, tmp_path / "saved")
    for plain in (
        loss + 0,
        loss.clone(),
        copy.deepcopy(loss),
        torch.stack([loss])[0],
        torch.load(tmp_path / "saved")["loss"],
    ):
        assert type(plain) is Tensor
        assert float(plain) == loss.item()
    value = float(loss)
    assert (repr(loss), f"{loss:.3f}") == (repr(torch.tensor(value)), f"{value:.3f}")
    loss /= 2
    assert loss == value / 2


def test_a_step_in_inference_mode_is_refused(pair: Pair) -> None:
    with (
        torch.inference_mode(),
        pytest.raises(InputError, match=r"a step computes gradients, which torch\.inference_mode"),
    ):
        pair[0].step(rows(6), target=rows(6, 2))


def test_a_step_without_gradients_is_refused_and_may_be_prepared(pair: Pair) -> None:
    pipe, model, _ = pair
    with torch.no_grad():
        pipe.prepare(rows(6), target=rows(6, 2))
        with pytest.raises(InputError, match=r"gradients, which torch\.no_grad\(\) turns off"):
            pipe.step(rows(6), target=rows(6, 2))
    assert not any(x is not None for x in loop.gradients(model).values())
    pipe.step(rows(6), target=rows(6, 2))


def test_hooks_on_saved_tensors_around_a_step_are_not_called(pair: Pair) -> None:
    pipe, model, alone = pair
    for _ in range(2):  # neither while it is compiled nor later
        loop.clear(model, alone)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: pytest.fail(), lambda x: x):
            pipe.step(rows(6), target=rows(6, 2))
        loop.train(alone, 3, rows(6), loss=late_loss, target=rows(6, 2))
        loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_what_inference_mode_has_made_trains_as_other_tensors_do() -> None:
    model, alone = two_nets()
    with torch.inference_mode():
        x, y = rows(6), rows(6, seed=2)
    with compiled(model, loss=late_loss) as pipe:
        loss = pipe.step(x, target=y)
        ran = loop.train(alone, MICROBATCHES, x.clone(), loss=late_loss, target=y.clone())
        assert torch.equal(loss, ran.loss)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        pipe(x)["late"].sum().backward()
        pipe.eval()
        with torch.inference_mode():
            inside = pipe(x)["late"]
        assert torch.equal(pipe(x)["late"], inside)
