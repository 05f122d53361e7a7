"""What pipes predict of their memory, in errors and metrics too, and what a profile leaves."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import fxpipe
from fxpipe import DeviceMemoryError
from fxpipe.errors import EndedError, ExecutionError, InputError
from fxpipe.extensions.simulator import Sizes
from fxpipe.ir.instruction import Update
from fxpipe.ir.recipe import find_recipe
from fxpipe.runtime import interpreter
from fxpipe.runtime.failure import DeviceMemory
from fxpipe.runtime.interpreter import HANDLERS
from tests.extensions.copies.test_copies import standing
from tests.helpers.eager_lanes import launched
from tests.helpers.overlapping import ADAMW, compiled, make
from tests.helpers.own_optimizers import groups
from tests.helpers.profiles import deep
from tests.helpers.tiny import Tiny, adam, batch, pipe_of, within
from tests.oracles.delayed_loop import MSE
from tests.runtime.test_failures import FAILS, FAILS_BACK
from tests.runtime.test_faults import failing_at
from tests.runtime.test_mapped import assert_uncopied
from tests.runtime.test_out_of_memory import Taking, lacking, trained

pytestmark = pytest.mark.models


def test_copies_are_predicted_with_what_stands_on_their_devices() -> None:
    p, m = 4, 8
    model, [(x, y)] = make("mlp", 1, m)
    with compiled(model, p, m, schedule="chimera") as pipe:
        pipe.step(x, target=y)
        found = pipe.simulate()
        assert list(found.device_stash) == standing(p)
        assert all(each.parts["parameters"] for each in found.memory)
    free = {"F": 1.0, "B": 1.0, "A": 0.0, "U": 0.0}
    sizes = Sizes(parameters=dict.fromkeys(range(p), 5), saved=dict.fromkeys(range(p), 1))
    alone = find_recipe("chimera")(p, m).simulate(free, sizes=sizes)
    for memory, stash in zip(alone.memory, standing(p), strict=True):
        assert memory.parts["parameters"] == 2 * 5
        assert memory.peak == 2 * 5 + stash


@pytest.mark.parametrize("dispatch", ["device", "thread"])
def test_a_device_with_streams_that_lacks_memory_says_what_was_predicted(dispatch: Any) -> None:
    torch.manual_seed(0)
    pipe, backend = launched(Tiny(), 3, dispatch)
    x, y = batch(8)
    with pipe, within(60):
        pipe.step(x, target=y)
        backend.lanes[1].lacks = "backward s1[1] v0"
        with pytest.raises(DeviceMemoryError) as caught:
            pipe.step(x, target=y)
        predicted = pipe.simulate().memory[1].peak
        assert caught.value.predicted == predicted
        assert f"({predicted} bytes) were predicted at the device's peak" in str(caught.value)


@pytest.mark.parametrize("order", [FAILS, FAILS_BACK], ids=["CPU", "CUDA"])
@pytest.mark.parametrize("schedule", [*deep("1f1b"), "2bw"])
def test_without_memory_the_prediction_is_named(schedule: str, order: float) -> None:
    with trained(schedule) as (pipe, x, y):
        predicted = pipe.simulate().memory[1].peak
        error = lacking(pipe, x, y, order)
        assert error.predicted == predicted
        assert f"({predicted} bytes) were predicted at the device's peak, and " in str(error)
        assert "for the 2 devices that share it" in str(error)


def test_without_memory_in_the_first_step_there_is_a_prediction_too() -> None:
    x, y = batch()
    with fxpipe.compile(
        Taking(), ["cpu"] * 2, microbatches=3, partition=["second"], loss=functional.cross_entropy
    ) as pipe:
        pipe.prepare(x, target=y)
        x[5, 3] = FAILS
        with pytest.raises(DeviceMemoryError) as raised:
            pipe.step(x, target=y)
        assert raised.value.predicted


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as in tests/runtime/test_mapped")
@pytest.mark.parametrize("name", [*deep("weights.pt"), "weights.safetensors"])
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "zb-h1"}, {"extensions": [fxpipe.LeafModules("1")]}]
)
def test_a_prediction_copies_no_mapped_weights(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    assert_uncopied(tmp_path, options, name, lambda pipe: pipe.simulate())


def test_metrics_have_the_predicted_peaks_and_a_profile_leaves_them() -> None:
    model, data = make("mlp", 3, 4)
    with compiled(model, 2, 3, ADAMW, schedule="1f1b", clip_norm=1e9) as pipe:
        for x, y in data:
            pipe.step(x, target=y)
            found = pipe.metrics
            peaks = [each.peak for each in pipe.simulate().memory]
            assert [found["peak_memory/0"], found["peak_memory/1"]] == peaks
        pipe.profile(data[0][0], target=data[0][1])
        pipe.eval()
        pipe(data[0][0])
        assert "loss" in pipe.metrics


def test_memory_is_predicted_for_every_form_alike() -> None:
    model, [(x, y)] = make("mlp", 1, 4)

    def peaks(given: Any) -> list[float]:
        limits = fxpipe.Partition(at=["2"], memory_limits=2**30)
        with fxpipe.compile(
            copy.deepcopy(model) if callable(given) else model,
            2,
            microbatches=3,
            loss=MSE,
            optimizer=given,
            partition=limits,
        ) as pipe:
            pipe.prepare(x, target=y)
            return [device.peak for device in pipe.simulate().memory]

    own = peaks(lambda parameters: torch.optim.AdamW(groups(parameters), lr=1e-2))
    assert (
        peaks(lambda named_parameters: torch.optim.AdamW(groups([p for _, p in named_parameters])))
        == own
    )
    assert peaks(torch.optim.AdamW(groups(model.parameters()))) == own


def test_a_pipe_that_has_ended_refuses_to_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    with pipe_of(2, optimizer=adam) as pipe:
        pipe.step(x, target=y)
        own = pipe.program.lists[1]
        at = next(at for at, each in enumerate(own) if isinstance(each, Update))
        monkeypatch.setattr(interpreter, "HANDLERS", failing_at(1, at, after=True))
        with within(1), pytest.raises(ExecutionError):
            pipe.step(x, target=y)
        monkeypatch.setattr(interpreter, "HANDLERS", HANDLERS)
        with pytest.raises(EndedError, match=r"restore\(\) or load\(\)"):
            pipe.profile(x, target=y)


def test_a_profile_without_gradients_is_refused() -> None:
    x, y = batch()
    with pipe_of(2) as pipe, torch.no_grad():
        pipe.prepare(x, target=y)
        with pytest.raises(InputError, match=r"gradients, which torch\.no_grad\(\) turns off"):
            pipe.profile(x, target=y)
        assert not any(parameter.grad is not None for parameter in pipe.parameters())


def test_devices_that_share_memory_are_predicted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    pipe, backend = launched(Tiny(), 3)
    monkeypatch.setattr(backend, "memory", lambda device: DeviceMemory("fake", 1, 2))
    backend.lanes[0].lacks = "forward s0[0] v0 keep"
    x, y = batch(8)
    with pipe, within(60), pytest.raises(DeviceMemoryError, match="for the 3 devices that share"):
        pipe.step(x, target=y)
