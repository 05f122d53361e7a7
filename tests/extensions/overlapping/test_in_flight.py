"""What else a pipe is asked for while batches are in flight, and what is refused."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.extensions.overlapping.loss import PendingLoss
from tests.helpers.overlapping import SGD, compiled, make
from tests.helpers.profiles import deep
from tests.oracles.delayed_loop import MSE, DelayedLoop

pytestmark = pytest.mark.smoke


def test_inference_and_state_dict_see_the_newest_version_and_change_nothing() -> None:
    data = make("mlp", 6, 9)[1]
    layers = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)
    model = nn.Sequential(*layers).double()
    expected = DelayedLoop.beside(model, SGD, 4)
    alone = expected.model
    with compiled(model, 2, 4) as pipe:
        for t, (x, y) in enumerate(data):
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
            if t == 2:
                pipe.eval()
                alone.eval()
                with torch.no_grad():
                    parts = [alone(part) for part in x.tensor_split(4)]
                assert torch.equal(pipe(x), torch.cat(parts))
                pipe.train()
                alone.train()
            if t == 3:
                expected.assert_same(pipe)
    expected.assert_same(model)


@pytest.mark.parametrize("recompute", [*deep("never", "always"), "except_last"])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b-async"])
def test_a_batch_may_be_filled_anew_as_soon_as_its_step_returns(
    schedule: str, recompute: str
) -> None:
    model, data = make("mlp", 6, 4)
    expected = DelayedLoop.beside(model, SGD, 4)
    x, y = (tensor.clone() for tensor in data[0])
    with compiled(model, 3, 4, schedule=schedule, recompute=recompute) as pipe:
        losses = []
        for inputs, target in data:
            x.copy_(inputs)
            y.copy_(target)
            losses.append(pipe.step(x, target=y))
            x.fill_(torch.nan)
            y.fill_(torch.nan)
        (delay,) = set(pipe.schedule.delays)
    expected.delays = lambda _: delay
    assert [float(loss) for loss in losses] == [float(loss) for loss in expected.run(data)]
    expected.assert_same(model)


def test_autocast_reaches_every_stage_of_overlapping_steps() -> None:
    model, data = make("mlp", 6, 4)
    expected = DelayedLoop.beside(model.float(), SGD, 4)
    with compiled(model, 2, 4) as pipe:
        for x, y in data:
            # a context of its own: it keeps casts of weights until it is left
            with torch.autocast("cpu", torch.bfloat16):
                made = pipe.step(x.float(), target=y.float())
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(made, expected.step(x.float(), y.float()))
    expected.assert_same(model)


def test_deferred_statistics_are_those_of_each_whole_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    mean, variance = torch.zeros(6).double(), torch.ones(6).double()
    with compiled(model, 2, 3, extensions=["deferred_batchnorm"]) as pipe:
        for _ in range(5):
            x = torch.randn(10, 6).double()
            pipe.step(x, target=x)
            mean = 0.9 * mean + 0.1 * x.mean(0)
            variance = 0.9 * variance + 0.1 * x.var(0)
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_var, variance, rtol=1e-12, atol=1e-12)
    assert int(norm.num_batches_tracked) == 5  # type: ignore[arg-type]


def test_bfloat16_weights_train_with_two_versions() -> None:
    model, data = make("mlp", 6, 4)
    expected = DelayedLoop.beside(model.to(torch.bfloat16), SGD, 4)
    data = [(x.bfloat16(), y.bfloat16()) for x, y in data]
    with compiled(model, 2, 4) as pipe:
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
    expected.assert_same(model)


def test_a_parameter_changed_between_flushed_batches_is_the_only_version() -> None:
    model, data = make("mlp", 4, 4)
    expected = DelayedLoop.beside(model, SGD, 4)
    with compiled(model, 2, 4) as pipe:
        for x, y in data[:2]:
            pipe.step(x, target=y)
            expected.step(x, y)
        fresh, _ = make("mlp", 1, 1)
        pipe.load_state_dict(fresh.state_dict())
        expected.model.load_state_dict(fresh.state_dict())
        expected.restart()
        for x, y in data[2:]:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    expected.assert_same(model)


def test_a_loss_is_waited_for_when_it_is_read() -> None:
    model, data = make("mlp", 6, 4)
    with compiled(model, 3, 4) as pipe:
        losses = [pipe.step(x, target=y) for x, y in data]
        pair = pipe.step(data[0][0], target=data[0][1], return_output=True)
        assert not isinstance(pair[0], PendingLoss)
        assert pair[1].shape == data[0][1].shape
    assert all(isinstance(loss, Tensor) for loss in losses)
    total = sum(float(loss) for loss in losses)
    assert total == pytest.approx(float(torch.stack(losses).sum()))
    assert type(losses[0].detach()) is Tensor
    assert f"{losses[0]:.3f}" == f"{float(losses[0]):.3f}"


OPEN = threading.Event()


class Gate(nn.Module):
    """Lets nothing through until it is open."""

    def forward(self, x: Tensor) -> Tensor:
        OPEN.wait()
        return x.clone()


def test_a_loss_of_a_batch_that_was_dropped_says_so() -> None:
    OPEN.set()
    model, data = make("mlp", 2, 4)
    model = nn.Sequential(model, Gate())
    expected = DelayedLoop.beside(model, SGD, 4)
    with compiled(model, 3, 4, extensions=[fxpipe.LeafModules(Gate)]) as pipe:
        assert torch.equal(pipe.step(data[0][0], target=data[0][1]), expected.step(*data[0]))
        pipe.flush()
        OPEN.clear()
        try:
            dropped = pipe.step(data[1][0], target=data[1][1])
            pipe._engine.abandon()
        finally:
            OPEN.set()
        with pytest.raises(
            fxpipe.EndedError, match=r"the loss of batch 1 never came.* restore\(\)"
        ):
            float(dropped)
        with pytest.raises(fxpipe.EndedError):
            pipe.step(data[1][0], target=data[1][1])


def test_versions_are_counted_when_no_update_is_half_done() -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            begun.set()
            time.sleep(0.05)  # for the count to come in the middle
            return super().step(closure)

    begun = threading.Event()
    model, data = make("mlp", 6, 4)
    with compiled(model, 2, 2, lambda p: Slow(p, lr=0.1)) as pipe:
        for t, (x, y) in enumerate(data):
            begun.clear()
            pipe.step(x, target=y)
            if t > 2:
                begun.wait(60)
                assert pipe.weight_versions == [2, 2]
                assert sum(pipe.weight_bytes) == 2 * sum(p.nbytes for p in model.parameters())


def test_parameters_that_leaf_modules_show_in_flight_are_the_pipes_own() -> None:
    """Another thread calls a leaf module with the version that its batch reads."""

    class Lingering(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)  # for the next step to come in the meantime
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Lingering(6, 6) for _ in range(4))).double()
    data = [(torch.randn(4, 6).double(), torch.randn(4, 6).double()) for _ in range(4)]
    expected = DelayedLoop.beside(model, SGD, 2)
    options: dict[str, Any] = {"extensions": [fxpipe.LeafModules(Lingering)], "recompute": "always"}
    with compiled(model, 2, 2, SGD, partition=["2"], **options) as pipe:
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        pipe.flush()
    expected.assert_same(model)


def test_what_is_compiled_anew_sees_no_update_of_batches_in_flight() -> None:
    """Torch says of all threads that they are compiled, and optimizers then round otherwise."""
    compiling: list[bool] = []
    traced = threading.Event()

    class Slow(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            traced.wait(0.2)  # in vain, unless something is traced before this is through
            compiling.append(torch.compiler.is_compiling())
            return super().step(closure)

    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                traced.set()
            y: Tensor = self.layers(x)
            return y

    torch.manual_seed(0)
    model = Telling()
    data = [(torch.randn(n, 6), torch.randn(n, 6)) for n in (4, 4, 4, 6, 6)]
    expected = DelayedLoop.beside(model, torch.optim.AdamW, 2)
    with compiled(model, 2, 2, Slow, partition=["layers.2"]) as pipe:
        for x, y in data:
            traced.clear()
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        pipe.flush()
        expected.assert_same(model)
    assert len(compiling) >= 2 * len(data)  # it may be tried before
    assert not any(compiling)


def test_no_optimizer_is_refused_at_once() -> None:
    with pytest.raises(fxpipe.InputError, match="there is no optimizer; give optimizer="):
        fxpipe.compile(nn.Linear(2, 2), 1, schedule="2bw", loss=MSE)


def test_too_few_micro_batches_name_the_delay_that_would_do() -> None:
    model, data = make("mlp", 6, 4)
    with (
        compiled(model, 4, 2) as pipe,
        pytest.raises(fxpipe.VerificationError) as caught,
    ):
        pipe.step(data[0][0], target=data[0][1])
    assert "delay=2" in str(caught.value)
    expected = DelayedLoop.beside(model, SGD, 2, delay=2)
    with compiled(model, 4, 2, schedule=fxpipe.schedules.two_bw.delayed(2)) as pipe:
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    expected.assert_same(model)
