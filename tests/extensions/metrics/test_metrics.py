"""What a logger is told of a step, and that nothing is measured before it asks."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import ExecutionError, InputError
from tests.helpers.overlapping import ADAMW, SGD, compiled, make
from tests.oracles.delayed_loop import DelayedLoop


def test_metrics_are_those_of_the_last_step_as_plain_values() -> None:
    model, data = make("mlp", 3, 4)
    expected = DelayedLoop.beside(model, ADAMW, 3, delay=0)
    with compiled(model, 2, 3, ADAMW, schedule="1f1b", clip_norm=1e9) as pipe:
        assert pipe.metrics == {"batches": 0}
        for number, (x, y) in enumerate(data):
            _, output = pipe.step(x, target=y, return_output=True)
            loss = expected.step(x, y)
            found = pipe.metrics
            assert output.shape == y.shape
            assert found["batches"] == number + 1
            assert found["loss"] == float(loss)
            gradients = [p.grad for p in expected.model.parameters() if p.grad is not None]
            norm = float(nn.utils.get_total_norm(gradients))
            assert found["grad_norm"] == pytest.approx(norm, rel=1e-12)
            assert all(0 < found[f"stage_seconds/{stage}"] < found["seconds"] for stage in (0, 1))
            assert bool(found["compile_seconds"]) == (number == 0)
            assert all(type(value) in (int, float) for value in found.values())
            assert 0 <= found["bubble"] < 1
            json.dumps(found)
        pipe.eval()
        pipe(data[0][0])
        assert "loss" in pipe.metrics


def test_metrics_are_of_the_last_step_also_after_a_compilation_and_of_none_that_failed() -> None:
    class Failing(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("no luck")
            return x

    model, [(x, y)] = make("mlp", 1, 4)
    model = nn.Sequential(model, Failing())
    with compiled(
        model, 2, 3, SGD, schedule="1f1b", extensions=[fxpipe.LeafModules(Failing)]
    ) as pipe:
        loss = pipe.step(x, target=y)
        first = pipe.metrics  # the first row of a loop that has not read it before
        assert first["loss"] == float(loss)
        assert first["seconds"] > 0 and first["compile_seconds"] > 0
        assert "bubble" not in first
        pipe.step(x, target=y)
        found = pipe.metrics
        assert found.keys() > first.keys()
        pipe.prepare(x[:1], target=y[:1])
        later = pipe.metrics
        assert {**later, **{n: found[n] for n in found if "peak_memory" in n}} == found
        Failing.fails = True
        for error, batch in ((ExecutionError, x), (InputError, x[:, :1])):
            with pytest.raises(error):
                pipe.step(batch, target=y)
            shown = pipe.metrics
            names = "loss", "seconds", "compile_seconds", "bubble", "stage_seconds/0"
            assert not any(name in shown for name in names)
            assert shown["batches"] == found["batches"]
            Failing.fails = False
            pipe.step(x, target=y)
            found = pipe.metrics
            assert "loss" in found


def test_the_bubble_is_what_the_times_of_the_instructions_leave_idle() -> None:
    model, [(x, y)] = make("mlp", 1, 4)
    with compiled(model, 2, 3, ADAMW, schedule="1f1b") as pipe:
        assert "bubble" not in pipe.metrics
        pipe.step(x, target=y)
        meter = pipe._engine.meter
        assert meter is not None
        late = (20, 0)  # seconds; then each instruction takes one, one after another
        for device, list_ in enumerate(pipe.program.lists):
            own = range(late[device], late[device] + len(list_))
            meter.times[device][:] = [each * 10**9 for i in own for each in (i, i + 1)]
        found = pipe.metrics
        kinds = ("Forward", "Backward", "Update")
        ends = [
            [late[device] + i + 1 for i, each in enumerate(list_) if type(each).__name__ in kinds]
            for device, list_ in enumerate(pipe.program.lists)
        ]
        assert all(found[f"stage_seconds/{s}"] == len(own) for s, own in enumerate(ends))
        last = max(own[-2] for own in ends)  # of the last micro-batch; the update comes after it
        busy = sum(min(end, last) - min(end - 1, last) for own in ends for end in own)
        assert found["bubble"] == pytest.approx(1 - busy / (2 * last))


def test_batches_that_overlap_have_a_loss_and_versions() -> None:
    model, data = make("mlp", 4, 4)
    expected = DelayedLoop.beside(model, ADAMW, 3, delay=1)
    with compiled(model, 2, 3, ADAMW) as pipe:
        assert "weight_versions/0" not in pipe.metrics
        for x, y in data:
            pipe.step(x, target=y)
            found = pipe.metrics
            assert found["loss"] == float(expected.step(x, y))
            assert "bubble" not in found and "stage_seconds/0" not in found
        pipe.flush()
        assert [pipe.metrics[f"weight_versions/{stage}"] for stage in (0, 1)] == [2, 2]


def test_no_instruction_is_timed_before_metrics_are_asked_for() -> None:
    model, [(x, y)] = make("mlp", 1, 4)
    with compiled(model, 2, 3, ADAMW, schedule="1f1b") as pipe:
        pipe.step(x, target=y)
        assert pipe._engine.meter is None
        assert isinstance(pipe.step(x, target=y), torch.Tensor)


@pytest.mark.parametrize(("schedule", "behind"), [("2bw", 3), ("1f1b", 0)])
def test_the_norm_while_batches_are_in_flight_does_not_depend_on_when_it_is_read(
    schedule: str, behind: int
) -> None:
    def norms(wait: float, *, flushed: bool = False) -> list[float | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        found = []
        with fxpipe.compile(
            model,
            ["cpu"] * 2,
            partition=["2"],
            microbatches=2,
            loss=nn.functional.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            schedule=schedule,
            clip_norm=0.1,
        ) as pipe:
            for step in range(7):
                pipe.step(torch.full((4, 4), step + 1.0), target=torch.ones(4, 4))
                time.sleep(wait)
                if flushed:
                    pipe.flush()
                found.append(pipe.grad_norm)
            pipe.flush()
            assert pipe.grad_norm is not None
            return [*found, pipe.grad_norm]

    own = norms(0.0, flushed=True)[:-1]
    assert len(set(own)) == 7
    expected = [None] * behind + own[: 7 - behind] + own[-1:]
    assert norms(0.0) == norms(0.02) == expected
