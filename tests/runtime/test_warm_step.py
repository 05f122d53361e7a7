"""What a step of something that is compiled already goes through: little of the library."""

from __future__ import annotations

import inspect
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.kernels.graph import GraphKernel
from fxpipe.runtime.backend import Worker
from fxpipe.runtime.batch import Batch, MicroBatches
from fxpipe.runtime.host import BatchHost, Job
from tests.helpers.tiny import batch, pipe_of

ROOT = Path(fxpipe.__file__).parent.parent

BATCH = Batch | MicroBatches | BatchHost | Job
"""The forms that a batch takes on its way, after that of the step's arguments."""


class Entered:
    """The files of the library whose functions are called, as long as ``on``.

    Attributes:
        files: all of them.
        way: the folders of the functions that are given the batch, one after another.
        x: the batch's only input.
    """

    def __init__(self, x: Tensor) -> None:
        self.on = False
        self.files: set[str] = set()
        self.way: list[str] = []
        self.x = x

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if self.on and event == "call" and path.is_relative_to(ROOT):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("fxpipe/", "passes/", "schedules/")):
                self.files.add(name)
                folder = name.rpartition("/")[0]
                if self._is_given(frame) and self.way[-1:] != [folder]:
                    self.way.append(folder)

    def _is_given(self, frame: FrameType) -> bool:
        given = inspect.getargvalues(frame)
        values = [given.locals[name] for name in given.args if name != "self"]
        values += [given.locals.get(given.varargs or "")]
        tuples = [each for value in values if isinstance(value, tuple) for each in value]
        return any(isinstance(v, BATCH) for v in values) or any(v is self.x for v in tuples)

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Threads that are started inside are watched as well."""
        before = threading.getprofile(), sys.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(before[0])
            sys.setprofile(before[1])


@pytest.mark.parametrize("dispatch", ["device", "thread"])
def test_a_step_like_an_earlier_one_goes_straight_through(dispatch: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    entered = Entered(x)

    def compiled() -> fxpipe.Pipeline:
        return fxpipe.compile(
            nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)),
            ["cpu"] * 2,
            microbatches=4,
            partition=["2"],
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            extensions=[fxpipe.Dispatch(dispatch)],
        )

    with compiled() as pipe:  # its trace is remembered, as no profiler slows it down
        pipe.prepare(x, target=y)
    with entered.profiling(), compiled() as pipe:
        for _ in range(2):  # the first one compiles, and is compared with the joined outputs
            pipe.step(x, target=y)
        entered.on = True
        pipe.step(x, target=y)
        entered.on = False
    assert "fxpipe/runtime/interpreter.py" in entered.files
    assert "fxpipe/kernels/graph.py" in entered.files
    assert len(entered.files) <= 26, sorted(entered.files)
    returns = [folder for i, folder in enumerate(entered.way) if folder in entered.way[:i]]
    assert entered.way[0] == "fxpipe" and len(returns) <= 2, entered.way


def test_the_documented_calls_lead_from_a_step_to_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (told,) = re.findall(r"to a graph these are eight calls:(.*?)own\.", page, re.S)
    ways: list[list[str]] = []

    def recorded(function: Any) -> Any:
        def record(*args: Any) -> Any:
            frames = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
            ways.append([code.co_qualname for code in frames if "/fxpipe/" in code.co_filename])
            return function(*args)

        return record

    x, y = batch()
    with pipe_of(2, "1f1b") as pipe:
        pipe.step(x, target=y)
        monkeypatch.setattr(Worker, "submit", recorded(Worker.submit))
        for stage in pipe.plan.stages:
            graph = cast(GraphKernel, stage.kernel).forward_graph
            monkeypatch.setattr(graph, "forward", recorded(graph.forward))
        pipe.step(x, target=y)
    here, there = ways[0], ways[-1]
    here = here[: here.index("Pipeline.step")]
    way = [*reversed(here), *reversed(there[: there.index("_work")])]
    assert way == re.findall("`(.*?)`", told)
