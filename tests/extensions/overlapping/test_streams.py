"""Batches that overlap on devices with streams, under adversarial delays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fxpipe.extensions.overlapping.versions import VersionedWeights
from tests.extensions.streams.test_stream_machine import RUNS, Case, made
from tests.helpers.profiles import deep
from tests.oracles import loop
from tests.oracles.stream_machine import StreamMachine

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("devices", [*deep(2), 3])
def test_two_versions_of_weights_train_as_the_delayed_loop(devices: int) -> None:
    """W(t+1) = W(t) − ν·∇f(W(t−1)), with batches that overlap over four steps and the flush."""
    case = made("2bw", devices, steps=4, updates=True)
    assert case.program.depth == 1
    newest = copy.deepcopy(case.model)
    read = copy.deepcopy(case.model)
    for micro in case.batches:
        before = copy.deepcopy(newest)
        loop.clear(read)
        x, y = micro.batch.leaves
        loop.train(read, 4, x, loss=nn.functional.mse_loss, target=y)
        with torch.no_grad():
            for p, q in zip(newest.parameters(), read.parameters(), strict=True):
                assert q.grad is not None
                p.add_(q.grad, alpha=-0.1)
        read = before
    start = copy.deepcopy(case.model.state_dict())
    for seed in (None, *range(RUNS)):
        case.model.load_state_dict(start)
        trained(case, seed, in_turn=seed == 0)
        expected = dict(newest.named_parameters())
        loop.assert_same(dict(case.model.named_parameters()), expected)


def trained(case: Case, seed: int | None, in_turn: bool) -> None:
    stages = case.compiled.plan.stages
    state = dict(case.model.named_parameters())
    own = [{a.target: state[a.target] for a in stage.parameters} for stage in stages]
    optimizers = [torch.optim.SGD(mine.values(), lr=0.1) if mine else None for mine in own]
    weights = VersionedWeights(own, optimizers, case.compiled.schedule.delays)
    weights.open(stages, case.state, changed=bool(weights.written))
    for batch in range(len(case.batches)):
        weights.expect(batch)
    jobs = case.jobs()
    StreamMachine(case.program, stages, jobs, weights, case.layouts, seed, in_turn).run()
