"""Memory limits: what a pipe is predicted to hold keeps them, or it is refused."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam

import fxpipe
from benchmarks.models.gpt2 import GPT2, next_words
from benchmarks.models.unet import UNet
from fxpipe.passes.partition.options import Partition
from tests.helpers.profiles import deep
from tests.partition.test_options import Blocks, compiled

pytestmark = pytest.mark.models

Case = tuple[nn.Module, Tensor, Tensor, Any]


def layers() -> tuple[nn.Sequential, Tensor, Tensor, Any]:
    """Layers that differ much in width, of large weights and small values."""
    widths = [16, 96, 32, 64, 16, 128, 16]
    parts = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*parts), torch.randn(8, 16), torch.randn(8, 16), mse_loss


def unet() -> Case:
    """Small weights, and large values that skip."""
    return UNet(1, 4, depth=1), torch.randn(8, 3, 8, 8), torch.randn(8, 1, 8, 8), mse_loss


def transformer() -> Case:
    tokens = torch.randint(101, (8, 17))
    model = GPT2(101, 16, 2, 32, 2)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), next_words


def peaks(make: Any, limits: Any = None, at: Any = None, **options: Any) -> list[int]:
    """Device → bytes that a step is predicted to hold at most."""
    torch.manual_seed(0)
    model, x, y, loss = make()
    with fxpipe.compile(
        model,
        ["cpu", "cpu"],
        loss=loss,
        partition=Partition(at=at, memory_limits=limits),
        example=((x,), {"target": y}),
        **{"microbatches": 4, **options},
    ) as pipe:
        return [memory.peak for memory in pipe.simulate().memory]


ADAM, MOMENTUM, PLAIN = partial(Adam, lr=1e-3), partial(SGD, lr=0.1, momentum=0.9), SGD


@pytest.mark.parametrize(
    ("make", "schedule", "optimizer", "recompute"),
    [
        (layers, "2bw", MOMENTUM, "never"),
        *deep(
            (unet, "1f1b", ADAM, "always"),
            (layers, "gpipe", PLAIN, "never"),
            (unet, "zb-h1", PLAIN, "never"),
            (transformer, "interleaved-1f1b", MOMENTUM, "never"),
            (layers, "1f1b", ADAM, "never"),
            (layers, "gpipe", None, "never"),
            (unet, "gpipe", MOMENTUM, "never"),
            (transformer, "1f1b", ADAM, "never"),
        ),
    ],
)
def test_a_limit_is_kept_by_the_predicted_peak_or_refused(
    make: Any, schedule: str, optimizer: Any, recompute: str
) -> None:
    options = {"schedule": schedule, "optimizer": optimizer, "recompute": recompute}
    free = max(peaks(make, **options))
    kept = 0
    parts = (2.0, 0.95, 0.8, 0.2) if make is layers else (2.0, 0.9)
    for part in parts:
        try:
            found = max(peaks(make, free * part, **options))
        except fxpipe.PartitionError as error:
            assert "raise memory_limits" in str(error)
        else:
            kept += 1
            assert found <= free * part
    assert 0 < kept < 4


@pytest.mark.parametrize(
    ("make", "at", "optimizer"),
    [
        (layers, ["5"], ADAM),
        *deep((layers, ["5"], PLAIN), (unet, ["ups"], PLAIN), (transformer, ["blocks.1"], ADAM)),
    ],
)
def test_a_named_cut_is_allowed_what_it_is_predicted_to_hold_and_no_byte_less(
    make: Any, at: list[str], optimizer: Any
) -> None:
    options = {"at": at, "schedule": "1f1b", "optimizer": optimizer}
    needed = peaks(make, **options)
    assert peaks(make, needed, **options) == needed
    for device in range(2):
        limits: list[float | None] = [None, None]
        limits[device] = needed[device] - 1
        with pytest.raises(fxpipe.PartitionError, match=f"device {device} .*is predicted to hold"):
            peaks(make, limits, **options)


def test_a_step_that_comes_after_a_call_may_not_break_the_limits() -> None:
    """The call has placed the model by what can be counted; nothing is placed anew after it."""
    needed = peaks(layers, at=["5"], optimizer=ADAM, schedule="1f1b")

    def pipe_within(limit: float) -> fxpipe.Pipeline:
        torch.manual_seed(0)
        return fxpipe.compile(
            layers()[0],
            ["cpu", "cpu"],
            schedule="1f1b",
            microbatches=4,
            loss=layers()[3],
            optimizer=ADAM,
            partition=Partition(at=["5"], memory_limits=[limit, None]),
        )

    _, x, y, _ = layers()
    with pipe_within(1 << 30) as pipe, torch.no_grad():
        pipe(x)
        loads = pipe._compiler.loads
    counted = loads[0].memory  # for training, without what the stage's graphs add
    assert counted < needed[0]
    with (
        pipe_within(counted - 1) as pipe,
        torch.no_grad(),
        pytest.raises(fxpipe.PartitionError, match=r"stage 0 .* needs .* and may take"),
    ):
        pipe(x)
    with pipe_within(counted) as pipe:
        with torch.no_grad():
            pipe(x)
        with pytest.raises(fxpipe.PartitionError, match=r"device 0 .*is predicted to hold"):
            pipe.step(x, target=y)


def test_without_an_optimizer_an_adam_outside_counts() -> None:
    """What the pipe itself holds would fit, but not what is to step its parameters."""
    own = peaks(layers, at=["5"], schedule="gpipe")
    weights = sum(p.nbytes for m in list(layers()[0])[:5] for p in m.parameters())
    fits = [own[0] + 2 * weights, None]
    assert peaks(layers, fits, at=["5"], schedule="gpipe") == own
    with pytest.raises(fxpipe.PartitionError, match="device 0"):
        peaks(layers, [own[0] + 2 * weights - 1, None], at=["5"], schedule="gpipe")


def test_what_a_refusal_proposes_is_enough() -> None:
    limits = [0.9 * peak for peak in peaks(unet, at=["ups"], schedule="gpipe", optimizer=PLAIN)]
    with pytest.raises(fxpipe.PartitionError, match='give schedule="auto"'):
        peaks(unet, limits, ["ups"], schedule="gpipe", optimizer=PLAIN)
    found = peaks(unet, limits, schedule="auto", optimizer=PLAIN)
    assert all(peak <= limit for peak, limit in zip(found, limits, strict=True))


def test_a_named_cut_that_cannot_keep_a_limit_names_the_device_and_the_ways_out() -> None:
    message = r"device 1 \(cpu\) is predicted to hold .* begin stages at other submodules"
    with pytest.raises(fxpipe.PartitionError, match=message):
        compiled(Blocks(), at=["third"], memory_limits=[None, 1000])


def test_a_limit_moves_the_wide_block_to_the_other_device() -> None:
    wide = 2 * 256 * 32 * 4  # bytes of its weights
    for limits, stage in (([1.5 * wide, None], 1), ([None, 1.5 * wide], 0)):
        with compiled(Blocks(), memory_limits=limits) as pipe:
            assert "third" in pipe.plan.stages[stage].modules
            weights = [a.target for a in pipe.plan.stages[stage].parameters]
            assert "third.0.weight" in weights


def test_limits_that_cannot_be_met_name_the_device_and_the_least() -> None:
    with pytest.raises(fxpipe.PartitionError) as raised:
        compiled(Blocks(), memory_limits=1000)
    text = str(raised.value)
    assert "device 0 (cpu)" in text or "device 1 (cpu)" in text
    assert "may take 1000 B" in text
    assert "raise memory_limits" in text
