"""Programs with streams under adversarial delays: their numbers are those of the plain loop."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.compiler.compiled import Compiled, Kind
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir.instruction import Receive, Recompute
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.runtime.batch import Batch, MicroBatches
from fxpipe.runtime.host import BatchHost, Job
from fxpipe.runtime.weights.live import LiveWeights
from tests.helpers.mutants import launch_mutants
from tests.helpers.profiles import DEEP, deep
from tests.oracles import loop
from tests.oracles.stream_machine import StreamMachine
from tests.oracles.stream_memory import Layout
from tests.oracles.stream_ordering import Ordering
from tests.oracles.stream_queues import WrongOrder

pytestmark = pytest.mark.models

CUTS = {2: ["layers.3"], 3: ["layers.2", "layers.4"], 4: ["layers.1", "layers.3", "layers.5"]}
"""Stages → where they begin: measured times may divide differently each time."""

RUNS = 250 if DEEP else 2
"""Runs of each case, each with delays of its own: thousands in a deep run."""


class Skipping(nn.Module):
    """What the first layer makes goes on to the last one too, and one layer has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        first = h = torch.relu(self.layers[0](x))
        for layer in self.layers[1:5]:
            h = torch.tanh(layer(h)) + h
        y: Tensor = self.layers[5](self.norm(h) + first)
        return y


@dataclass
class Case:
    """A compiled model, and how to run it on the stream machine.

    Attributes:
        model: the model.
        compiled: its plan, kernels and program.
        program: the program with streams.
        batches: step → the batch.
        layouts: how all values lie in memory, once a run without a seed has found it.
    """

    model: nn.Module
    compiled: Compiled
    program: Program
    batches: list[MicroBatches]
    layouts: dict[tuple[int, Buffer], Layout] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        found.update(self.model.named_buffers())
        found.update(self.compiled.traced.constants)
        return found

    def jobs(self) -> dict[int, Job]:
        traced = self.compiled.traced
        assert traced.loss is not None
        jobs = {}
        for step, micro in enumerate(self.batches):
            host = BatchHost(traced, micro, frozenset({traced.loss}), 0)
            host.weigh_loss(torch.float32)
            jobs[step] = Job(self.compiled.kernels, host)
        return jobs


def made(
    schedule: str, devices: int, *, steps: int = 1, updates: bool = False, recompute: Any = "never"
) -> Case:
    """A case with its data; the plan is that of an ordinary pipe."""
    torch.manual_seed(0)
    stages = 2 * devices if schedule in ("interleaved-1f1b", "zb-v") else devices
    model = Skipping()
    optimizer = (lambda p: torch.optim.SGD(p, lr=0.1)) if updates else None
    with fxpipe.compile(
        model,
        ["cpu"] * devices,
        schedule=schedule,
        microbatches=4,
        loss=nn.functional.mse_loss,
        partition=CUTS[stages],
        optimizer=optimizer,
        recompute=recompute,
    ) as pipe:
        batches = [
            Batch.of(model, (torch.randn(8, 6),), {}, (torch.randn(8, 6),), {}).in_parts(4)
            for _ in range(steps)
        ]
        compiled = pipe._compiler.compile(batches[0], Kind("step", updates))
    program = Streams()(compiled.program).verify()
    return Case(model, compiled, program, batches)


def gradients(
    case: Case, program: Program, seed: int | None, in_turn: bool = False, threads: bool = True
) -> tuple[dict[str, Any], Any]:
    """One step's gradients, by name, and the loss."""
    stages = case.compiled.plan.stages
    weights = LiveWeights(stages, case.state, [None] * len(stages), onto_grad=False)
    jobs = case.jobs()
    machine = StreamMachine(program, stages, jobs, weights, case.layouts, seed, in_turn, threads)
    ran = machine.run()
    found = {
        argument.target: gradient
        for stage in stages
        for argument, gradient in zip(stage.parameters, ran.gradients[stage.index, 0], strict=True)
    }
    host = jobs[0].host
    assert isinstance(host, BatchHost)
    return found | ran.state, host.loss()


def looped(case: Case) -> tuple[dict[str, Tensor | None], Tensor]:
    """The same in the plain loop: gradients, statistics and the loss."""
    alone = copy.deepcopy(case.model)
    x, y = case.batches[0].batch.leaves
    ran = loop.train(alone, 4, x, loss=nn.functional.mse_loss, target=y)
    return {**loop.gradients(alone), **dict(alone.named_buffers())}, ran.loss


CASES = [
    *deep(("gpipe", 3, "never"), ("interleaved-1f1b", 2, "never"), ("zb-h1", 3, "never")),
    ("1f1b", 3, "never"),
    ("zb-v", 2, "never"),
    *deep(("1f1b", 3, "always")),
    ("gpipe", 2, "except_last"),
]


@pytest.mark.parametrize(("schedule", "devices", "recompute"), CASES)
def test_gradients_are_the_loops_whatever_takes_how_long(
    schedule: str, devices: int, recompute: str
) -> None:
    case = made(schedule, devices, recompute=recompute)
    expected, loss = looped(case)
    own = [x for each in case.program.lists for x in each]
    assert any(isinstance(x, Recompute) for x in own) == (recompute != "never")
    assert devices < 3 or any(isinstance(x, Receive) and x.buffer.kind == "skip" for x in own)
    runs = [(seed, threads) for seed in range(RUNS) for threads in (True, False)]
    for seed, threads in [(None, False), *runs]:
        in_turn = seed is not None and seed % 2 == 0  # one host thread, or one a device
        found, made_loss = gradients(case, case.program, seed, in_turn, threads)
        wanted = {name: expected[name] for name in found}
        assert set(found) >= {name for name, _ in case.model.named_parameters()}
        loop.assert_same(found, wanted)
        assert torch.equal(made_loss, loss)


def test_a_missing_wait_shows_as_wrong_numbers() -> None:
    """Of the mutants that leave a pair unordered and can be launched, most orders find most."""
    case = made("1f1b", 3)
    expected, _ = looped(case)
    gradients(case, case.program, None)  # for the layouts
    mutants = [mutant for edit, mutant in launch_mutants(case.program) if edit == "drop a wait"]
    racing = [mutant for mutant in mutants if any(True for _ in Ordering(mutant, 1).races())]
    chosen = racing if DEEP else racing[::40]
    found = [any(_wrong(case, mutant, expected, seed) for seed in range(40)) for mutant in chosen]
    assert len(racing) > 100
    assert sum(found) > len(found) / 2


def _wrong(case: Case, program: Program, expected: dict[str, Any], seed: int) -> bool:
    try:
        made_, _ = gradients(case, program, seed, threads=False)
    except WrongOrder:
        return True
    return any(g is None or not torch.equal(g, expected[name]) for name, g in made_.items())


def test_streams_that_all_wait_for_nothing_compute_nonsense() -> None:
    case = made("gpipe", 3)
    expected, _ = looped(case)
    gradients(case, case.program, None)
    blind = tuple(
        tuple(replace(launch, waits=()) for launch in own) for own in case.program.launches
    )
    program = replace(case.program, launches=blind)
    assert all(_wrong(case, program, expected, seed) for seed in range(3))
