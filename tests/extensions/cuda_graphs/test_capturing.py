"""What is captured and what not, and what happens where capturing or a step fails. Skipped without
a CUDA device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import CaptureError, DeviceMemoryError, ExecutionError, InputError
from fxpipe.extensions.cuda_graphs.capturing import Capturing, obstacle, slots
from tests.extensions.cuda_graphs.captured_pipes import (
    captures,
    capturing,
    kernels,
    on_streams,
    sgd,
    train,
)
from tests.helpers.tiny import Tiny, batch, soon, within
from tests.oracles import loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# how many slots


@pytest.mark.parametrize(
    ("schedule", "recompute", "expected"),
    [
        ("gpipe", "never", (4, 4, 4)),
        ("1f1b", "never", (3, 2, 1)),
        ("zb-h1", "never", (3, 3, 3)),
        ("gpipe", "always", (1, 1, 1)),
        ("gpipe", "except_last", (2, 2, 2)),
        ("1f1b", "always", (1, 1, 1)),
        ("2bw", "never", (3, 2, 1)),
    ],
)
def test_slots_are_as_many_as_micro_batches_in_flight(
    schedule: str, recompute: Any, expected: tuple[int, ...]
) -> None:
    with capturing(Tiny(), 3, schedule=schedule, recompute=recompute, optimizer=sgd) as pipe:
        x, y = batch(8)
        pipe.prepare(x, target=y)
        assert slots(pipe.program) == expected
        assert tuple(kernel.slots for kernel in kernels(pipe)) == expected
        if schedule == "2bw":
            assert [kernel.versions for kernel in kernels(pipe)] == [2, 2, 2]


# what is not captured


class Scaled(nn.Module):
    """It multiplies by a number that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        y: Tensor = self.last(torch.relu(self.first(x))) * by
        return y


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "inputs", "options", "stages", "told"),
    [
        (dropping(), {}, {"partition": ["2"]}, [0], "draws random numbers"),
        (dropping().eval(), {}, {"partition": ["2"]}, [], ""),
        (Scaled(), {"by": torch.tensor(2)}, {"partition": ["last"]}, [1], "'by' is one whole"),
        (Scaled(), {"by": torch.tensor(2.0)}, {"partition": ["last"]}, [], ""),
        (Tiny(), {}, {"extensions": [fxpipe.LeafModules("middle")]}, [1], "as it is"),
    ],
    ids=["draws", "draws not", "whole number", "number", "leaves"],
)
def test_a_stage_that_cannot_be_captured_runs_as_it_is_and_is_told_of(
    model: nn.Module,
    inputs: dict[str, Any],
    options: dict[str, Any],
    stages: list[int],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = copy.deepcopy(model)
    plain = copy.deepcopy(model)
    with (
        within(300),
        caplog.at_level(logging.INFO, "fxpipe"),
        capturing(model, **options) as pipe,
        on_streams(plain, 2, **options) as other,
    ):
        for step in range(3):
            x, y = batch(8, step)
            torch.manual_seed(step)
            made = pipe.step(x, target=y, **inputs)
            torch.manual_seed(step)
            assert torch.equal(made, other.step(x, target=y, **inputs))
        loop.assert_same(loop.gradients(model), loop.gradients(plain))
        captured = {kernel._stage for kernel in kernels(pipe)}
    assert captured == {0, 1} - set(stages)
    said = [record.getMessage() for record in caplog.records if "uncaptured" in record.getMessage()]
    assert [text.partition(" runs uncaptured: ")[0] for text in said] == [
        f"stage {stage}" for stage in stages
    ]
    assert all(told in text for text in said)


def test_a_stage_whose_sizes_depend_on_data_is_not_captured() -> None:
    with capturing(Tiny()) as pipe:
        x, y = batch(8)
        pipe.prepare(x, target=y)
        plan = pipe.plan
        stage = plan.stages[0]
        assert obstacle(plan, stage) is None
        assert stage.kernel is not None
        graph = stage.kernel.forward_graph.graph
        with graph.inserting_before(graph.output_node()):
            last = graph.output_node().prev
            graph.call_function(torch.ops.aten.nonzero.default, (last,))
        reason = obstacle(plan, stage)
        assert reason is not None and "aten.nonzero" in reason and "wait for" in reason


# arguments


def test_they_are_refused_on_cpu_devices() -> None:
    with pytest.raises(InputError, match="the devices are CPU devices"):
        fxpipe.compile(Tiny(), ["cpu"] * 2, extensions=[fxpipe.CudaGraphs()])


@pytest.mark.parametrize("given", [[], ["cuda_graphs"], [fxpipe.CudaGraphs()]])
def test_the_extension_makes_the_kernels_captured_ones(given: list[Any]) -> None:
    with fxpipe.compile(
        Tiny(), [torch.cuda.Stream(), torch.cuda.Stream()], extensions=given
    ) as pipe:
        assert [type(wrap) for wrap in pipe._compiler._wraps] == [Capturing] * len(given)


# parameters that move


def test_an_assigned_state_dict_is_captured_anew() -> None:
    torch.manual_seed(0)
    model, other = Tiny(), Tiny()
    plain = copy.deepcopy(model)
    with (
        within(300),
        capturing(model, optimizer=sgd) as pipe,
        on_streams(plain, 2, optimizer=sgd) as twin,
    ):
        counts = []
        for step in range(6):
            if step == 3:
                for each in (model, plain):
                    for own, given in zip(each.parameters(), other.parameters(), strict=True):
                        own.data = given.detach().cuda()
            x, y = batch(8, step)
            assert torch.equal(pipe.step(x, target=y), twin.step(x, target=y))
            counts.append(captures(pipe))
        loop.assert_same(model.state_dict(), plain.state_dict())
    assert counts == [counts[0]] * 3 + [2 * counts[0]] * 3


# failures


@pytest.mark.parametrize(
    "text", ["forward   s0[2] v0 keep", "backward  s1[1] v0", "backward  s0[1] v0"]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_after_a_failure_all_slots_are_free(
    schedule: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Tiny()
    plain = copy.deepcopy(model)
    held = []
    with (
        within(300),
        capturing(model, schedule=schedule, optimizer=sgd) as pipe,
        on_streams(plain, 2, schedule=schedule, optimizer=sgd) as twin,
    ):
        for step in range(6):
            x, y = batch(8, step)
            if step in (0, 2, 3):  # with captures that are not there yet, and with those that are
                with monkeypatch.context() as patched:
                    patched.setattr(torch.cuda.nvtx, "range", Failing(text))
                    with pytest.raises(ExecutionError, match="made to fail") as raised:
                        pipe.step(x, target=y)
                held.append(raised.value)  # its traceback keeps the frames of the run
                assert all(len(kernel._free) == kernel._made for kernel in kernels(pipe))
            assert torch.equal(pipe.step(x, target=y), twin.step(x, target=y))
        assert not any(kernel.overflows for kernel in kernels(pipe))
        loop.assert_same(model.state_dict(), plain.state_dict())


class Failing:
    """A range that fails at its beginning, where it has this name."""

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())
        self.range = torch.cuda.nvtx.range

    def __call__(self, name: str) -> Any:
        if " ".join(name.split()) == self.text:
            raise RuntimeError("made to fail")
        return self.range(name)


REFUSED: dict[str, Exception] = {}
"""What ``watched`` raises in captures, in its forward or its backward."""


def _refuse(task: str) -> None:
    if task in REFUSED and torch.cuda.is_current_stream_capturing():
        raise REFUSED[task]


@torch.library.custom_op("fxpipe_tests::watched", mutates_args=())
def watched(x: Tensor) -> Tensor:
    _refuse("forward")
    return x.clone()


@torch.library.custom_op("fxpipe_tests::watched_backward", mutates_args=())
def watched_backward(x: Tensor) -> Tensor:
    _refuse("backward")
    return x.clone()


watched.register_fake(torch.empty_like)
watched_backward.register_fake(torch.empty_like)
watched.register_autograd(lambda _, gradient: watched_backward(gradient))


class Watched(nn.Module):
    """Its second stage may be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.last(torch.relu(self.first(x)))
        y: Tensor = watched(h)
        return y


@pytest.fixture
def refused() -> Iterator[dict[str, Exception]]:
    yield REFUSED
    REFUSED.clear()


@pytest.mark.parametrize("task", ["forward", "backward"])
def test_what_cannot_be_captured_is_named_with_its_stage(
    refused: dict[str, Exception], task: str
) -> None:
    torch.manual_seed(0)
    model = Watched()
    x, y = batch(8)
    with within(300), capturing(model, partition=["last"], optimizer=sgd) as pipe:
        pipe.prepare(x, target=y)
        before = copy.deepcopy(model.state_dict())
        refused[task] = torch.AcceleratorError("CUDA error: not permitted")
        with pytest.raises(ExecutionError) as raised:
            pipe.step(x, target=y)
        cause = raised.value.__cause__
        assert isinstance(cause, CaptureError)
        assert f"the {task}" in str(cause) and "of stage 1 cannot be captured" in str(cause)
        assert "CUDA error: not permitted" in str(cause) and "extension CudaGraphs" in str(cause)
        assert raised.value.stage == 1
        loop.assert_same(model.state_dict(), before)
        assert all(len(kernel._free) == kernel._made for kernel in kernels(pipe))
        refused.clear()
        assert pipe.step(x, target=y).isfinite()


def test_a_lack_of_memory_in_a_capture_is_told_as_one(refused: dict[str, Exception]) -> None:
    x, y = batch(8)
    with within(300), capturing(Watched(), partition=["last"]) as pipe:
        refused["forward"] = torch.OutOfMemoryError("no memory")
        with pytest.raises(DeviceMemoryError, match="no memory left"):
            pipe.step(x, target=y)


def test_a_loss_that_nobody_goes_back_from_frees_its_slots() -> None:
    torch.manual_seed(0)
    with within(300), capturing(Tiny()) as pipe:
        for seed in range(6):
            pipe(batch(8, seed)[0])
            # a thread may just be letting go of the call
            assert soon(lambda: all(worker.idle for worker in pipe._engine._workers))
        assert not any(kernel.overflows for kernel in kernels(pipe))


def test_small_micro_batches_train_as_without_graphs() -> None:
    torch.manual_seed(0)
    train(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), microbatches=8)
