"""A number, a flag or a submodule that changes after it was traced counts from the next call on."""

from __future__ import annotations

import copy
import cProfile
import logging
import pstats
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler.guards import VARIANTS, Guards
from tests import loop

pytestmark = pytest.mark.usefixtures("one_thread")
SLOPE = 1.0


class Net(nn.Module):
    """Reads what it is by attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act: nn.Module = nn.Tanh()
        self.last = nn.Linear(4, 3)
        self.scale = 1.0
        self.config = types.SimpleNamespace(shift=0.0, unread=0)
        self.powers = [1.0, 2.0]
        self.factor_a = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x))) * self.scale + self.config.shift
        for power in self.powers:
            x = x * power
        for letter in "a":
            x = x * getattr(self, f"factor_{letter}")
        made: Tensor = self.last(x * SLOPE)
        return made


class Loss(nn.Module):
    """A loss with attributes and a buffer."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3))
        self.smoothing = 0.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, self.weight, label_smoothing=self.smoothing)


def _set_slope(model: Any, loss: Any) -> None:
    global SLOPE
    SLOPE = 3.0


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a number": lambda model, loss: setattr(model, "scale", 2.0),
    "an option of a module of torch.nn": lambda model, loss: setattr(model.norm, "momentum", 0.5),
    "a field of a configuration": lambda model, loss: setattr(model.config, "shift", 0.5),
    "an entry of a list": lambda model, loss: model.powers.__setitem__(0, 3.0),
    "one more entry of a list": lambda model, loss: model.powers.append(3.0),
    "an attribute whose name is made": lambda model, loss: setattr(model, "factor_a", 2.0),
    "a submodule": lambda model, loss: setattr(model, "act", nn.ReLU()),
    "a hook": lambda model, loss: model.first.register_forward_hook(lambda m, args, out: out * 2),
    "a global number": _set_slope,
    "an attribute of the loss": lambda model, loss: setattr(loss, "smoothing", 0.3),
    "a buffer of the loss": lambda model, loss: setattr(loss, "weight", torch.arange(1.0, 4.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_steps_counts_from_the_next_step_on(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SLOPE", 1.0)
    torch.manual_seed(0)
    model, loss = Net(), Loss()
    alone, loss_alone = copy.deepcopy(model), copy.deepcopy(loss)
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=loss) as pipe:
        for step in range(3):
            if step == 1:
                CHANGES[what](model, loss)
                CHANGES[what](alone, loss_alone)
            made = pipe.step(x, target=target)
            expected = loop.train(alone, 2, x, loss=loss_alone, target=target)
            assert torch.equal(made, expected.loss), step
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(model.state_dict(), alone.state_dict())


def test_a_number_in_the_closure_of_a_loss_counts() -> None:
    beta = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * beta

    x = torch.randn(4, 4)
    with fxpipe.compile(nn.Linear(4, 4), ["cpu"], microbatches=2, loss=loss) as pipe:
        before = pipe.step(x, target=x)
        beta = 2.0
        assert torch.equal(pipe.step(x, target=x), 2 * before)


def test_a_shape_that_changes_with_a_parameter_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        pipe.step(x, target=target)
        model[2] = nn.Linear(4, 5)
        alone = copy.deepcopy(model)
        loop.clear(model, alone)
        made = pipe.step(x, target=target + 2)
    assert torch.equal(made, loop.train(alone, 2, x, loss=F.cross_entropy, target=target + 2).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_what_no_code_reads_is_no_reason_to_trace(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe,
    ):
        pipe.step(x, target=target)
        model.norm.epoch = 1  # type: ignore[assignment]
        model.config.unread = 1
        model.act = nn.Tanh()
        pipe.step(x, target=target)
    assert "anew" not in caplog.text


def test_a_state_that_comes_back_has_its_graphs_back(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe,
    ):
        for scale in (1.0, 2.0, 1.0, 2.0):
            model.scale = scale
            pipe.step(x, target=target)
    assert caplog.text.count("anew") == 1
    assert "Net is traced anew, as .scale has changed" in caplog.text


def test_graphs_of_old_states_are_forgotten() -> None:
    model = Net()
    x, target = torch.randn(4, 4), torch.randint(3, (4,))
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        for scale in range(VARIANTS + 3):
            model.scale = float(scale)
            pipe.step(x, target=target)
        assert len(pipe._compiler.plans.graphs) == VARIANTS


def test_what_a_first_run_sets_is_no_new_state() -> None:
    class Lazy(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(4)
            return x * self.table

    model = Lazy()
    guards = Guards(model, None, ())
    first = guards.variant()
    with guards.reading():
        model(torch.ones(4))
    guards.settle()
    assert guards.variant() == first
    model.table = torch.zeros(4)
    assert guards.variant() != first


def test_a_parameter_without_a_shape_gets_one_by_its_first_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    x, target = torch.randn(8, 5), torch.randint(3, (8,))
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        made = pipe.step(x, target=target)
    alone = copy.deepcopy(model)
    loop.clear(alone)
    assert torch.equal(made, loop.train(alone, 2, x, loss=F.cross_entropy, target=target).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_an_object_that_does_not_tell_its_length_may_be_held() -> None:
    class Stream:
        def __len__(self) -> int:
            raise TypeError("nobody knows")

        def __iter__(self) -> Iterator[int]:
            return iter(())

        def __contains__(self, value: object) -> bool:
            return False

    model = Net()
    model.scale = Stream()  # type: ignore[assignment]
    guards = Guards(model, None, ())
    with guards.reading():
        assert model.scale is not None
    assert guards.variant() == guards.variant()


def test_a_profiler_written_in_c_is_on_again_after_a_trace() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with fxpipe.compile(Net(), ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
            pipe.step(x, target=y)
            textwrap.dedent("seen")
    finally:
        profiler.disable()
    assert "dedent" in {name for _, _, name in pstats.Stats(profiler).stats}  # type: ignore[attr-defined]
