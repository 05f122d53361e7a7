"""A user's own kind of task: in schedules, text, pictures and programs, and when it runs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.extensions.own_tasks.define import define_task
from fxpipe.extensions.own_tasks.opcodes import TaskContext
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, KINDS, B, F, Task, U
from tests.oracles import loop

pytestmark = pytest.mark.models


@pytest.fixture(autouse=True)
def kinds() -> Iterator[None]:
    yield
    for letter in KINDS.keys() - BUILT_IN:
        del KINDS[letter]


def model_and_batch() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return model.double(), torch.randn(6, 4).double(), torch.randn(6, 2).double()


def with_task(make: Callable[..., Task], *, after: bool = False) -> Recipe:
    """1F1B's order at its simplest, with a task before or after the update."""

    def rows(device: int, devices: int, microbatches: int) -> Iterator[Task]:
        for i in range(microbatches):
            yield F(i)
        for i in range(microbatches):
            yield B(i)
        yield from (U(), make()) if after else (make(), U())

    return Recipe("mine", rows)


def training(
    model: nn.Module, make: Callable[..., Task], devices: int, *, after: bool = False
) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        devices,
        schedule=with_task(make, after=after),
        microbatches=2,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.mark.smoke
def test_gradient_norms_are_logged_from_outside_the_library() -> None:
    model, x, y = model_and_batch()
    alone = copy.deepcopy(model)
    norms: dict[str, float] = {}
    lock = threading.Lock()

    def log(context: TaskContext) -> None:
        with lock:
            for name, gradient in context.gradients.items():
                norms[name] = float(gradient.norm())

    norm = define_task("N", "gradient norm", run=log, cost=0.1, follows="BW", reads=("gradients",))
    with training(model, norm, 2) as pipe:
        pipe.step(x, target=y)
        assert Schedule.parse(str(pipe.schedule)) == pipe.schedule
        assert "N U" in str(pipe.schedule)
        assert fxpipe.Program.parse(str(pipe.program)) == pipe.program
        assert "run          N s1 v0" in str(pipe.program)
    loop.train(alone, 2, x, loss=nn.functional.mse_loss, target=y)
    assert norms == {
        name: float(gradient.norm())
        for name, gradient in loop.gradients(alone).items()
        if gradient is not None
    }


@pytest.mark.smoke
@pytest.mark.parametrize("reads", [("gradients",), ()])
def test_a_task_that_writes_gradients_changes_the_update(reads: tuple[str, ...]) -> None:
    model, x, y = model_and_batch()
    alone = copy.deepcopy(model)

    def halve(context: TaskContext) -> None:
        for gradient in context.gradients.values():
            gradient.mul_(0.5)

    make = define_task("H", "halve", run=halve, cost=0.1, reads=reads, writes=("gradients",))
    with training(model, make, 2) as pipe:
        pipe.step(x, target=y)
    loop.train(alone, 2, x, loss=nn.functional.mse_loss, target=y)
    with torch.no_grad():
        for parameter in alone.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad * 0.5 * 0.1)
    loop.assert_same(model.state_dict(), alone.state_dict(), 1e-12)


def test_a_task_after_the_update_reads_what_it_made() -> None:
    model, x, y = model_and_batch()
    seen: dict[str, Tensor] = {}

    def look(context: TaskContext) -> None:
        seen.update({name: value.clone() for name, value in context.parameters.items()})

    make = define_task("L", "look", run=look, cost=0, reads=("parameters",))
    with training(model, make, 1, after=True) as pipe:
        pipe.step(x, target=y)
    loop.assert_same(seen, dict(model.named_parameters()))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda tensor: tensor.zero_(),
    "detached": lambda tensor: tensor.detach().add_(1),
    "view": lambda tensor: tensor.view(-1)[:1].fill_(float("nan")),
    "nothing new": lambda tensor: tensor.mul_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    ("what", "message"),
    [("gradients", "changed the gradient of .* in"), ("parameters", "changed the parameter .* in")],
)
def test_a_task_that_changes_what_it_only_reads_fails_and_the_weights_stay(
    what: str, message: str, write: Callable[[Tensor], object]
) -> None:
    model, x, y = model_and_batch()
    before = copy.deepcopy(model.state_dict())

    def spoil(context: TaskContext) -> None:
        write(next(iter(getattr(context, what).values())))

    make = define_task("S", "spoil", run=spoil, cost=0, reads=(what,))
    with (
        training(model, make, 2) as pipe,
        pytest.raises(fxpipe.ExecutionError, match=message),
    ):
        pipe.step(x, target=y)
    loop.assert_same(model.state_dict(), before)


def test_a_gradient_that_is_put_in_the_place_of_another_is_not_lost_without_a_word() -> None:
    model, x, y = model_and_batch()
    before = copy.deepcopy(model.state_dict())

    def halve(context: TaskContext) -> None:
        gradients: Any = context.gradients
        for name in gradients:
            gradients[name] = gradients[name] / 2

    make = define_task("H", "halve", run=halve, cost=0, writes=("gradients",))
    with (
        training(model, make, 2) as pipe,
        pytest.raises(fxpipe.ExecutionError, match="does not support item assignment"),
    ):
        pipe.step(x, target=y)
    loop.assert_same(model.state_dict(), before)


def test_a_task_may_read_what_is_not_a_number() -> None:
    model, x, y = model_and_batch()
    seen: list[bool] = []

    def look(context: TaskContext) -> None:
        read = [*context.parameters.values(), *context.gradients.values()]
        seen.append(any(bool(tensor.isnan().any()) for tensor in read))

    make = define_task("S", "look", run=look, cost=0, reads=("parameters", "gradients"))
    x[0] = float("nan")
    with training(model, make, 2) as pipe:
        pipe.step(x, target=y)
    assert all(seen)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"letter": "F"}, "'F' is the letter of forward"),
        ({"letter": "n"}, "give one capital letter"),
        ({"letter": "NN"}, "give one capital letter"),
        ({"letter": 5}, "give one capital letter"),
        ({"name": 5}, "task 5: give its name as a text"),
        ({"cost": "1"}, "its cost is '1'; give a time of at least 0"),
        ({"follows": 3}, "follows is 3; give letters of tasks"),
        ({"reads": "gradients"}, "reads is 'gradients'; give a tuple"),
        ({"writes": None}, "writes is None; give a tuple"),
        ({"cost": None}, "has no cost; give cost="),
        ({"cost": -1.0}, "give a time of at least 0"),
        ({"run": 3}, "give a function"),
        ({"follows": "Q"}, "follows names 'Q'"),
        ({"reads": ("weights",)}, "reads names 'weights'"),
        ({"writes": ("parameters",)}, "writes names 'parameters'"),
    ],
)
def test_a_task_that_is_defined_wrongly_is_refused(change: dict[str, Any], message: str) -> None:
    good = {"letter": "N", "name": "norm", "run": print, "cost": 0.1}
    with pytest.raises(fxpipe.InputError, match=message):
        define_task(**{**good, **change})


@pytest.mark.smoke
def test_a_task_before_what_it_follows_is_refused() -> None:
    make = define_task("N", "norm", run=lambda context: None, cost=0.1, follows="B")
    rows = ((F(0, 0), make(0), B(0, 0), U(0)),)
    with pytest.raises(fxpipe.VerificationError, match="N@0: it comes before B0@0"):
        Schedule("mine", 1, (0,), rows).verify()


def test_a_task_of_each_micro_batch_before_what_comes_once_a_step_is_refused() -> None:
    options: dict[str, Any] = {"run": lambda context: None, "cost": 0.1, "per_microbatch": True}
    make = define_task("N", "norm", follows="U", **options)
    rows = ((F(0, 0), B(0, 0), make(0, 0), U(0)),)
    with pytest.raises(fxpipe.VerificationError, match="N0@0: it comes before U@0"):
        Schedule("mine", 1, (0,), rows).verify()
    text = (
        "program mine microbatches=1\nplace 0\npasses lower\ndevice 0\n"
        "forward s0[0] v0 keep\nbackward s0[0] v0\nbarrier\nrun_each N s0[0] v0\n"
        "update s0 v0 -> v1\n"
    )
    with pytest.raises(
        fxpipe.VerificationError, match=r"run_each N s0\[0\] v0: it comes before update"
    ):
        fxpipe.Program.parse(text).verify()


@pytest.mark.smoke
def test_a_task_that_needs_gradients_behind_the_update_is_refused() -> None:
    make = define_task("N", "norm", run=lambda context: None, cost=0.1, reads=("gradients",))
    Schedule("mine", 1, (0,), ((F(0, 0), B(0, 0), make(0), U(0)),)).verify()
    with pytest.raises(
        fxpipe.VerificationError,
        match="N@0: it needs gradients that U@0, position 2, has used up; move it before that",
    ):
        Schedule("mine", 1, (0,), ((F(0, 0), B(0, 0), U(0), make(0)),)).verify()


@pytest.mark.smoke
def test_a_program_with_an_undefined_task_is_refused() -> None:
    make = define_task("N", "norm", run=lambda context: None, cost=0.1)
    rows = ((F(0, 0), B(0, 0), make(0), U(0)),)
    schedule = Schedule("mine", 1, (0,), rows)
    schedule.verify()
    del KINDS["N"]
    with pytest.raises(fxpipe.VerificationError, match="there is no kind of task 'N'"):
        schedule.verify()
