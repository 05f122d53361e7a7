"""What pipes predict of their memory, in errors and metrics too, and what a profile leaves."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.errors import EndedError, ExecutionError, InputError
from fxpipe.extensions.simulator import Sizes
from fxpipe.ir.instruction import Update
from fxpipe.ir.recipe import find_recipe
from fxpipe.runtime import interpreter
from fxpipe.runtime.interpreter import HANDLERS
from tests.extensions.copies.test_copies import standing
from tests.helpers.overlapping import ADAMW, compiled, make
from tests.helpers.own_optimizers import groups
from tests.helpers.profiles import deep
from tests.helpers.tiny import adam, batch, pipe_of, within
from tests.oracles.delayed_loop import MSE
from tests.runtime.test_faults import failing_at
from tests.runtime.test_mapped import assert_uncopied

pytestmark = pytest.mark.models


def test_copies_are_predicted_with_what_stands_on_their_devices() -> None:
    p, m = 4, 8
    model, [(x, y)] = make("mlp", 1, m)
    with compiled(model, p, m, schedule="chimera") as pipe:
        pipe.step(x, target=y)
        found = pipe.simulate()
        assert list(found.device_kept) == standing(p)
        assert all(each.parts["parameters"] for each in found.memory)
    free = {"F": 1.0, "B": 1.0, "A": 0.0, "U": 0.0}
    sizes = Sizes(parameters=dict.fromkeys(range(p), 5), saved=dict.fromkeys(range(p), 1))
    alone = find_recipe("chimera")(p, m).simulate(free, sizes=sizes)
    for memory, kept in zip(alone.memory, standing(p), strict=True):
        assert memory.parts["parameters"] == 2 * 5
        assert memory.peak == 2 * 5 + kept


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
