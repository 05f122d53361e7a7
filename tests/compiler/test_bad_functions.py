"""Wrong losses, models, optimizers and schedules: one error that says what to do."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpipe
from fxpipe import (
    B,
    F,
    InputError,
    Schedule,
    VerificationError,
)
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.task import Task
from fxpipe.torchtools import source
from tests.helpers.refusals import SGD, X, compiled, refused, stepped
from tests.helpers.tiny import Tiny

# losses


@pytest.mark.parametrize(
    ("loss", "part"),
    [
        (lambda output, target: output, "has shape (3, 3); reduce it to a scalar"),
        (lambda output, target: None, "the loss returns nothing; return one tensor"),
        (lambda output, target: 3.0, "the loss returns a float; return one tensor"),
        (lambda output, target: (output.sum(), target), "the loss returns a tuple; return one"),
        (lambda output, target: output.argmax(), "the loss is of torch.int64; return a floating"),
        (lambda output, target: output.sum().detach(), "the loss has no gradient to the model's"),
        (lambda output: output.sum(), "output and 1 target: too many positional arguments; give"),
    ],
    ids=["matrix", "nothing", "number", "tuple", "integer", "detached", "signature"],
)
def test_a_loss_that_is_no_scalar_with_a_gradient_is_refused(
    loss: Callable[..., Any], part: str
) -> None:
    refused(InputError, lambda: stepped(loss=loss), part)


def test_a_matrix_for_a_loss_is_refused_by_its_shape() -> None:
    part = "the loss has shape (3, 3); reduce it to a scalar, as with .mean()"
    loss = functools.partial(functional.mse_loss, reduction="none")
    refused(InputError, lambda: stepped(target=X[:, :3], loss=loss), part)


def test_a_loss_that_raises_names_its_line() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("not today")

    error = refused(
        InputError, lambda: stepped(loss=loss), __file__, "in loss: raise RuntimeError", "not today"
    )
    assert isinstance(error.__cause__, RuntimeError)


class Mute(RuntimeError):
    """An error whose own text cannot be made."""

    def __str__(self) -> str:
        raise AttributeError("detail")


def mute(*args: object) -> Any:
    raise Mute


def empty(*args: object) -> Any:
    raise ValueError


@pytest.mark.parametrize("name", ["loss", "optimizer", "schedule"])
def test_errors_without_a_text_are_told_by_their_type(name: str) -> None:
    for function, part in ((mute, "Mute, whose text cannot be made"), (empty, "(ValueError)")):
        given: Any = function
        if name == "schedule":
            given = Recipe("mine", function)
        error = refused(InputError, functools.partial(stepped, **{name: given}), part)
        assert type(error.__cause__) is (Mute if function is mute else ValueError)


def test_no_loss_where_one_is_needed_is_refused() -> None:
    part = "there is no loss: the model returns a tensor of shape (3, 3)"
    cure = "give compile(..., loss=function)"
    refused(InputError, lambda: stepped(loss=None, target=None), part, cure)


def test_a_target_without_a_loss_is_refused() -> None:
    part = "there is a target but no loss to compare it with; give compile(..., loss=function)"
    refused(InputError, lambda: stepped(loss=None), part)


def test_a_loss_that_cannot_be_traced_is_called_as_it_is_and_its_line_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.sum() > 1e9:
            return 2 * output.mean()
        return output.mean()

    stepped(loss=loss)
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert f"the loss cannot be traced at {__file__}:" in told
    assert "in loss: if output.sum() > 1e9:" in told
    assert "depends on the values of a tensor" in told
    assert "its stage alone is not captured into CUDA graphs" in told


def test_a_step_that_would_train_nothing_is_refused() -> None:
    refused(
        InputError,
        lambda: stepped(Tiny().requires_grad_(False)),
        "the loss has a gradient to no parameter, so that a step would train nothing",
    )


# optimizers


@pytest.mark.parametrize(
    ("optimizer", "part"),
    [
        (lambda parameters: None, "optimizer returns nothing; give a function"),
        (lambda parameters: list(parameters), "optimizer returns a list; give a function"),
        (lambda: None, "takes 0 positional arguments but 1 was given); give a function"),
        (functools.partial(torch.optim.SGD, lr=-1), "ValueError: Invalid learning rate: -1"),
        (torch.optim.LBFGS, "LBFGS evaluates the loss anew inside of its step"),
    ],
    ids=["nothing", "list", "signature", "raises", "closure"],
)
def test_an_optimizer_that_is_none_is_refused(optimizer: Callable[..., Any], part: str) -> None:
    refused(InputError, lambda: stepped(optimizer=optimizer), part)


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    others = Tiny()
    part = "has a parameter of shape (6, 4) that is none of the Tiny's"
    refused(
        InputError,
        lambda: stepped(Tiny(), optimizer=lambda parameters: SGD(others.parameters())),
        part,
        "make it over the parameters of the model",
    )


def test_an_optimizer_may_group_and_leave_out_parameters() -> None:
    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return SGD([{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}])

    stepped(optimizer=grouped)


# schedules


def schedule_text(stages: int, place: str, rows: list[str]) -> Schedule:
    head = f"schedule own stages={stages} microbatches=2 delay=0\nplace {place}\n"
    return Schedule.parse(head + "".join(f"{i}: {row}\n" for i, row in enumerate(rows)))


ROW = "F0 F1 B0 B1 U"


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ("mine.py:all_first", "there is no schedule 'mine.py:all_first'"),
        ("a/mine.txt", "there is no schedule 'a/mine.txt'"),
        (Path("a/mine.txt"), 'give a name such as "1f1b", a Schedule, its text, or a function'),
    ],
)
def test_a_path_is_no_schedule(named: Any, part: str) -> None:
    with pytest.raises(InputError, match=part):
        compiled(schedule=named)


def test_a_schedule_for_another_number_of_devices_is_refused() -> None:
    schedule = schedule_text(3, "0 | 1 | 2", [ROW] * 3)
    part = "schedule 'own' is for 3 devices and there are 2; make it for 2"
    refused(InputError, lambda: compiled(schedule=schedule), part)


def test_a_schedule_for_another_number_of_micro_batches_is_refused() -> None:
    schedule = schedule_text(2, "0 | 1", [ROW] * 2)
    part = "microbatches is 3 and the schedule is for 2; leave microbatches out"
    refused(InputError, lambda: compiled(schedule=schedule, microbatches=3), part)


def test_a_schedule_without_backward_is_refused_for_a_step() -> None:
    part = "schedule 'inference' has no backward, and a step needs one; train with another"
    refused(InputError, lambda: stepped(schedule="inference"), part)


def test_all_faults_of_a_custom_schedule_are_named() -> None:
    def lazy(device: int, devices: int, microbatches: int) -> Iterator[Task]:
        yield F(0)
        yield F(0)
        yield B(0)

    with pytest.raises(VerificationError) as raised:
        stepped(schedule=lazy)
    text = str(raised.value)
    assert text.startswith("schedule 'lazy' has ")
    for device in (0, 1):
        assert f"device {device}, position 1, F0@{device}: it is there already" in text
        assert f"stage {device} has no forward of micro-batch 1; add it" in text
        assert f"stage {device} has no backward of micro-batch 1; add it" in text
        assert f"stage {device} has no update; add it" in text


def raises(device: int, devices: int, microbatches: int) -> Any:
    yield F(microbatches // 0)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda device, devices, microbatches: ["F0"], "got 'F0'; yield tasks such as F(0)"),
        (lambda device, devices, microbatches: None, "TypeError: 'NoneType' object is not iter"),
        (lambda device: [F(0)], "takes 1 positional argument but 3 were given"),
        (lambda device, devices, microbatches: iter(lambda: F(0), None), "more than 48 tasks"),
        (raises, "ZeroDivisionError"),
    ],
    ids=["no task", "nothing", "signature", "endless", "raises"],
)
def test_a_schedule_function_that_yields_no_tasks_is_refused(
    function: Callable[..., Any], part: str
) -> None:
    refused(InputError, lambda: stepped(schedule=function), part)


class FailsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no way back")


class Leaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return FailsBack.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class WritesSplits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.clone().chunk(2, 1)
        first += second.tanh()  # autograd refuses it, and PyTorch without gradients does not
        return first


class AddsInto(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, 1, out=torch.empty_like(x))  # not differentiable


def test_a_call_that_has_no_gradient_names_its_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), AddsInto(), nn.Linear(4, 3))
    start = "the model fails on the first micro-batch with gradients enabled, at "
    parts = start, "torch.add(x, 1, out=", "don't support automatic differentiation"
    refused(InputError, lambda: stepped(model), *parts)


def test_a_model_that_fails_only_where_gradients_are_wanted_names_its_line() -> None:
    def call() -> object:
        model = nn.Sequential(nn.Linear(4, 4), WritesSplits(), nn.Linear(2, 3))
        given = [fxpipe.LeafModules(WritesSplits)]
        return stepped(model, extensions=given)

    start = "the model fails on the first micro-batch with gradients enabled, at "
    refused(InputError, call, start, "first += second.tanh()", "(RuntimeError: Output 0 of", "line")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError()])
def test_no_line_is_blamed_where_memory_runs_out(error: Exception) -> None:
    with pytest.raises(type(error)), source.refusing_failures():
        raise error


@pytest.mark.parametrize(
    ("call", "last", "shown"),
    [
        (lambda: stepped(None, X[:, :3]), "Tiny fails on the first micro-batch", "F.linear"),
        (lambda: stepped(loss=lambda output: output.sum()), "too many positional", ""),
        (lambda: stepped(devices=64), "cut into at most", ""),
        (
            lambda: stepped(nn.Sequential(Tiny(), Leaf()), extensions=[fxpipe.LeafModules(Leaf)]),
            "the backward of '1' fails on the first micro-batch (ValueError: no way back)",
            'raise ValueError("no way back")',
        ),
    ],
    ids=["shapes", "loss", "devices", "backward"],
)
def test_an_error_fits_a_screen_and_the_rest_is_in_the_debug_log(
    call: Callable[[], object], last: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "fxpipe"), pytest.raises(fxpipe.FxpipeError) as raised:
        call()
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("\n") < 45
    assert last in text.splitlines()[-2] and shown in text
    ours = [line for line in text.splitlines() if 'File "' in line and "/fxpipe/" in line]
    assert all("locks.py" in line or "tests" in line for line in ours)
    assert "in step\n" in caplog.text
