"""Where a given schedule keeps no memory limit, the error names what "auto" takes instead."""

from __future__ import annotations

import logging
import re
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
from torch.nn.functional import mse_loss
from torch.optim import Adam

import fxpipe
from fxpipe import extend
from fxpipe.extend import _REGISTRY
from fxpipe.extensions.planner.auto import AutoCompiler, auto_schedule
from fxpipe.extensions.planner.stages import FAMILIES
from tests.extensions.planner.test_auto import batch, layers
from tests.helpers.profiles import DEEP, deep

X, Y = batch(64 if DEEP else 16)


def pipe_of(**options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(layers(), ["cpu"] * 2, loss=mse_loss, optimizer=Adam, **options)


def peaks(**options: Any) -> list[int]:
    """Device → the bytes that it is predicted to hold at most in a step that was trained."""
    with pipe_of(**options) as pipe:
        pipe.step(X, target=Y)
        return [memory.peak for memory in pipe.simulate().memory]


def refused(**options: Any) -> str:
    with pipe_of(**options) as pipe, pytest.raises(fxpipe.PartitionError) as raised:
        pipe.step(X, target=Y)
    return str(raised.value)


NOTHING_FITS: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "memory_limits": 1000}


@cache
def why_nothing_fits() -> str:
    return refused(**NOTHING_FITS)


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({"schedule": "gpipe", "microbatches": 2}, 0.9),
        ({"schedule": "1f1b", "microbatches": 1, "partition": ["4"]}, 0.85 if DEEP else 0.9),
        *deep(
            ({"schedule": "gpipe", "microbatches": 8}, 0.8),
            ({"schedule": "2bw", "microbatches": 4}, 0.7),
            ({"schedule": "gpipe", "microbatches": 2, "extensions": [fxpipe.Offload()]}, 0.7),
            ({"schedule": "interleaved-1f1b", "microbatches": 4}, 0.8),
        ),
    ],
)
def test_what_the_error_names_fits_and_is_what_auto_takes(
    given: dict[str, Any],
    share: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [int(share * max(peaks(**given)))] * 2
    text = refused(**given, memory_limits=limits)
    told = re.search(r"fastest that is predicted to keep them is ((.*) \(.*, predicted\))", text)
    assert told is not None, text
    named = {key: given[key] for key in ("partition",) if key in given}
    written = eval(f"dict({told[2]})", {"fxpipe": fxpipe})
    found = peaks(**named, **written, memory_limits=limits)
    assert all(peak <= limit for peak, limit in zip(found, limits, strict=True))
    if given["schedule"] != "interleaved-1f1b":  # else the stages of "auto" begin as others
        one = partial(auto_schedule, families=FAMILIES[:1])
        monkeypatch.setitem(_REGISTRY["schedule"], "auto", one)
        with caplog.at_level(logging.INFO, "fxpipe"):
            peaks(**named, schedule="auto", memory_limits=limits)
        assert f'schedule="auto" takes {told[1]}' in caplog.messages


def test_where_nothing_fits_the_error_says_what_would() -> None:
    text = why_nothing_fits()
    assert 'nothing that schedule="auto" tries keeps them either' in text
    told = re.search(r"memory_limits=\[(.*?)\] is predicted to be enough, with (.*); or", text)
    assert told is not None
    limits = [int(each) for each in told[1].split(", ")]
    found = peaks(**eval(f"dict({told[2]})", {"fxpipe": fxpipe}), memory_limits=limits)
    assert all(peak <= limit for peak, limit in zip(found, limits, strict=True))


def test_other_errors_of_a_cut_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoCompiler, "best", None)
    assert "names 2 cuts" in refused(partition=["2", "4"], memory_limits=1 << 30)


def test_without_the_planner_the_error_names_no_schedule() -> None:
    with_it = why_nothing_fits()
    known = {n: t for n, t in extend._REGISTRY["part"].items() if n != "fitting"}
    with patch.dict(extend._REGISTRY["part"], known, clear=True):
        assert with_it.startswith(f"{refused(**NOTHING_FITS)}; ")
