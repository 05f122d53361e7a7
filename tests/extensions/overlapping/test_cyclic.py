"""Cyclic data parallelism: the paper's rules, computed one micro-batch after another, and its
memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from examples.cyclic import every, kept
from fxpipe.ir.recipe import round_robin
from fxpipe.schedules import interleaved_one_f_one_b, pipedream, two_bw
from tests.oracles.delayed_loop import MSE, Factory

pytestmark = pytest.mark.smoke

STAGES = 4

FACTORIES: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}

CDP2: dict[str, Factory] = {
    "sgd": lambda p: every(torch.optim.SGD, STAGES)(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: every(torch.optim.AdamW, STAGES)(p, lr=1e-2),
}


def made(batches: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(STAGES)]
    x = torch.randn(batches, 2, 2 * STAGES, 6, dtype=torch.float64)
    return nn.Sequential(*layers).double(), [(x, y) for x, y in x]


def by_the_paper(
    model: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    factory: Factory,
    fresh: Callable[[int, int], bool],
    *,
    summed_losses: bool,
) -> dict[str, Tensor]:
    """θ(t+1) = θ(t) − update(mean over micro-batches i of ∇f_i), whose weights of stage j are θ(t)
    if ``fresh(i, j)``, else θ(t−1)."""
    model = copy.deepcopy(model)
    optimizer = factory(model.parameters())
    named = dict(model.named_parameters())
    before = now = {name: p.detach().clone() for name, p in named.items()}
    for x, y in data:
        total: dict[str, Tensor] = {}
        for i, (a, b) in enumerate(zip(x.chunk(STAGES), y.chunk(STAGES), strict=True)):
            read = {n: now[n] if fresh(i, int(n[0])) else before[n] for n in named}
            weights = {name: value.clone().requires_grad_() for name, value in read.items()}
            loss = MSE(torch.func.functional_call(model, weights, (a,)), b)
            loss = loss / STAGES if summed_losses else loss
            for name, g in zip(
                weights, torch.autograd.grad(loss, [*weights.values()]), strict=True
            ):
                total[name] = total[name] + g if name in total else g
        for name, p in named.items():
            p.grad = total[name] if summed_losses else total[name] / STAGES
        optimizer.step()
        before, now = now, {name: p.detach().clone() for name, p in named.items()}
    return now


@pytest.mark.parametrize("kind", FACTORIES)
def test_cdp_v1_reads_the_weights_of_the_batch_before(kind: str) -> None:
    model, data = made(5)
    expected = by_the_paper(model, data, FACTORIES[kind], lambda i, j: False, summed_losses=True)
    with fxpipe.compile(
        model,
        ["cpu"] * STAGES,
        schedule="2bw",
        microbatches=STAGES,
        partition=["1", "2", "3"],
        loss=MSE,
        optimizer=FACTORIES[kind],
    ) as pipe:
        for x, y in data:
            pipe.step(x, target=y)
        assert {n: t.equal(expected[n]) for n, t in pipe.state_dict().items()} == dict.fromkeys(
            expected, True
        )


@pytest.mark.parametrize("kind", FACTORIES)
def test_cdp_v2_reads_the_newest_weights_of_each_stage(kind: str) -> None:
    model, data = made(5)
    # the paper counts from 1: micro-batch i reads the newer weights of stage j if i > N - j
    expected = by_the_paper(
        model,
        data,
        FACTORIES[kind],
        lambda i, j: i + 1 > STAGES - (j + 1),
        summed_losses=False,
    )
    with fxpipe.compile(
        model,
        ["cpu"] * STAGES,
        schedule="pipedream",
        microbatches=1,
        partition=["1", "2", "3"],
        loss=MSE,
        optimizer=CDP2[kind],
    ) as pipe:
        for x, y in data:
            for a, b in zip(x.chunk(STAGES), y.chunk(STAGES), strict=True):
                pipe.step(a, target=b)
        assert {n: t.equal(expected[n]) for n, t in pipe.state_dict().items()} == dict.fromkeys(
            expected, True
        )


@pytest.mark.parametrize("workers", [1, 2, 4, 6])
def test_cyclic_workers_keep_a_constant_half_of_what_parallel_ones_keep_at_most(
    workers: int,
) -> None:
    cyclic = kept(pipedream(workers, 1), steps=3 * workers)
    at_all_times = workers * (workers + 1) // 2
    assert cyclic[:workers] == [n * (n + 1) // 2 for n in range(1, workers + 1)]
    # from when all stages work until no micro-batch is new
    assert cyclic[workers - 1 : 6 * workers] == [at_all_times] * (5 * workers + 1)
    if workers > 1:
        assert kept(two_bw(workers, workers), steps=3) == cyclic
    alone = interleaved_one_f_one_b.placed(round_robin(workers))(1, 1)
    up = [*range(1, workers + 1)]
    assert kept(alone, steps=2) == 2 * (up + up[::-1])
