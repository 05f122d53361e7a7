"""The commands: what they check, refuse and tell the shell, and how they are started."""

from __future__ import annotations

import importlib
import io
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fxpipe
from fxpipe.extensions.cli import main
from fxpipe.ir.recipe import RECIPES
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe
from tests.extensions.cli.command_line import run
from tests.extensions.cli.conftest import PLAIN
from tests.helpers.plans import chain

ROOT = Path(__file__).parents[3]


@pytest.mark.smoke
def test_the_list_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "list")
    assert status == 0
    told = [line.partition("  ")[0] for line in out.splitlines()]
    assert {*told} >= {*RECIPES}
    assert "Every device runs all its forwards, then all its backwards" in " ".join(out.split())


def test_faults_are_told_and_the_shell_is_told(
    capsys: pytest.CaptureFixture[str], faulty: Path
) -> None:
    status, out, err = run(capsys, "verify", faulty)
    assert (status, err) == (1, "")
    with pytest.raises(fxpipe.VerificationError) as caught:
        PLAIN.verify()
    assert out == f"{caught.value}\n"


PROGRAM = str(free(communicate(Lower(chain(2))(gpipe(2, 2)))))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "sound", "message"),
    [
        (f"# mine\n\n{PROGRAM}", True, "a valid program"),
        (PROGRAM.replace("  send         act:y0:0->1[1]\n", ""), False, "never sends it"),
    ],
)
def test_programs_are_checked(
    text: str, sound: bool, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text)
    status, out, err = run(capsys, "verify", path)
    assert (status, err) == (0 if sound else 1, "")
    assert message in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND; see 'fxpipe --help'"),
        ("draw", "invalid choice: 'draw'"),
        ("schedule", "required: SCHEDULE; see 'fxpipe schedule --help'"),
        ("schedule 1f2b", "there is no schedule '1f2b': did you mean '1f1b'"),
        ("schedule 1f1b -p four", "invalid int value: 'four'"),
        ("schedule 1f1b -p 0", "devices is 0; a schedule needs at least 1"),
        ("schedule 1f1b --costs F", "--costs has 'F'; write a kind of task and its time"),
        ("schedule 1f1b --costs F@1=1,F@01=2", "--costs has 'F@01=2' after another time of it"),
        ("schedule 1f1b --costs F1=1", "or of micro-batch 0 there, F0@3=2"),
        ("schedule 1f1b --costs F8@1=1", "the micro-batches are 0 to 7"),
        ("schedule 1f1b --costs Q=1", "no kind of task 'Q'"),
        ("schedule 1f1b --costs F@9=1", "is for stage 9; the stages are 0 to 3"),
        ("schedule 1f1b --costs F=-1", "at least 0"),
        ("schedule 1f1b --costs F=1e308,B=1e308", "at most 1e+100"),
        (f"schedule 1f1b --costs F={'9' * 5000}", "at most 1e+100"),
        (f"schedule 1f1b --costs F@{'9' * 5000}=1", "write a kind of task and its time"),
        ("schedule 1f1b --draw x.docx", "no format 'docx'"),
        ("schedule 1f1b --draw faulty.txt/x.svg", "faulty.txt: File exists"),
        ("schedule 1f1b --steps 0", "steps is 0"),
        ("schedule 1f1b --width 3", "width is 3"),
        ("schedule missing.txt", "missing.txt cannot be read"),
        ("schedule faulty.txt -p 3", "faulty.txt is for 2 devices and not 3"),
        ("schedule text.txt", "text.txt: line 3, column 4: there is no kind of task 'X'"),
        ("schedule zeros.txt", "expected 'schedule', as in"),
        ("verify missing.txt", "missing.txt cannot be read"),
        (
            "verify other.txt",
            "begins with 'hello'; give a text that begins with 'schedule'",
        ),
        ("verify empty.txt", "empty.txt is empty; give a text"),
    ],
)
def test_what_cannot_be_done_is_told_in_lines_that_fit_and_by_exit_code_2(
    line: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    faulty: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "text.txt": "schedule a stages=1 microbatches=1 delay=0\nplace 0\n0: X0\n",
        "other.txt": "hello\n",
        "empty.txt": "# nothing here\n",
        "zeros.txt": "\0" * 100_000,
    }.items():
        (tmp_path / name).write_text(text)
    status, out, err = run(capsys, *line.split(" ") if line else ())
    assert (status, out) == (2, "")
    assert err.startswith("fxpipe: ")
    assert all(len(line) <= 80 or " " not in line.strip() for line in err.splitlines())
    assert len(err) < 1000
    assert message in " ".join(err.split()).replace(str(tmp_path), "…")


def test_a_text_is_read_once_and_may_be_piped_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = str(gpipe(2, 2))
    for command, told in (("verify -", "-: a valid schedule\n"), ("schedule - --text", text)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert run(capsys, *command.split()) == (0, told, "")
    there, here = os.pipe()
    os.write(here, text.encode())
    os.close(here)
    pipe = f"/dev/fd/{there}"
    assert run(capsys, "verify", pipe) == (0, f"{pipe}: a valid schedule\n", "")
    os.close(there)


def test_a_file_may_begin_with_a_byte_order_mark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    schedule = gpipe(2, 2)
    (tmp_path / "own.txt").write_text(str(schedule), encoding="utf-8-sig")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + str(schedule)))
    for path in (tmp_path / "own.txt", "-"):
        assert run(capsys, "schedule", path, "--text") == (0, str(schedule), "")


def test_the_module_and_the_console_script_are_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["fxpipe"].partition(":")
    assert getattr(importlib.import_module(module), function) is main
    monkeypatch.setattr(sys, "argv", ["fxpipe", "schedule", "1f1b", "-p", "0"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fxpipe", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "fxpipe: devices is 0; a schedule needs at least 1\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("line", ["list > /dev/full", "schedule 1f1b --text > /dev/full"])
def test_a_full_disk_is_one_line_and_exit_code_2(line: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m fxpipe {line}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    message = "fxpipe: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize(
    ("line", "status", "err"),
    [
        ("list >&-", 0, ""),
        (
            "schedule 1f1b --draw /dev/null/x.svg >&-",
            2,
            "fxpipe: /dev/null: File exists\n",
        ),
        ("verify - <&-", 2, "fxpipe: nothing is piped in; name a text file\n"),
        (
            "schedule odd.txt",
            2,
            "fxpipe: the output: 'ascii' codec can't encode character '\\U0001f600' in position 1: "
            "ordinal not in range(128); set PYTHONIOENCODING=utf-8\n",
        ),
    ],
)
def test_closed_and_narrow_streams_are_told(
    line: str, status: int, err: str, tmp_path: Path
) -> None:
    text = 'schedule "\U0001f600" stages=1 microbatches=1 delay=0\nplace 0\n0: F0 B0 U\n'
    (tmp_path / "odd.txt").write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m fxpipe {line}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, err)


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m fxpipe schedule gpipe -p 32 -m 128 --text | head -c 10"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("schedule g", "")


def test_help_tells_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert {"list", "schedule", "verify"} <= set(capsys.readouterr().out.split())


def test_the_version_is_that_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"fxpipe {fxpipe.__version__}\n")
