"""Training that torchrun starts again after a rank has died ends as if none had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import train_ranks
from fxpipe.extensions.checkpoint import folder as checkpoint_folder
from tests.helpers.checkpoints import same

ROOT = Path(__file__).parents[3]

DYING = """
import os, signal, sys
from examples import train_ranks
batch = train_ranks.batch
def dying(number):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if number == 5 and first and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(number)
train_ranks.batch = dying
train_ranks.train(sys.argv[1], 8, 2, train_ranks.mesh_of())
"""


@pytest.mark.deep
def test_a_run_whose_rank_was_killed_ends_with_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node=2", "--max-restarts=1"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    made = subprocess.run(
        [*torchrun, *options, str(tmp_path / "dying.py"), str(tmp_path / "killed")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    assert "exitcode: -9" in made.stderr
    train_ranks.train(str(tmp_path / "whole"), 8, 2, 1)
    assert made.stdout.splitlines() == capsys.readouterr().out.splitlines()
    killed, whole = (checkpoint_folder.read(tmp_path / name) for name in ("killed", "whole"))
    assert same(killed.parameters, whole.parameters)
    assert killed.optimizer is not None and whole.optimizer is not None
    for name, own in whole.optimizer.parameters.items():
        assert same(killed.optimizer.parameters[name].state, own.state), name
