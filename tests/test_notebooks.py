"""The notebooks run, and what is committed of their outputs is what they give.

Figures differ from run to run, so outputs are compared by kind: text, picture or table. Whatever
must hold exactly is asserted inside the notebooks. ``--update-golden`` writes the new outputs.

What a reader sees takes many steps, and what a test looks at takes few: it trains less, and all
kernels but one are forked from a process that has imported fxpipe, save for a deep run. Jupyter is
imported by the tests that run a notebook alone: it is slow to import.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.profiles import DEEP
from tests.helpers.ranks import CONTEXT

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BRIEF = {
    "01_quickstart": {"for _ in range(160):": "for _ in range(2):"},
    "02_reading_schedules": {
        "torch.randn(2048, 512), torch.randint(10, (2048,))": (
            "torch.randn(128, 512), torch.randint(10, (128,))"
        ),
    },
    "04_two_buffered_weights": {
        "size=2048": "size=128",
        "STEPS = 120": "STEPS = 32",
        "for _ in range(5):": "for _ in range(1):",
    },
    "05_from_torchgpipe": {"for _ in range(6):": "for _ in range(2):"},
}
"""Notebook → what its lines are in a test."""


FRESH = "03_write_your_own"
"""The notebook whose kernel imports fxpipe in a test, too."""


def kernel(command: list[str], folder: str, ready: Connection) -> None:
    """Runs a kernel in this process."""
    from ipykernel.kernelapp import IPKernelApp

    from fxpipe import extend

    # a busy machine would show the line of a long compilation
    extend.find("part", "showing").__wrapped__.__globals__["AFTER"] = 600.0
    # with less work a stage may be measured as the slowest, as others run beside it
    logging.getLogger("fxpipe").addFilter(
        lambda record: "times the mean" not in record.getMessage()
    )
    os.setsid()
    ready.send(None)
    os.chdir(folder)
    IPKernelApp.launch_instance(argv=command[command.index("-f") :])


class Forked:
    """A kernel in a process that begins with fxpipe imported; looks like one of subprocess."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], cwd: str, **_: Any) -> None:
        here, there = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=kernel, args=(command, cwd, there))
        self._process.start()
        here.recv()  # signals for its group are not for this one
        self.pid = self._process.pid
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def poll(self) -> int | None:
        """Its exit status, once it has one."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """The same after it has ended."""
        self._process.join(timeout)
        return self.poll()


def executed(book: Any, brief: Mapping[str, str], folder: Path, fresh_process: bool) -> Any:
    """A copy with the outputs of a fresh kernel in a folder, with some lines replaced."""
    import nbformat
    from jupyter_client.provisioning import local_provisioner
    from nbclient import NotebookClient

    fresh = nbformat.from_dict(copy.deepcopy(book))
    for line, instead in brief.items():
        (cell,) = (cell for cell in fresh.cells if line in cell.source)
        cell.source = cell.source.replace(line, instead)
    client = NotebookClient(
        fresh,
        kernel_name="python3",
        timeout=240,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    with pytest.MonkeyPatch.context() as patch:
        if not fresh_process:
            patch.setattr(local_provisioner, "launch_kernel", Forked)
        client.execute()
    return fresh


def kinds(cell: Any) -> list[str]:
    """What a cell shows: the streams it prints to, the types of what it displays."""
    found = [
        output.name if output.output_type == "stream" else " ".join(sorted(output.data))
        for output in cell.get("outputs", [])
    ]
    return [kind for kind, _ in groupby(found)]


def test_all_notebooks_are_here() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "01_quickstart",
        "02_reading_schedules",
        "03_write_your_own",
        "04_two_buffered_weights",
        "05_from_torchgpipe",
        "06_where_memory_goes",
    ]


@pytest.mark.pages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_committed(
    path: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("skimage")
    import nbformat

    committed = nbformat.read(path, as_version=4)
    update = bool(request.config.getoption("--update-golden"))
    whole = update or DEEP
    brief = {} if whole else BRIEF.get(path.stem, {})
    fresh = executed(committed, brief, tmp_path, whole or path.stem == FRESH)
    outputs = [output for cell in fresh.cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    if update:
        nbformat.write(fresh, path)
        return
    assert path.stat().st_size < 800_000
    for before, now in zip(committed.cells, fresh.cells, strict=True):
        assert kinds(before) == kinds(now), before.source
        assert before.get("execution_count") == now.get("execution_count")
