"""Memory limits: what a pipe is predicted to hold keeps them, or it is refused."""

from __future__ import annotations

import math
import re
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
from fxpipe.compiler.placement import MemoryBudget
from fxpipe.extensions.exact_cut.solve import solve
from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.ir.recipe import find_recipe
from fxpipe.passes.partition.options import Partition, arrival_peaks, stash_peaks
from fxpipe.passes.partition.work import Load, Machine, Transfer, Work
from fxpipe.passes.schedule import add_recompute
from fxpipe.text.schedule import parse_schedule
from tests.helpers.profiles import deep

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
        (layers, "gpipe", PLAIN, "never"),
        (layers, "2bw", MOMENTUM, "never"),
        (unet, "1f1b", ADAM, "always"),
        (unet, "zb-h1", PLAIN, "never"),
        (transformer, "interleaved-1f1b", MOMENTUM, "never"),
        *deep(
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
        (unet, ["ups"], PLAIN),
        *deep((layers, ["5"], PLAIN), (transformer, ["blocks.1"], ADAM)),
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
        verdict = pipe._compiler.verdict
    assert verdict is not None
    counted = verdict.loads[0].memory  # for training, without what the stage's graphs add
    assert counted < needed[0]
    with (
        pipe_within(counted - 1) as pipe,
        torch.no_grad(),
        pytest.raises(fxpipe.PartitionError, match=r"stage 0 .*needs at least"),
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


def test_what_is_reserved_is_left_free() -> None:
    work = Work((1.0,) * 4, (5,) * 4, (0,) * 4, tuple(Transfer(i, (i + 1,), 0) for i in range(3)))
    machine = Machine((1.0, 1.0), (13.0, math.inf), (1, 1), reserved=(4, 0))
    found = solve(work, machine)
    assert found is not None
    assert found.division.stage_of == (0, 1, 1, 1)
    assert [load.memory for load in found.division.loads] == [9, 15]


def test_what_is_recomputed_is_saved_for_one_micro_batch() -> None:
    plain = find_recipe("gpipe")(2, 4)
    again = add_recompute(plain, ["always", "never"])
    assert stash_peaks(again) == (1, 4)
    assert arrival_peaks(again) == stash_peaks(plain) == (4, 4)
    partly = parse_schedule(
        "schedule mine stages=1 microbatches=3 delay=0\nplace 0\n0: F0 F1 F2 B2 R1 B1 R0 B0 U\n"
    )
    assert stash_peaks(partly) == (1,)
    assert arrival_peaks(partly) == (3,)


def test_what_is_stored_elsewhere_is_held_for_three_micro_batches() -> None:
    """One is fetched while one is stored and one computed."""
    again = add_recompute(find_recipe("gpipe")(2, 6), ["always", "never"])
    assert (stash_peaks(again), arrival_peaks(again)) == ((1, 6), (6, 6))
    stored = add_offload(again, "always")
    assert (stash_peaks(stored), arrival_peaks(stored)) == ((1, 3), (3, 3))


def loads(*memory: float) -> list[Load]:
    return [Load(memory=each) for each in memory]


def test_what_was_predicted_beyond_the_count_is_left_free_by_the_next_cut() -> None:
    machine = Machine((1.0,) * 3, (50.0, 100.0, 50.0), (1,) * 3, names=("a", "b", "a"))
    budget = MemoryBudget((0, 1, 0), machine)
    assert not budget.kept
    assert budget.machine.rooms == (50, 100, 50)
    # device 0 is counted to hold 80 and predicted to hold 111, device 1 30 and 25
    assert not budget.keeps(loads(50, 30, 30), [111, 25])
    assert budget.machine.reserved == (16, 0, 16)  # 31 for its two stages, rounded up
    # the cut after it leaves that free: 60 + 32 are counted, and 90 are held
    assert budget.keeps(loads(46, 40, 46), [90, 40])
    assert budget.kept


def test_a_cut_that_never_keeps_its_limits_is_refused_in_the_end() -> None:
    budget = MemoryBudget((0,), Machine((1.0,), (100.0,), (1,), names=("cpu",)))
    with pytest.raises(fxpipe.PartitionError, match="cpu is predicted to hold 101 B in a step"):
        for _ in range(100):
            assert not budget.keeps(loads(90), [101])


def test_a_cut_that_only_its_count_forbids_is_predicted_once() -> None:
    """The count may be too high; where the prediction is over the limit too, it was not."""
    machine = Machine((1.0,), (100.0,), (1,), names=("cpu",))
    budget = MemoryBudget((0,), machine)
    assert budget.nearest
    assert not budget.keeps(loads(130), [120])
    assert not budget.nearest
    assert budget.machine.rooms == (110,)  # what was counted was 10 too much
    assert MemoryBudget((0,), machine).keeps(loads(130), [95])


@pytest.mark.parametrize(
    ("make", "schedule", "part", "cures"),
    [
        (unet, "gpipe", 0.9, {"recompute", "schedule"}),
        (transformer, "zb-h2", 0.95, {"schedule", "microbatches"}),
        (layers, "1f1b", 0.2, set()),
        *deep((unet, "1f1b", 0.8, {"microbatches"})),
    ],
)
def test_what_a_refusal_proposes_is_enough(
    make: Any, schedule: str, part: float, cures: set[str]
) -> None:
    at = {unet: ["ups"], transformer: ["blocks.1"], layers: ["5"]}[make]
    options = {"schedule": schedule, "optimizer": PLAIN}
    limits = [part * peak for peak in peaks(make, at=at, **options)]
    with pytest.raises(fxpipe.PartitionError) as refused:
        peaks(make, limits, at, **options)
    text = str(refused.value)
    proposed = dict(re.findall(r'(recompute|schedule|microbatches)="?([\w-]+)', text))
    assert cures == proposed.keys()
    for option, value in proposed.items():
        given = {option: int(value) if value.isdecimal() else value}
        found = peaks(make, limits, at, **{**options, **given})
        assert all(peak <= limit for peak, limit in zip(found, limits, strict=True))
    if not proposed:
        assert "no recompute, offload, schedule or number of micro-batches is" in text
