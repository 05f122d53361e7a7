"""Figures of a run while it trains, by a clock that is set."""

from __future__ import annotations

import io
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import FlopCounterMode

import fxpipe
from fxpipe.errors import InputError
from fxpipe.pipeline import Pipeline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Run:
    """A pipe, and a loader and a clock that say how long things take."""

    def __init__(self, load: float, step: float) -> None:
        self.now, self.load, self.spends = 0.0, load, step
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def clock(self) -> float:
        return self.now

    def batches(self, count: int) -> Iterator[Tensor]:
        for _ in range(count):
            self.now += self.load
            yield torch.ones(6, 4)

    def train(self, pipe: Pipeline, watched: fxpipe.watch[Tensor]) -> None:
        for x in watched:
            pipe.step(x, target=x)
            self.now += self.spends

    def pipe(self) -> Pipeline:
        return fxpipe.compile(self.model, ["cpu"] * 2, microbatches=3, loss=mse_loss)


def test_figures_are_those_of_the_clock_and_of_pytorchs_own_counter() -> None:
    run = Run(load=1.0, step=3.0)
    with run.pipe() as pipe:
        watched = fxpipe.watch(pipe, run.batches(8), clock=run.clock, peak=1e3, show=False)
        assert watched.figures == {}
        run.train(pipe, watched)
        found = watched.figures
    with FlopCounterMode(display=False) as counter:
        run.model(torch.ones(6, 4))
    flops = 3 * counter.get_total_flops()
    assert found["samples_per_second"] == 6 / 4
    assert (found["step_seconds"], found["loader_seconds"]) == (3.0, 1.0)
    assert found["tflops"] == pytest.approx(flops / 3.0 / 1e12)
    assert found["mfu"] == pytest.approx(flops / 3.0 / 2e3)
    assert found["batches"] == 8
    assert 0 < found["busy/0"] < 1
    assert all(isinstance(value, float | int) for value in found.values())


def test_batches_come_as_they_are_and_a_loop_may_leave_some_out() -> None:
    run = Run(1.0, 1.0)
    with run.pipe() as pipe:
        given = [torch.full((6, 4), float(at)) for at in range(4)]
        watched = fxpipe.watch(pipe, given, show=False)
        assert len(watched) == 4
        for at, x in enumerate(watched):
            assert x is given[at]
            if at % 2:
                pipe.step(x, target=x)
        assert pipe.batches == 2


def test_instructions_are_timed_in_one_step_of_ten_or_in_all_once_metrics_are_read() -> None:
    run = Run(1.0, 3.0)
    with run.pipe() as pipe:
        watched, timed, seen = fxpipe.watch(pipe, run.batches(30), clock=run.clock), [], {}
        for number, x in enumerate(watched):
            if pipe._engine.meter is not None:
                timed.append(number)
            pipe.step(x, target=x)
            run.now += 3.0
            bubble = watched.figures.get("bubble")
            if bubble is not None and bubble not in seen:
                seen[bubble] = number
            if number == 25:
                assert "bubble" not in pipe.metrics
        assert timed == [0, 1, 11, 21, *range(26, 30)]  # the first one compiles
        assert [*seen.values()] == [2, 11, 21, *range(26, 30)]
        assert pipe._engine.meter is not None


def test_a_step_calls_no_function_but_the_generator_where_the_line_stays() -> None:
    run, calls = Run(1.0, 0.0), Counter[str]()

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "extensions" in file and "status_line" not in file:
            calls[frame.f_code.co_name] += 1

    with run.pipe() as pipe:
        slow = count(step=1e-9).__next__
        batches = fxpipe.watch(pipe, run.batches(80), clock=slow, stream=Terminal())
        for number, x in enumerate(batches):
            if number == 30:
                sys.setprofile(seen)
            pipe.step(x, target=x)
        sys.setprofile(None)
    assert {**calls} == {"__iter__": 50, "begin": 5, "batches": 50}


def test_tensorboard_gets_the_figures_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[tuple[str, int]] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def flush(self) -> None:
            written.append(("flushed", 0))

    monkeypatch.setattr("fxpipe.extensions.watch.watch._writer", lambda folder: Writer())
    run = Run(load=0.01, step=0.09)
    with run.pipe() as pipe:
        watched = fxpipe.watch(pipe, run.batches(13), clock=run.clock, tensorboard="runs")
        run.train(pipe, watched)
        names = [*watched.figures]
    steps = [step for name, step in written if name == "loss"]
    assert steps == [2, 7, 12, 13]  # the first one compiles; half a second is five steps
    assert [name for name, step in written if step == 13] == names
    assert written[-1] == ("flushed", 0)


@pytest.mark.parametrize(
    ("load", "steps", "told"),
    [(2.0, 9, False), (2.0, 10, True), (2.0, 44, True), (0.01, 44, False)],
)
def test_a_slow_loader_is_told_once_after_ten_steps_with_what_to_write(
    load: float, steps: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(load, step=3.0)
    with run.pipe() as pipe, caplog.at_level(logging.WARNING, "fxpipe"):
        batches = run.batches(1 + steps)  # the first one compiles
        run.train(pipe, fxpipe.watch(pipe, batches, clock=run.clock, show=False))
    lines = [r.getMessage() for r in caplog.records if "loader" in r.getMessage()]
    assert len(lines) == told
    assert all("takes 40 % of the time" in line and "num_workers" in line for line in lines)


@pytest.mark.parametrize(("steps", "told"), [(9, 0), (44, 1)])
def test_after_ten_steps_stages_are_judged_once_by_the_times_of_a_step(
    steps: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[Pipeline, dict[tuple[str, int], list[float]]]] = []
    name = "fxpipe.extensions.watch.watch.tell_shares"
    monkeypatch.setattr(name, lambda pipe, compiled, tasks: judged.append((pipe, {**tasks})))
    run = Run(0.1, 3.0)
    with run.pipe() as pipe:
        run.train(pipe, fxpipe.watch(pipe, run.batches(1 + steps), clock=run.clock, show=False))
    assert len(judged) == told
    for of, tasks in judged:
        assert of is pipe
        assert {task: len(times) for task, times in tasks.items() if task[0] in "FB"} == {
            (letter, stage): 3 for letter in "FB" for stage in range(2)
        }


def test_one_line_shows_the_run_and_is_gone_at_its_end() -> None:
    run, out = Run(1.0, 3.0), Terminal()
    with run.pipe() as pipe:
        run.train(pipe, fxpipe.watch(pipe, run.batches(5), clock=run.clock, stream=out))
    text = out.getvalue()
    assert "1.5 samples/s  3000 ms  loader 1e+03 ms" in text
    assert "\n" not in text
    assert not text.split("\r")[-2].strip()


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with Run(1.0, 1.0).pipe() as pipe:
        with pytest.raises(InputError, match="peak is 0; give the operations"):
            fxpipe.watch(pipe, [], peak=0)
        with pytest.raises(TypeError, match="has no length"):
            len(fxpipe.watch(pipe, iter([])))
