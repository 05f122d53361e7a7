"""Compiling tells its passes: to the logger "fxpipe", and with verbose=True on standard error."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import InputError, PartitionError, log
from fxpipe.compiler.passes import LISTS
from fxpipe.log import Listener, listening, telling

X = torch.randn(8, 4)
PASSES = ["export", "functionalise", "measure", "balance", "cut", "differentiate", "check"]
PASSES += ["verify traced graph", "verify plan", "lower", "communicate", "free"]
PASSES += ["verify schedule", "verify program"]

pytestmark = pytest.mark.traces


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What the logger is told, however slow the machine is."""
    monkeypatch.setattr(log, "PATIENCE", 1e6)
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
    options = {"loss": mse_loss, "dispatch": "device", **options}  # who runs the lists is not told
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


def test_verbose_prints_each_pass_its_time_and_the_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pipe(verbose=True) as made:
        made.step(X, target=X)
        out, shown = capsys.readouterr()
        lines = shown.splitlines()
        assert lines[0] == "compiling Sequential for a step of 8 samples"
        found = [re.fullmatch(r"  (\S.*?) +([\d.]+) ms", line) for line in lines[1:]]
        assert all(found) and not out
        times = [(match[1], float(match[2])) for match in found if match]
        assert set(PASSES) <= {name for name, _ in times}
        assert times[-1][0] == "in all"
        assert times[-1][1] >= max(time for _, time in times[:-1])
        made.step(X, target=X)
        assert capsys.readouterr() == ("", "")


def test_a_compilation_that_fails_ends_where_it_failed(
    capsys: pytest.CaptureFixture[str], records: list[logging.LogRecord]
) -> None:

    made = fxpipe.compile(nn.Linear(4, 4), ["cpu"] * 9, loss=mse_loss, verbose=True)
    with made, pytest.raises(PartitionError):
        made.step(X, target=X)
    assert "in all" not in capsys.readouterr().err
    *_, last, whole = records  # the last one has the traceback, which the error leaves out
    assert last.__dict__["fxpipe_pass"] == "spread" and whole.exc_info is not None
    assert all(record.levelno == logging.DEBUG for record in records)


def test_only_the_innermost_listener_is_told_and_the_outer_one_again_after_it() -> None:
    told: list[tuple[str, str]] = []

    class Ear(Listener):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def begins(self, name: str) -> None:
            told.append((self.name, f"begins {name}"))

        def ends(self, name: str, seconds: float) -> None:
            assert seconds >= 0
            told.append((self.name, f"ends {name}"))

        def notes(self, text: str) -> None:
            told.append((self.name, text))

    with listening(Ear("outer")):
        with listening(Ear("inner")), telling("one"):
            pass
        with pytest.raises(ValueError), telling("two"):
            raise ValueError
    with telling("three"):
        pass
    assert told == [("inner", "begins one"), ("inner", "ends one"), ("outer", "begins two")]


def test_what_is_no_flag_is_refused() -> None:
    with pytest.raises(InputError, match="verbose"):
        pipe(verbose="yes")
