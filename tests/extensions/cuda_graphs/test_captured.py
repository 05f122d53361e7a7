"""Training by captured graphs: the same to the bit as without. Skipped without a CUDA device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe.extensions.cuda_graphs.capturing import slots
from tests.extensions.cuda_graphs.captured_pipes import (
    adam,
    captures,
    capturing,
    kernels,
    sgd,
    train,
)
from tests.helpers.profiles import deep
from tests.helpers.tiny import CUTS, Tiny, batch, within
from tests.oracles import loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("schedule", "devices", "recompute", "dispatch"),
    [
        ("gpipe", 2, "except_last", "thread"),
        ("1f1b", 3, "always", "device"),
        ("zb-h1", 3, "never", "device"),
        ("interleaved-1f1b", 2, "always", "thread"),
        ("zb-v", 2, "never", "device"),
        *deep(
            ("gpipe", 2, "never", "device"),
            ("1f1b", 3, "never", "device"),
            ("1f1b", 3, "never", "thread"),
            ("zb-h1", 2, "except_last", "thread"),
            ("interleaved-1f1b", 2, "never", "device"),
        ),
    ],
)
def test_training_equals_that_without_graphs_and_later_steps_capture_nothing(
    schedule: str, devices: int, recompute: str, dispatch: Any
) -> None:
    torch.manual_seed(0)
    _, counts = train(
        Tiny(),
        devices=devices,
        schedule=schedule,
        recompute=recompute,
        optimizer=sgd,
        extensions=[fxpipe.Dispatch(dispatch)],
    )
    assert counts[0] == counts[-1]


def test_whole_and_parted_backwards_of_one_stage_are_captured_each() -> None:
    torch.manual_seed(0)
    pipe, _ = train(Tiny(), schedule="dualpipe-v", optimizer=sgd)
    captured = {task for kernel in kernels(pipe) for task in kernel._warm}
    assert captured == {"forward", "backward", "input_grad", "weight_grad"}
    assert all(kernel.captures <= 4 * kernel.slots for kernel in kernels(pipe))


@pytest.mark.parametrize("dispatch", ["device", *deep("thread")])
def test_each_version_of_the_weights_has_captures_of_its_own(dispatch: Any) -> None:
    torch.manual_seed(0)
    pipe, counts = train(
        Tiny(),
        9,
        schedule="2bw",
        optimizer=adam,
        extensions=[fxpipe.Dispatch(dispatch)],
        devices=3,
    )
    assert counts[5] == counts[-1]
    for kernel in kernels(pipe):
        assert kernel.captures <= 2 * kernel.slots * kernel.versions  # forward and backward


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_batches_of_other_sizes_have_slots_of_their_own(schedule: str) -> None:
    torch.manual_seed(0)
    sizes = [8, 9, 11, 8, 11, 9, 8]
    _, counts = train(
        Tiny(), len(sizes), samples=lambda step: sizes[step], schedule=schedule, optimizer=sgd
    )
    assert counts[2] == counts[-1]


class Tied(nn.Module):
    """An embedding that is read again at the end, in another stage; whole numbers cross none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.middle(self.table(x))) @ self.table.weight.t()
        return y


def tokens(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(7, (samples, 5), generator=generator) for _ in range(2))
    return x, y


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("schedule", ["zb-h1", "2bw", *deep("1f1b")])
def test_tied_weights_train_as_without_graphs(schedule: str) -> None:
    torch.manual_seed(0)
    train(
        Tied(),
        make=tokens,
        loss=of_tokens,
        schedule=schedule,
        optimizer=adam,
        partition=["norm"],
    )


def test_gradients_add_to_those_that_are_there() -> None:
    torch.manual_seed(0)
    model = Tiny()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    train(model, 3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_micro_batch_whose_loss_counts_for_nothing_gives_no_gradient(schedule: str) -> None:
    def ignoring(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = batch(samples, seed)
        y[2:4] = -100
        return x, y

    torch.manual_seed(0)
    train(
        Tiny(),
        make=ignoring,
        schedule=schedule,
        optimizer=sgd,
        extensions=[fxpipe.LossWeight(lambda y: (y != -100).sum())],
    )


def test_calls_run_captured_and_several_at_once_run_as_they_can() -> None:
    torch.manual_seed(0)
    model = Tiny().double()
    plain = copy.deepcopy(model).cuda()
    with within(300), capturing(model) as pipe:
        xs = [batch(8, seed)[0].double().cuda() for seed in range(4)]
        for _ in range(2):
            # more micro-batches are in flight than the schedule of one call has
            losses = [pipe(x).square().mean() for x in xs]
            expected = [_called(plain, x).square().mean() for x in xs]
            for loss, other in reversed([*zip(losses, expected, strict=True)]):
                assert torch.equal(loss, other)
                loss.backward()
                other.backward()
        loop.assert_same(loop.gradients(model), loop.gradients(plain), 1e-12)
        assert any(kernel.overflows for kernel in kernels(pipe))
        before = [kernel.overflows for kernel in kernels(pipe)]
        for x in xs:
            pipe(x)  # no backward: its slots are free when it is forgotten
            _called(plain, x)
        assert before == [kernel.overflows for kernel in kernels(pipe)]
        pipe.eval()
        plain.eval()
        for x in xs:
            assert torch.equal(pipe(x), _called(plain, x))
        loop.assert_same(model.state_dict(), plain.state_dict(), 1e-12)


def _called(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.tensor_split(4)])


def test_an_output_outlives_the_next_replay_of_its_slot() -> None:
    torch.manual_seed(0)
    model = Tiny().eval()
    x = batch(8)[0].cuda()
    plain = copy.deepcopy(model).cuda()
    expected = torch.cat([plain(part) for part in x.tensor_split(4)]).detach()
    with within(300), capturing(model, partition=["middle"]) as pipe:
        assert torch.equal(pipe(x), expected)  # one slot for all micro-batches


# slots


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("gpipe", "never"),
        ("gpipe", "always"),
        ("1f1b", "never"),
        ("1f1b", "except_last"),
        ("zb-h1", "never"),
        ("zb-h1", "always"),
        ("2bw", "never"),
    ],
)
@pytest.mark.parametrize("fewer", [0, 1])
def test_with_one_slot_fewer_than_the_schedule_tells_one_is_missing(
    schedule: str,
    recompute: Any,
    fewer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(program: fxpipe.Program) -> list[int]:
        return [count - fewer for count in slots(program)]

    monkeypatch.setattr("fxpipe.extensions.cuda_graphs.capturing.slots", told)
    torch.manual_seed(0)
    options = {"schedule": schedule, "recompute": recompute, "partition": CUTS[3]}
    with within(300), capturing(Tiny(), 3, optimizer=sgd, **options) as pipe:
        for step in range(3):
            x, y = batch(8, step)
            pipe.step(x, target=y)
        pipe.flush()
        assert [bool(kernel.overflows) for kernel in kernels(pipe)] == [fewer == 1] * 3


class Scaled(nn.Module):
    """Its second stage reads a whole number that the first has computed, on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.a(x)
        m = n + 1
        y: Tensor = self.b(h) * m
        return y


def test_a_number_on_the_host_is_a_part_of_the_capture() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe = capturing(Scaled(), partition=["b"], microbatches=1, loss=nn.functional.mse_loss)
    counts = []
    with within(60), pipe:
        for n in (2, 2, 3, 3):
            pipe.step(x, torch.tensor(n), target=y)
            counts.append(captures(pipe))
    assert counts[0] == counts[1] < counts[2] == counts[3]
