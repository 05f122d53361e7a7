"""Targets on simulated devices: what counts of them is counted there, and the host waits once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.compiler.loss_weight.weighing import as_numbers, divided
from tests.helpers.profiles import deep
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.test_steps import PLACES, Tokens, tokens
from tests.simcuda.training import sgd

pytestmark = simulated


def losses(
    loss: str, schedule: str, devices: Sequence[str], place: str
) -> tuple[list[Tensor], Any]:
    """Losses and weights of four steps with targets on ``place``, and what the last waited for."""
    torch.manual_seed(0)
    waits: Mapping[str, int] = {}
    options: dict[str, Any] = {"microbatches": 4, "schedule": schedule, "optimizer": sgd}
    with fxpipe.compile(Tokens(loss), devices, **options) as pipe:
        made = []
        for step in range(4):
            x, y = (tensor.to(place) for tensor in tokens(step))
            if place != "cpu":
                from tests.simcuda import cuda

                cuda.take()
            made.append(pipe.step(x, y))
            if place != "cpu":
                noticed = cuda.take()
                assert not noticed.races
                waits = noticed.waits
        pipe.flush()
        return [x.cpu() + 0 for x in [*made, *pipe.state_dict().values()]], waits


def ignored_targets(loss: str, schedule: str) -> Any:
    from tests.simcuda import cuda

    wanted, _ = losses(loss, schedule, ["cpu"] * 2, "cpu")
    cuda.configure(cuda.Mode.LAZY)
    made, waits = losses(loss, schedule, PLACES, "cuda:0")
    return all(map(torch.equal, made, wanted)), waits


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
@pytest.mark.parametrize("loss", ["shifted", *deep("plain")])
def test_targets_on_a_device_that_are_ignored_are_counted_there(loss: str, schedule: str) -> None:
    equal, waits = on_devices(ignored_targets, loss, schedule)
    assert equal
    assert not waits


@pytest.mark.parametrize("loss", ["two terms", "weighted"])
def test_targets_of_several_terms_or_with_weights_are_counted_in_one_wait(loss: str) -> None:
    equal, waits = on_devices(ignored_targets, loss, "1f1b")
    assert equal
    assert sum(waits.values()) == 1


def for_replicas() -> tuple[Any, Any, int]:
    """How many targets of each micro-batch count, as replicas tell each other, and the waits."""
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.LAZY)
    x, y = tokens(2)
    with fxpipe.compile(Tokens("plain"), PLACES, microbatches=4, optimizer=sgd) as pipe:
        with patch("fxpipe.compiler.loss_weight.weighing.divided", wraps=divided) as asked:
            pipe.step(x, y.to("cuda:0"))
        cuda.take()
        counts = as_numbers(divided(*asked.call_args.args, alone=False))
        waits = sum(cuda.take().waits.values())
    return counts, [(part != -100).sum().item() for part in y.split(2)], waits


def test_targets_are_counted_for_replicas_in_one_wait() -> None:
    (counts,), expected, waits = on_devices(for_replicas)
    assert list(counts) == expected
    assert waits == 1


def class_weights(place: str) -> list[int]:
    """What the host waits for in each step, whose losses are those of whole batches; before the
    last one the weights of the classes change."""
    from tests.simcuda import cuda

    torch.manual_seed(0)
    model, told = Tokens("weighted"), []
    with fxpipe.compile(model, PLACES, microbatches=4, optimizer=sgd) as pipe:
        for step in range(4):
            if step == 3:
                model.weight.copy_(model.weight.flip(0))
            alone = Tokens("weighted")
            alone.load_state_dict({name: x.cpu() for name, x in pipe.state_dict().items()})
            x, y = tokens(step)
            given = x.to(place), y.to(place)
            cuda.take()
            loss = pipe.step(*given)
            told.append(sum(cuda.take().waits.values()))
            torch.testing.assert_close(loss.cpu(), alone(x, y))
    return told


@pytest.mark.parametrize(("place", "once"), [("cpu", 0), ("cuda:0", 1)])
def test_weights_of_classes_on_a_device_are_read_when_they_have_changed(
    place: str, once: int
) -> None:
    *_, warm, changed = on_devices(class_weights, place)
    assert warm == once
    assert changed > 0


def rooted(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = mse_loss(output, target).sqrt()
    return loss, {"root": loss}


def compared(schedule: str) -> Any:
    """What is told of each step, and whether the number beside the last loss is that."""
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.LAZY)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    x, y = torch.randn(8, 6, device="cuda:0"), torch.randn(8, 6, device="cuda:0")
    told = []
    options: dict[str, Any] = {"microbatches": 4, "schedule": schedule, "optimizer": sgd}
    with fxpipe.compile(model, PLACES, loss=rooted, **options) as pipe:
        for _ in range(3):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                cuda.take()
                loss = pipe.step(x, target=y)
                pipe.flush()
                assert not cuda.take().races
            told.append([str(each.message) for each in warned])
        numbers = pipe._engine.logged
        assert numbers is not None
        same = numbers.read() == {"root": float(loss)}
    return told, same


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
def test_outputs_on_a_device_are_compared_once(schedule: str) -> None:
    (first, *later), same = on_devices(compared, schedule)
    assert len(first) == 1 and "no weights of micro-batches make it right" in first[0]
    assert not any(later) and same
