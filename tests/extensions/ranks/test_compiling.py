"""What ranks decide alike, and what one needs of memory while it compiles: enough for its own
stages."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import fxpipe
from examples import larger
from fxpipe.compiler import options
from fxpipe.errors import VerificationError
from fxpipe.extend import Extension
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.kernels.kernel import ForwardResult
from fxpipe.passes.runner import VERIFIERS, Pass
from fxpipe.torchtools import allocator
from tests.helpers.ranks import DeviceMesh, on_ranks

RANKS = 4


def layers(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))


def weights_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def compiled(mesh: DeviceMesh, model: nn.Module, width: int) -> fxpipe.Pipeline:
    x = torch.ones(8, width)
    example = (x,), {"target": x}
    return fxpipe.compile(model, mesh, microbatches=4, loss=F.mse_loss, example=example)


def most_while_compiling(mesh: DeviceMesh, whole: int) -> tuple[int, int]:
    """The bytes of the tensors that were alive at once, besides the model, and its weights. Up to
    the size ``whole`` a model is compared with its plan."""
    options.WHOLE = whole
    model = layers(width=128, count=32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compiled(mesh, model, width=128).close()
    results = profiler.profiler.kineto_results
    found = (each for each in results.events() if each.name() == "[memory]")
    alive = most = 0
    for _, size in sorted((each.start_ns(), each.nbytes()) for each in found):
        alive += size
        most = max(most, alive)
    return most, weights_of(model)


def test_compiling_a_model_with_data_takes_memory_for_gradients_on_the_first_rank_alone() -> None:
    """The model's gradients of a stage, the compiled ones, and copies of a tensor or two."""
    (first, weights), *others = on_ranks(RANKS, most_while_compiling, options.WHOLE)
    both = 2 * weights / RANKS
    assert both < first <= both + 0.2 * weights  # it compares the plan with the model
    assert all(most <= 0.1 * weights for most, _ in others)


def test_compiling_a_large_model_takes_memory_for_a_few_layers() -> None:
    """The gradients of its own stages have no room before those that only others run are away."""
    for most, weights in on_ranks(RANKS, most_while_compiling, 0):
        assert most <= 0.5 * weights / RANKS


def compile_within(mesh: DeviceMesh, share: float) -> float:
    """Compile where a part of the weights of the model, which has no data, would find room."""
    compiled(mesh, layers(width=8, count=4), width=8).close()  # imports are no part of the limit
    with torch.device("meta"):
        model = layers(width=2048, count=24)
    gc.collect()
    allocator.give_back()  # freed memory would find room within any limit
    larger.limit_memory(int(share * weights_of(model)))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(int(1.1 * share * weights_of(model)), dtype=torch.uint8)
    with compiled(mesh, model, width=2048) as pipe:
        return sum(1.0 for _ in pipe.plan.stages)


def test_a_model_without_data_is_compiled_in_less_memory_than_a_rank_trains_it_in() -> None:
    assert on_ranks(2, compile_within, 0.6) == [2.0, 2.0]


class Hiding(nn.Module):
    """Multiplies by a trained tensor that it hides in a list, so that no graph can train it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hidden = [torch.ones(4, requires_grad=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x) * self.hidden[0])
        return y


def refused(mesh: DeviceMesh) -> tuple[str, str]:
    x = torch.ones(4, 4)
    with fxpipe.compile(
        Hiding(), mesh, microbatches=2, loss=F.mse_loss, partition=["last"]
    ) as pipe:
        with pytest.raises((fxpipe.TraceError, fxpipe.RankError)) as raised:
            pipe.step(x, target=x)
        return type(raised.value).__name__, str(raised.value)


def test_a_model_that_its_plan_does_not_equal_is_refused_on_all_ranks() -> None:
    (kind, text), (other, told) = on_ranks(2, refused)
    assert kind == "TraceError" and "requires a gradient and is no parameter" in text
    assert other == "RankError" and told.startswith("rank 0 ") and text in told


class Spoils(Extension):
    """What compiles stages, and on the last rank makes a kernel that computes something else."""

    def __init__(self, spoils: bool) -> None:
        self.spoils = spoils

    def __repr__(self) -> str:
        return "Spoils()"

    def passes(self, options: Any) -> dict[str, list[tuple[str, Pass]]]:
        return {"compile": [("", Pass(self.spoiled, "plan", "plan"))]}

    def spoiled(self, plan: Plan) -> Plan:
        kernel: Any = plan.stages[-1].kernel
        original = kernel.forward

        def forward(*args: Any) -> ForwardResult:
            made: ForwardResult = original(*args)
            return made._replace(outputs=[output + 1 for output in made.outputs])

        if self.spoils:
            kernel.forward = forward
        return plan


def refused_as_compiled(mesh: DeviceMesh) -> str:
    x, extensions = torch.ones(4, 8), [Spoils(mesh.get_local_rank() == 1)]
    with fxpipe.compile(
        layers(8, 2), mesh, microbatches=2, loss=F.mse_loss, partition=["1"], extensions=extensions
    ) as pipe:
        with pytest.raises((fxpipe.TraceError, fxpipe.RankError)) as raised:
            pipe.step(x, target=x)
        return type(raised.value).__name__


def test_what_a_rank_compiles_for_itself_it_compares_itself() -> None:
    assert on_ranks(2, refused_as_compiled) == ["RankError", "TraceError"]


def proofs(mesh: DeviceMesh, faulty: bool) -> tuple[int, str]:
    """How many programs a rank has verified, and what it raises."""
    count, told = 0, ""

    def verify(program: Program) -> None:
        nonlocal count
        count += 1
        if faulty:
            raise VerificationError("the program", [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VERIFIERS, Program, ("program", verify))
        try:
            compiled(mesh, layers(8, 2), width=8).close()
        except (fxpipe.PassError, fxpipe.RankError) as error:
            told = f"{type(error).__name__}: {error}"
    return count, told


@pytest.mark.parametrize("faulty", [False, True])
def test_one_rank_proves_the_program_that_all_run(faulty: bool) -> None:
    (first, own), (second, told) = on_ranks(2, proofs, faulty)
    assert first > 0 == second
    if faulty:
        assert own.startswith("PassError: ") and "the program has 0 faults" in own
        assert told.startswith("RankError: rank 0 ") and own in told
    else:
        assert own == told == ""
