"""Compiling tells its passes to the logger "fxpipe"."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import PartitionError
from fxpipe.compiler.passes import LISTS

X = torch.randn(8, 4)
PASSES = ["capture", "measure", "balance", "cut", "divide"]
PASSES += ["verify plan", "lower", "communicate", "free"]
PASSES += ["verify schedule", "verify program"]

pytestmark = pytest.mark.traces


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What the logger is told."""
    told: list[logging.LogRecord] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record)

    logger, ear = logging.getLogger("fxpipe"), Ear()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(ear)
    yield told
    logger.removeHandler(ear)
    logger.setLevel(level)


def pipe(**options: object) -> fxpipe.Pipeline:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    options = {"loss": mse_loss, **options}  # who runs the lists is not told
    return fxpipe.compile(model, ["cpu"] * 2, microbatches=2, **options)  # type: ignore[arg-type]


def test_the_logger_is_told_of_each_pass_with_its_seconds(
    records: list[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    with pipe() as made:
        made.step(X, target=X)
        passes = [record for record in records if record.levelno == logging.DEBUG]
        names = [record.__dict__["fxpipe_pass"] for record in passes]
        assert set(PASSES) <= set(names)
        whole, cut = (index for index, name in enumerate(names) if name == "cut")
        assert whole < names.index("measure") < names.index("balance") < cut
        listed = {each.name for passes in LISTS.values() for each in passes}
        listed |= {"check", "look_at_loss"}  # of extensions
        assert {name for name in names if not name.startswith("verify ")} <= listed
        (told,) = [record for record in records if record.levelno == logging.INFO]
        said = re.fullmatch(
            r"compiled Sequential for a step of 8 samples in ([\d.]+) s", told.getMessage()
        )
        assert said is not None
        seconds = [record.__dict__["fxpipe_seconds"] for record in passes]
        assert 0 < max(seconds) <= float(said[1]) + 1e-3
        records.clear()
        made.step(X, target=X)
        assert not records  # there is nothing left to compile
    assert capsys.readouterr() == ("", "")


def test_a_compilation_that_fails_ends_where_it_failed(
    records: list[logging.LogRecord],
) -> None:
    made = fxpipe.compile(nn.Linear(4, 4), ["cpu"] * 9, loss=mse_loss)
    with made, pytest.raises(PartitionError):
        made.step(X, target=X)
    *_, last, whole = records  # the last one has the traceback, which the error leaves out
    assert last.__dict__["fxpipe_pass"] == "measure" and whole.exc_info is not None
    assert all(record.levelno == logging.DEBUG for record in records)


def test_the_lines_that_the_page_gives_print_each_pass_with_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a new process
    logger = logging.getLogger("fxpipe")
    before = logger.level
    logging.basicConfig()
    logger.setLevel("DEBUG")
    try:
        with fxpipe.compile(nn.Linear(4, 4), ["cpu"]) as made:
            made(torch.ones(2, 4))
    finally:
        logger.setLevel(before)
    told = capsys.readouterr().err.splitlines()
    found = [re.fullmatch(r"DEBUG:fxpipe:(.+) took [\d.]+ s", line) for line in told]
    names = {match[1] for match in found if match}
    assert {"capture", "cut", "lower", "verify program"} <= names
