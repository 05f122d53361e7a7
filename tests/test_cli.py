"""The command line: what it prints, writes and tells the shell."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxpipe
from fxpipe.cli import main
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.value import Edge
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe
from tests.conftest import Golden
from tests.helpers.plans import chain, plan_of

ROOT = Path(__file__).parent.parent

OWN = """
import fxpipe
from fxpipe import B, F, U


@fxpipe.schedule("own-gpipe")
def mine(device, devices, microbatches):
    yield from map(F, range(microbatches))
    yield from map(B, range(microbatches))
    yield U()


def plain(device, devices, microbatches):
    yield F(0)
    yield B(0)
    yield U()


ready = mine(2, 3)
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    yield path
    RECIPES.pop("own-gpipe", None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, what was printed and what was complained of."""
    status = main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.mark.parametrize(
    "line",
    [
        "schedule zb-h1 -p 4 -m 8",
        "schedule interleaved-1f1b -p 2 -m 4 --width 60 --no-formulas",
        "schedule 2bw -p 2 -m 2 --steps 3",
        "schedule 1f1b -p 2 -m 3 --costs F=1,B=1.5,F@1=2",
        "schedule 1f1b -p 2 -m 3 --costs F=2,B=3",
        "schedule 1f1b -p 3 -m 4 --text",
    ],
)
def test_a_schedule_is_shown(
    line: str, capsys: pytest.CaptureFixture[str], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # The output of a pipe is the same everywhere.
    status, out, err = run(capsys, *line.split())
    assert (status, err) == (0, "")
    name = re.sub(r"[^\w.]+", "_", line.replace("schedule", "cli"))
    golden(f"{name}.txt", out)


def test_a_schedule_of_its_own_numbers_has_formulas_in_times_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "gpipe.txt"
    path.write_text(str(gpipe(3, 2)))
    status, out, _ = run(capsys, "schedule", path)
    assert status == 0
    assert "makespan    = 6*T_B + T_U" in out
    assert "bubble      = 1/2" in out


def test_a_terminal_decides_how_wide_the_grid_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "50")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["schedule", "1f1b", "-p", "2", "-m", "8", "--no-formulas"]) == 0
    grid = terminal.getvalue().split("\n1f1b")[0]
    assert 40 < max(map(len, grid.splitlines())) <= 50


def test_the_list_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "list")
    assert status == 0
    assert {line.split()[0] for line in out.splitlines() if line[:1].strip()} >= set(RECIPES)
    assert "Every device runs all its forwards, then all its backwards" in out


def test_the_text_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, text, _ = run(capsys, "schedule", "zb-v", "-p", "2", "-m", "3", "--text")
    path = tmp_path / "zb-v.txt"
    path.write_text(text)
    assert run(capsys, "schedule", path, "--text") == (0, text, "")
    assert run(capsys, "verify", path) == (0, f"{path}: a valid schedule\n", "")


def test_the_grid_of_a_huge_schedule_is_left_out_by_name(
    capsys: pytest.CaptureFixture[str], own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = ["schedule", "gpipe", "-p", "2", "-m", "3"]
    _, whole, _ = run(capsys, *line)
    monkeypatch.setattr("fxpipe.cli.commands._SHOWN", 13)
    assert run(capsys, *line, "--all") == (0, whole, "")
    status, out, _ = run(capsys, *line)
    head = "gpipe: the grid and the figures of 14 tasks, more than 13, are left out; --all shows"
    assert (status, out) == (0, f"{head} them\n\n{whole[whole.index('gpipe, given') :]}")
    _, out, _ = run(capsys, "schedule", "gpipe", "-p", "2", "-m", "1", "--steps", "3")
    assert "figures of 18 tasks" in out
    status, out, _ = run(capsys, "schedule", f"{own}:plain", "-p", "2", "-m", "6")
    assert status == 1
    assert "are left out" not in out  # of 6 tasks
    monkeypatch.setattr("fxpipe.cli.commands._SHOWN", 5)
    status, out, _ = run(capsys, "schedule", f"{own}:plain", "-p", "2", "-m", "6")
    assert status == 1
    assert "stage 0 has no forward of micro-batches 1-5" in out
    trace = tmp_path / "trace.json"
    assert run(capsys, *line, "--trace", trace)[0] == 0
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_a_picture_is_written(
    ending: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / f"picture.{ending}"
    status, out, err = run(
        capsys, "schedule", "gpipe", "-p", "1", "-m", "2", "--draw", path, "--text"
    )
    assert (status, err) == (0, f"wrote {path}\n")
    assert out == str(gpipe(1, 2))
    assert path.read_bytes() == gpipe(1, 2).draw().pipe(ending)


def test_a_trace_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert run(capsys, "schedule", "gpipe", "-p", "2", "-m", "2", "--trace", path, "--text")[0] == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 10


def test_a_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install fxpipe[html]")
    path = tmp_path / "page.html"
    line = ["schedule", "gpipe", "-p", "2", "-m", "2"]
    assert run(capsys, *line, "--html", path, "--text") == (0, str(gpipe(2, 2)), f"wrote {path}\n")
    assert "<title>gpipe · fxpipe</title>" in path.read_text()
    status, _, err = run(capsys, *line, "--html", tmp_path / "nowhere" / "page.html")
    assert (status, err) == (
        2,
        f"fxpipe: {tmp_path}/nowhere/page.html: No such file or directory\n",
    )


def test_schedules_of_a_python_file(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    _, expected, _ = run(capsys, "schedule", "gpipe", "-p", "2", "-m", "3", "--text")
    for name in (f"{own}:mine", f"{own}:own-gpipe", f"{own}:ready", str(own)):
        numbers = () if name.endswith("ready") else ("-p", "2", "-m", "3")
        status, out, _ = run(capsys, "schedule", name, *numbers, "--text")
        assert (status, out) == (0, expected.replace("gpipe", "own-gpipe"))
    assert run(capsys, "verify", f"{own}:plain", "-p", "2", "-m", "1")[0] == 0


def test_a_schedule_with_faults_is_shown_with_them(
    capsys: pytest.CaptureFixture[str], own: Path, golden: Golden, tmp_path: Path
) -> None:
    line = ["schedule", f"{own}:plain", "-p", "2", "-m", "2"]
    status, out, err = run(capsys, *line)
    assert (status, err) == (1, "")
    golden("cli_faults.txt", out)
    assert run(capsys, *line, "--text")[0] == 1
    for option in ("--trace", "--html"):
        status, out, err = run(capsys, *line, option, tmp_path / "file")
        assert (status, out) == (2, "")
        assert f"has faults, and never runs to its end; leave {option} out" in err


def test_faults_are_told_and_the_shell_is_told(
    capsys: pytest.CaptureFixture[str], own: Path
) -> None:
    status, out, err = run(capsys, "verify", f"{own}:plain", "-p", "2", "-m", "2")
    assert (status, err) == (1, "")
    with pytest.raises(fxpipe.VerificationError) as caught:
        fxpipe.Recipe("plain", lambda d, p, m: [fxpipe.F(0), fxpipe.B(0), fxpipe.U()])(
            2, 2
        ).verify()
    assert out == f"{caught.value}\n"


PROGRAM = str(free(communicate(Lower(chain(2))(gpipe(2, 2)))))


@pytest.mark.parametrize(
    ("text", "sound", "message"),
    [
        (f"# mine\n\n{PROGRAM}", True, "a valid program"),
        (PROGRAM.replace("  send         act:y0:0->1[1]\n", ""), False, "never sends it"),
        (str(plan_of(1)), True, "a valid plan"),
        (str(plan_of(2, Edge(1, 0, "x"))), False, "runs backward"),
    ],
)
def test_plans_and_programs_are_checked(
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
        ("schedule 1f1b --costs Q=1", "no kind of task 'Q'"),
        ("schedule 1f1b --costs F@9=1", "is for stage 9; the stages are 0 to 3"),
        ("schedule 1f1b --costs F=-1", "at least 0"),
        ("schedule 1f1b --costs F=1e308,B=1e308", "at most 1e+100"),
        (f"schedule 1f1b --costs F={'9' * 5000}", "at most 1e+100"),
        (f"schedule 1f1b --costs F@{'9' * 5000}=1", "write a kind of task and its time"),
        ("schedule 1f1b --draw x.docx", "no format 'docx'"),
        ("schedule 1f1b --draw own.py/x.svg", "own.py: File exists"),
        ("schedule 1f1b --trace nowhere/x.json", "cannot be written"),
        ("schedule 1f1b --steps 0", "steps is 0"),
        ("schedule 1f1b --width 3", "width is 3"),
        ("schedule missing.txt", "missing.txt cannot be read"),
        ("schedule missing.py:one", "there is no file missing.py"),
        ("schedule own.py:other", "own.py has no schedule 'other': "),
        ("schedule own.py:ready -p 3", "own.py:ready is for 2 devices and not 3"),
        ("schedule raises.py", "raises.py cannot be run: ValueError: no luck (…/raises.py:2, in"),
        ("schedule syntax.py", "syntax.py cannot be run: SyntaxError: "),
        ("schedule exits.py", "exits.py cannot be run: SystemExit: 3"),
        ("schedule two.py", "two.py holds these schedules: one, two; name one"),
        ("schedule text.txt", "text.txt: line 3, column 4: there is no kind of task 'X'"),
        ("verify missing.txt", "missing.txt cannot be read"),
        ("verify other.txt", "begins with 'hello'; the text of a schedule, a plan or a program"),
        ("verify empty.txt", "begins with 'nothing'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    line: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "raises.py": "def fail():\n    raise ValueError('no luck')\n\n\nfail()\n",
        "syntax.py": "def\n",
        "exits.py": "raise SystemExit(3)\n",
        "two.py": "import fxpipe\none = fxpipe.Schedule.parse('''schedule a stages=1 "
        "microbatches=1 delay=0\nplace 0\n0: F0 B0 U\n''')\ntwo = one.parse(str(one) + '#')\n",
        "text.txt": "schedule a stages=1 microbatches=1 delay=0\nplace 0\n0: X0\n",
        "other.txt": "hello\n",
        "empty.txt": "# nothing here\n",
    }.items():
        (tmp_path / name).write_text(text)
    status, out, err = run(capsys, *line.split(" ") if line else ())
    assert (status, out) == (2, "")
    assert err.startswith("fxpipe: ")
    assert err.count("\n") == 1
    assert message in err.replace(str(tmp_path), "…")


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


def test_a_csv_is_written_shown_and_judged_by_the_rules_of_its_own_runtime(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.csv"
    line = ["schedule", "zb-h1", "-p", "2", "-m", "2", "--text"]
    status, text, err = run(capsys, *line, "--csv", path)
    assert (status, err) == (0, f"wrote {path}\n")
    assert run(capsys, "schedule", path, "--text") == (0, text.replace("zb-h1", "own"), "")
    what = "a valid CSV of torch.distributed.pipelining in the format compute_only"
    valid = f"{what}, 2 ranks, 2 stages, 2 micro-batches\n"
    assert run(capsys, "verify", path) == (0, f"{path}: {valid}", "")
    for text, status, told in (
        (path.read_text(), 0, f"-: {valid}"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", 1, "row 1, column 2, 0B0: deadlock"),
        ("0F0,0B0\n1F0,1B0,1B0\n", 1, "row 2, column 3, 1B0: it is there already"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        found, out, err = run(capsys, "verify", "-")
        assert (found, err) == (status, "")
        assert told in out
    path.write_text("hello\n")
    status, _, err = run(capsys, "verify", path)
    assert (status, "own.csv: line 1, column 1: expected an action" in err) == (2, True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("[[{'type': 'F', 'stage': 0, 'minibatch': 0}]]"))
    assert run(capsys, "verify", "-") == (0, "-: a valid schedule\n", "")
    status, _, err = run(capsys, "schedule", "2bw", "--csv", path)
    assert (status, "cannot be written as the CSV" in err) == (2, True)
    assert path.read_text() == "hello\n"


@pytest.mark.parametrize("line", ["verify a\0b", "schedule a\0b", "schedule gpipe --draw a\0.svg"])
def test_no_name_of_a_file_holds_a_nul(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *line.split(" "))
    assert (status, out) == (2, "")
    assert "an argument holds a NUL character" in err


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
    assert {"compare", "list", "schedule", "verify"} <= set(capsys.readouterr().out.split())


SEARCH = ("search", "-p", "3", "-m", "4", "--costs", "F=1,I=2,W=1,F@2=2", "--work", "60")


def test_a_schedule_is_searched_and_stands_beside_the_library(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    csv, picture = tmp_path / "found.csv", tmp_path / "found.svg"
    status, out, err = run(capsys, *SEARCH, "--memory", "3", "--csv", csv, "--draw", picture)
    assert status == 0
    assert err == f"wrote {picture}\nwrote {csv}\n"
    grid, words, table, _ = out.split("\n\n")
    assert grid.count("\n") == 3
    assert re.match(r"a step takes [0-9.]+; none takes less than [0-9.]+ \(", words)
    times = {line.split()[0]: float(line.split()[1]) for line in table.splitlines()[2:]}
    assert min(times.values()) == times["search"]
    assert {"1f1b", "zb-h1"} < set(times)
    assert run(capsys, "verify", csv)[0] == 0
    assert "<svg" in picture.read_text()


def test_the_text_of_a_searched_schedule_is_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, text, _ = run(
        capsys, *SEARCH, "--placement", "v", "--memory", "9,9,9", "--keeps", "F=1,W=1", "--text"
    )
    assert status == 0
    schedule = fxpipe.Schedule.parse(text).verify()
    assert schedule.placement == fxpipe.vee(3)
    status, text, _ = run(capsys, *SEARCH, "--no-flush", "--latency", "0.5", "--text")
    assert fxpipe.Schedule.parse(text).delay == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "0.5"], "one micro-batch takes 1"),
        (["--memory", "much"], "--memory is 'much'"),
        (["--keeps", "F=1"], "give --memory, too"),
        (["--memory", "4", "--keeps", "B=1"], "--keeps has 'B'"),
        (["--placement", "w"], "write each, v, or loop=2"),
    ],
)
def test_a_search_for_something_impossible_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *SEARCH, *arguments)
    assert (status, out) == (2, "")
    assert says in err


def test_the_version_is_that_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"fxpipe {fxpipe.__version__}\n")


def test_schedules_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "all.svg"
    given = ("compare", "-p", "3", "-m", "6", "--costs", "F=1,B=2", "--memory", "3")
    status, out, err = run(capsys, *given, "--draw", picture)
    assert (status, err) == (0, f"wrote {picture}\n")
    assert out.startswith("3 devices, 6 micro-batches, stages cut evenly\n")
    (best,) = (line for line in out.splitlines() if "best with at most 3" in line)
    assert best.split()[0] == "zb-v"
    assert "<svg" in picture.read_text()
    status, _, err = run(capsys, "compare", "--costs", "F@1=2")
    assert (status, err.count("leave out the stage: F=2")) == (2, 1)
