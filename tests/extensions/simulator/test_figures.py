"""What a pipeline predicts of itself, and what it measures."""

from __future__ import annotations

import copy
import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import InputError
from fxpipe.extensions.simulator.unroll import unroll
from fxpipe.ir import instruction as ins
from tests.helpers.one_optimizer import made_by

pytestmark = pytest.mark.models


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.BatchNorm1d(16)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 2)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(12, 6, generator=generator).double(),
        torch.randn(12, 2, generator=generator).double(),
    )


def compiled(
    schedule: str, devices: int = 2, module: nn.Module | None = None, **options: Any
) -> fxpipe.Pipeline:
    return fxpipe.compile(
        module or model(),
        ["cpu"] * devices,
        schedule=schedule,
        microbatches=4,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        **options,
    )


@pytest.mark.parametrize(("schedule", "steps"), [("1f1b", 1), ("zb-h1", 2), ("2bw", 3)])
def test_a_profile_is_a_run_of_every_instruction(schedule: str, steps: int) -> None:
    x, y = batch()
    with compiled(schedule) as pipe:
        pipe.step(x, target=y)
        found = pipe.profile(x, target=y, steps=steps)
        assert found.measured and found.seconds and found.steps == steps
        assert found.program.lists == unroll(pipe.program, steps).lists
        for device in range(2):
            starts, ends = found.events.starts[device], found.events.ends[device]
            assert all(start <= end for start, end in zip(starts, ends, strict=True))
            assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        for span in found.instructions():
            match span.instruction:
                case ins.Receive(buffer):
                    sent = found.events.transfers[buffer]
                    source = found.events.starts[sent.source]
                    assert source[sent.position] < span.end
        assert min(found.busy) > 0
        idle = sum(each.total for each in found.idle)
        assert idle == pytest.approx(found.bubble * found.through * found.devices)
        assert 0 < found.bubble < 1
        assert "measured" in str(found)


def test_a_profile_feeds_a_simulation() -> None:
    x, y = batch()
    with compiled("zb-h1") as pipe:
        measured = pipe.profile(x, target=y, steps=2)
        predicted = pipe.simulate(measured.costs, steps=2)
        assert predicted.costs == pytest.approx(measured.costs)
        assert predicted.makespan <= measured.makespan
        assert [round(a / b, 6) for a, b in zip(predicted.busy, measured.busy, strict=True)] == [
            1,
            1,
        ]
        assert set(pipe.simulate().costs) == set(measured.costs)
        with pytest.raises(InputError, match="cannot go on"):
            _ = measured.steady


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"recompute": "always", "clip_norm": 0.1}),
        ("2bw", {}),
        ("chimera", {"extensions": ["deferred_batchnorm"]}),
        ("interleaved-1f1b", {}),
    ],
)
def test_a_prediction_changes_nothing(schedule: str, options: dict[str, Any]) -> None:
    x, y = batch()
    own = model()
    with compiled(schedule, module=own, **options) as pipe:
        pipe.step(x, target=y)
        pipe.flush()
        before = copy.deepcopy([own.state_dict(), pipe.optimizer.state_dict()])
        gradients, count = [each.grad for each in own.parameters()], pipe.batches
        draws = torch.get_rng_state()
        found = pipe.simulate()
        assert pipe.simulate() == found
        after = [own.state_dict(), pipe.optimizer.state_dict()]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert all(a is b.grad for a, b in zip(gradients, own.parameters(), strict=True))
        assert pipe.batches == count and torch.equal(draws, torch.get_rng_state())
        assert {letter for letter, _ in found.costs} >= {"F", "B", "U"}
        assert found.step_time > 0
    assert pipe.simulate() == found


def test_a_profile_corrects_later_predictions_of_its_steps() -> None:
    x, y = batch()
    with compiled("zb-h1") as pipe:
        pipe.step(x, target=y)
        before = pipe.simulate()
        measured = pipe.profile(x, target=y, steps=3)
        assert pipe.simulate().costs == pytest.approx(measured.costs)
        pipe.step(x[:8], target=y[:8])
        assert pipe.simulate().costs != pytest.approx(measured.costs)  # of other micro-batches
        pipe.step(x, target=y)
        assert pipe.simulate().costs == pytest.approx(measured.costs) != before.costs


def test_profiling_trains_as_a_step_does() -> None:
    x, y = batch()
    alone = model()
    with (
        compiled("1f1b", module=copy.deepcopy(alone)) as one,
        compiled("1f1b", module=alone) as two,
    ):
        one.step(x, target=y)
        two.profile(x, target=y)
        for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
            assert torch.equal(a, b)


class Collecting(torch.optim.SGD):
    """Notes at each step whether Python's garbage may be collected then."""

    found: ClassVar[list[bool]] = []
    own: ClassVar[set[int]] = set()  # ids of the model's parameters, which no trial step has

    def step(self, closure: Any = None) -> Any:
        if id(self.param_groups[0]["params"][0]) in self.own:
            self.found.append(gc.isenabled())
        return super().step(closure)


def test_no_garbage_is_collected_while_times_are_taken() -> None:
    found, trained = Collecting.found, model()
    Collecting.own.update(map(id, trained.parameters()))
    x, y = batch()
    with fxpipe.compile(
        trained,
        ["cpu"] * 2,
        microbatches=4,
        loss=mse_loss,
        optimizer=lambda parameters: Collecting(parameters, lr=0.1),
    ) as pipe:
        pipe.step(x, target=y)
        assert all(found)
        found.clear()
        pipe.profile(x, target=y)
        assert len(found) == 2
        assert not any(found)
        assert gc.isenabled()


def test_a_step_takes_no_times() -> None:
    x, y = batch()
    with compiled("1f1b") as pipe:
        first = pipe.profile(x, target=y)
        count = [len(own) for own in first.events.ends]
        pipe.step(x, target=y)
        assert [len(own) for own in first.events.ends] == count


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_memory_is_counted_for_the_optimizer_too_before_it_has_stepped(
    kind: type[torch.optim.Optimizer],
) -> None:
    x, y = batch()
    with fxpipe.compile(
        model(),
        ["cpu"] * 2,
        microbatches=4,
        loss=mse_loss,
        optimizer=lambda parameters: kind(parameters, lr=0.1),  # type: ignore[call-arg]
    ) as pipe:
        pipe.prepare(x, target=y)
        before = [memory.resting for memory in pipe.simulate().memory]
        pipe.step(x, target=y)
        assert [memory.resting for memory in pipe.simulate().memory] == before
        for stage, optimizer in enumerate(made_by(pipe)):
            assert optimizer is not None
            kept = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
            held = sum(x.nbytes for each in kept for x in each.values())
            part = pipe.simulate().memory[stage].parts["optimizer"]
            assert held <= part <= held + 3 * 16 * 8 * 2  # batch norm's buffers, and their copies


def test_without_a_plan_or_steps_it_says_what_to_do() -> None:
    x, y = batch()
    with compiled("1f1b") as pipe:
        with pytest.raises(InputError, match="nothing is compiled yet"):
            pipe.simulate()
        for wrong in (0, 1.5, "2", True):
            with pytest.raises(InputError, match=f"steps is {wrong!r}; give a whole number"):
                pipe.profile(x, target=y, steps=wrong)  # type: ignore[arg-type]
