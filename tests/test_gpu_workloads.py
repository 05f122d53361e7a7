"""The models of the GPU benchmarks, and how they are divided for peers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.gpu import ablation
from benchmarks.gpu.peer import Peer
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.workloads import NAMES, balance, begins, fair, layers, workload
from benchmarks.models.amoebanet import AmoebaNetD
from benchmarks.models.gpt2 import GPT2
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet

DRY = Setting(True, torch.device("cpu"), Path(), 0.0, 1)


def test_models_have_as_many_parameters_as_the_papers_say() -> None:
    with torch.device("meta"):
        models = UNet(5, 64), AmoebaNetD(18, 256), GPT2(), ResNet()
    counts = [sum(p.numel() for p in model.parameters()) / 1e6 for model in models]
    assert [round(count, 1) for count in counts] == [232.7, 122.5, 124.4, 44.5]


@pytest.mark.parametrize("name", NAMES)
def test_torchgpipe_trains_the_same_model(name: str) -> None:
    pytest.importorskip("torchgpipe")
    work = workload(name, DRY)
    torch.manual_seed(0)
    model, other = work.model(), work.model()
    other.load_state_dict(model.state_dict())
    x, y = work.draw(4)
    lengths = balance(model, x, 2, DRY.synchronize)
    sgd = torch.optim.SGD
    peer = Peer(other, work.loss, lambda p: sgd(p, 1e-3), lengths, DRY.devices(2), 1, "never")
    torch.testing.assert_close(peer.step(x, y), work.loss(model(x), y).detach())


@pytest.mark.parametrize("name", NAMES)
def test_layers_run_in_their_order(name: str) -> None:
    model = workload(name, DRY).model()
    seen: list[str] = []
    for layer in layers(model):
        model.get_submodule(layer).register_forward_pre_hook(
            lambda *_, layer=layer: seen.append(layer)
        )
    model(workload(name, DRY).draw(2)[0])
    assert seen == layers(model)


def test_a_fair_division_has_the_least_slowest_part() -> None:
    dice = random.Random(0)
    for _ in range(50):
        costs = [dice.random() for _ in range(dice.randrange(1, 9))]
        parts = dice.randrange(1, len(costs) + 1)
        lengths = fair(costs, parts)
        assert len(lengths) == parts and sum(lengths) == len(costs) and min(lengths) > 0
        ends = itertools.combinations(range(1, len(costs)), parts - 1)
        assert _slowest(costs, lengths) == min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs))))
            for cut in ends
        )


def _slowest(costs: Sequence[float], lengths: Sequence[int]) -> float:
    edges = [0, *itertools.accumulate(lengths)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))


def test_skips_that_are_handed_on_cross_one_stage_at_a_time() -> None:
    torch.manual_seed(0)
    model = UNet(1, 4, depth=2, dropout=0.0)
    cuts = begins(layers(model), [1, 2, 3])
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8)
    expected = mse_loss(model(x), y).detach()
    with fxpipe.compile(
        ablation.Carrying(model, cuts),
        ["cpu"] * 3,
        microbatches=1,
        loss=mse_loss,
        partition=[f"unet.{cut}" for cut in cuts],
    ) as pipe:
        torch.testing.assert_close(pipe.step(x, target=y), expected)
        inner = [e for e in pipe.plan.gradients if min(e.source, e.target) >= 0]
        assert len(inner) > 2 and all(e.source - e.target == 1 for e in inner)
