"""Type checkers know what extensions give to fxpipe, and tell a misspelt name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import fxpipe
from tests.helpers.profiles import deep

pytest.importorskip("basedpyright")

SCRIPT = """\
import torch
from torch import nn

import fxpipe

model, loss = nn.Linear(2, 2), nn.functional.mse_loss
pipe = fxpipe.compile(model, 1, loss=loss, extensions=[fxpipe.Offload()])
pipe.save("run", shared=True)
found = pipe.profile(torch.ones(2, 2), target=torch.ones(2, 2), steps=2)
makespan: float = found.makespan
pipe.plan.draw()
fxpipe.schedules.gpipe(2, 2).simulate({"F": 1.0}).draw()
fxpipe.Offlod()  # wrong
pipe.simulat()  # wrong
pipe.save(3)  # wrong
pipe.profile(torch.ones(2), steps="many")  # wrong
pipe.plan.draw(width=3)  # wrong
fxpipe.schedules.gpipe(2, 2).simulate(cost=1)  # wrong
"""
CHECKERS = {
    "pyright": ("basedpyright", "--level", "error"),
    "mypy": ("mypy", "--config-file=", "--no-incremental", "--follow-imports=silent"),
}


@pytest.mark.parametrize("checker", ["pyright", *deep("mypy")])
def test_type_checkers_tell_each_misspelt_name_and_wrong_argument_and_nothing_else(
    checker: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    wrong = {at for at, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")}
    assert faults(CHECKERS[checker], script) == wrong


def faults(command: Sequence[str], script: Path) -> set[int]:
    """The lines of a script at which a type checker finds errors."""
    run = [sys.executable, "-m", *command, str(script)]
    root = Path(fxpipe.__file__).parents[1]
    made = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=root)
    lines = [line.strip() for line in made.stdout.splitlines() if "error:" in line]
    assert lines, made.stderr
    return {int(line.partition("script.py:")[2].split(":")[0]) for line in lines}
