"""Steps that overlap without a flush: equal to a loop with delayed gradients, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.recipe import find_recipe
from tests.extensions.overlapping.most_versions import MostVersions
from tests.helpers.overlapping import (
    ADAMW,
    LOSSES,
    MORE,
    OPTIMIZERS,
    SGD,
    compiled,
    make,
)
from tests.helpers.profiles import DEEP, deep
from tests.models.test_split_training import scores
from tests.oracles.delayed_loop import MSE, DelayedLoop

pytestmark = pytest.mark.smoke


def compare(
    case: str,
    optimizer: str,
    devices: int,
    microbatches: int,
    *,
    schedule: str | fxpipe.Schedule = "2bw",
    delay: int = 1,
    batches: int = 16,
    flush_at: tuple[int, ...] = (),
) -> fxpipe.Pipeline:
    """Losses, parameters, buffers and the optimizers' states, after so many batches."""
    model, data = make(case, batches, microbatches + 1)
    factory, loss = OPTIMIZERS[optimizer], LOSSES[case]
    expected = DelayedLoop.beside(model, factory, microbatches, loss=loss, delay=delay)
    with compiled(model, devices, microbatches, factory, schedule=schedule, loss=loss) as pipe:
        expected.assert_trained(pipe, model, data, flush_at)
        ours = pipe.optimizer.state
        for here, there in zip(model.parameters(), expected.model.parameters(), strict=True):
            for key, value in expected.optimizer.state[there].items():
                if isinstance(value, Tensor):
                    assert torch.equal(ours[here][key], value), key
    return pipe


CASES = [
    *deep(("mlp", "sgd", 2, 1), ("mlp", "foreach", 4, 6), ("mlp", "own", 6, 5)),
    ("mlp", "adamw", 3, 2),
    ("mlp", "groups", 4, 3),
    *deep(("mlp", "fused", 3, 3)),
    ("unet", "adamw", 2, 2),
    *deep(("transformer", "sgd", 2, 3)),
]
if DEEP:
    CASES += [
        (case, optimizer, p, m)
        for case in LOSSES
        for optimizer in ("sgd", "adamw")
        for p in (2, 3, 4, 6)
        for m in range(max(p - 1, 1), 2 * p + 1)
    ]


@pytest.mark.parametrize(("case", "optimizer", "devices", "microbatches"), CASES)
def test_two_buffered_weights_are_the_loop_with_gradients_one_version_late(
    case: str, optimizer: str, devices: int, microbatches: int
) -> None:
    pipe = compare(case, optimizer, devices, microbatches, flush_at=(3, 8))
    # as in 1F1B: a stage holds its distance from the end
    assert pipe.kept == {s: min(devices - s, microbatches + 1) for s in range(devices)} or (
        pipe.kept == {s: devices - s for s in range(devices)}
    )


@pytest.mark.parametrize(
    ("devices", "microbatches", "delay"), [*deep((4, 1, 3), (3, 3, 1)), (4, 2, 2)]
)
def test_one_f_one_b_without_flush_takes_any_number_of_micro_batches(
    devices: int, microbatches: int, delay: int
) -> None:
    assert find_recipe("1f1b-async")(devices, microbatches).delay == delay
    compare("mlp", "sgd", devices, microbatches, schedule="1f1b-async", delay=delay)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b-async"])
def test_pipedream_reads_as_many_versions_late_as_stages_follow(schedule: str) -> None:
    model, data = make("mlp", 12, 4)
    alone = copy.deepcopy(model)
    vertical = schedule == "1f1b-async"  # with one micro-batch, PipeDream with vertical sync
    with compiled(model, 3, 1, schedule=schedule) as pipe:
        losses = [pipe.step(x, target=y) for x, y in data]
        owner = {a.target: s.index for s in pipe.plan.stages for a in s.parameters}
        delays = {name: 2 if vertical else 2 - stage for name, stage in owner.items()}
        pipe.flush()
        versions = [3, 3, 3] if vertical else [3, 2, 1]
        assert pipe.weight_versions == versions
    expected = DelayedLoop(alone, SGD(alone.parameters()), MSE, 1, delays.__getitem__)
    assert [float(x) for x in losses] == [float(x) for x in expected.run(data)]
    expected.assert_same(model)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "live"),
    [*deep(("2bw", 4, 2)), ("2bw", 2, 2), ("1f1b-async", 1, 3)],
)
def test_exactly_so_many_versions_live_as_the_delay_asks_for(
    schedule: str, microbatches: int, live: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = MostVersions(monkeypatch)
    model, data = make("mlp", 8, 4)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with compiled(model, 3, microbatches, schedule=schedule) as pipe:
        assert pipe.weight_versions == []
        for x, y in data:
            pipe.step(x, target=y)
        pipe.flush()
        assert pipe.weight_versions == [live] * 3
        assert sum(pipe.weight_bytes) == live * size
        assert most.of(pipe) == [live] * 3
        assert pipe.schedule.versions().live == (live,) * 3


def test_batches_may_differ_in_size_and_in_number_of_micro_batches() -> None:
    model, _ = make("mlp", 1, 1)
    sizes = [9, 8, 3, 12, 2, 9]
    data = [(torch.randn(n, 6).double(), torch.randn(n, 6).double()) for n in sizes]
    expected = DelayedLoop.beside(model, SGD, 0)
    with fxpipe.compile(model, 2, schedule="2bw", loss=MSE, optimizer=SGD) as pipe:
        for x, y in data:
            expected.microbatches = min(8, len(x))
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    expected.assert_same(model)


def test_a_batch_too_short_to_overlap_is_flushed_and_reads_the_version_that_it_would() -> None:
    """Two micro-batches on four devices are too few for a delay of 1; the last batch has one."""
    model, _ = make("mlp", 1, 1)
    data = [(torch.randn(n, 6).double(), torch.randn(n, 6).double()) for n in (8, 9, 2, 8, 8, 1)]
    expected = DelayedLoop.beside(model, SGD, 4)
    with compiled(model, 4, 4) as pipe:
        for x, y in data:
            expected.microbatches = min(4, len(x))
            torch.testing.assert_close(
                pipe.step(x, target=y), expected.step(x, y), rtol=1e-12, atol=1e-12
            )
    expected.assert_same(model)


def test_a_learning_rate_scheduler_counts_for_the_batch_after_its_step() -> None:
    model, data = make("mlp", 10, 6)
    x, y = data[0]
    expected = DelayedLoop.beside(model, ADAMW, 4)
    with compiled(model, 4, 4, ADAMW, example=((x,), {"target": y})) as pipe:
        decays = decays_of(pipe, expected)
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
            for each in decays:
                each.step()
    expected.assert_same(model)


@pytest.mark.parametrize("name", MORE)
def test_any_optimizer_trains_with_a_learning_rate_scheduler(name: str) -> None:
    model, data = make("mlp", 7, 4)
    expected = DelayedLoop.beside(model, MORE[name], 3)
    with compiled(model, 3, 3, MORE[name]) as pipe:
        pipe.prepare(data[0][0], target=data[0][1])
        decays = decays_of(pipe, expected)
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
            for each in decays:
                each.step()
    expected.assert_same(model)


def decays_of(
    pipe: fxpipe.Pipeline, expected: DelayedLoop
) -> list[torch.optim.lr_scheduler.ExponentialLR]:
    """A scheduler of the learning rate for each optimizer of the pipe, and for the loop's."""
    return [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.7)
        for each in (pipe.optimizer, expected.optimizer)
    ]


def test_a_weight_that_two_stages_read_is_of_one_version() -> None:
    class Tied(nn.Module):
        """The first stage's embedding is the last one's head."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.last(self.first(self.embed(x)).tanh()).tanh())
            return out

    torch.manual_seed(0)
    model = Tied().double()
    expected = DelayedLoop.beside(model, ADAMW, 3, loss=scores)
    with compiled(model, 3, 3, ADAMW, loss=scores) as pipe:
        for _ in range(8):
            x, y = torch.randint(11, (5, 4)), torch.randint(11, (5, 4))
            torch.testing.assert_close(
                pipe.step(x, target=y), expected.step(x, y), rtol=1e-13, atol=0
            )
        owned = [a.target for stage in pipe.plan.stages for a in stage.parameters]
        assert len({"embed.weight", "head.weight"}.intersection(owned)) == 1
    expected.assert_same(model, 1e-12)
