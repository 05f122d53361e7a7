"""What ranks decide alike where one stores more quickly than the others."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler.placement import Placement
from fxpipe.extensions.planner import stages
from fxpipe.extensions.simulator.costs import Times
from fxpipe.ir.plan import Plan
from tests.extensions.ranks.test_compiling import layers
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.works import timed_alike
from tests.oracles.loop import train


def decided(mesh: DeviceMesh) -> tuple[str, set[str], bool]:
    """What is taken within nine tenths of what ZB-H1 holds, where the first rank alone stores what
    stages keep in no time; and whether its gradients are those of the loop."""

    def times(plan: Plan) -> Times:
        each = {"F": 4.0, "R": 4.0, "B": 4.0, "I": 2.0, "W": 2.0}
        count = len(plan.stages)
        return {(x, s): time / count for x, time in each.items() for s in range(count)}

    rates = (1e9, 1e9) if mesh.get_rank() == 0 else (1.0, 1.0)
    patched: Any = stages
    patched.measured_costs, patched.away_rates = times, lambda place: rates
    cuts: Any = Placement
    cuts._timed = timed_alike
    torch.manual_seed(0)
    model, x = layers(width=16, count=8), torch.randn(256, 16)
    alone = copy.deepcopy(model)
    options: Any = {"microbatches": 4, "loss": F.mse_loss}
    with fxpipe.compile(model, mesh, schedule="zb-h1", **options) as pipe:
        pipe.prepare(x, target=x)
        most = int(0.9 * max(memory.peak for memory in pipe.simulate().memory))
    with fxpipe.compile(model, mesh, schedule="auto", memory_limits=most, **options) as pipe:
        pipe.step(x, target=x)
        train(alone, 4, x, loss=F.mse_loss, target=x)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        found = [(a.grad, b.grad) for a, b in pairs if a.grad is not None]
        equal = [b is not None and torch.equal(a, b) for a, b in found]
        assert equal
        return pipe.schedule.name, {*pipe.schedule.kinds}, all(equal)


def test_all_ranks_decide_to_offload_where_the_first_one_stores_quickly() -> None:
    first, second = on_ranks(2, decided)
    assert first == second and first[2] and "O" in first[1]
