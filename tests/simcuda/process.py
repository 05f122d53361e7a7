"""Call a function in a process that has simulated CUDA devices.

A server, which has imported all but has run nothing, forks a process for each call: autograd counts
the devices once, at the first backward of a process.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import pickle
import pkgutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.simcuda.building import build, missing

DEADLINE = 900.0
"""Seconds after which a process ends itself, and writes what its threads do."""

ROOT = Path(__file__).parents[2]

simulated = pytest.mark.skipif(bool(missing()), reason=missing())
"""Marks tests that need simulated devices."""


def on_devices(function: Callable[..., Any], *args: Any, devices: int = 2) -> Any:
    """Call a function of a module, given by its name there, in a process of its own.

    Args:
        function: the function; nothing that it takes or returns may be on a simulated device.
        devices: how many devices it has.

    Raises:
        AssertionError: the function raised; the text has its traceback.
    """
    return at_once(function, [args], devices)[0]


def at_once(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], devices: int
) -> list[Any]:
    """``on_devices`` with several calls, each in a process of its own, at the same time.

    Args:
        function: as there.
        calls: the arguments of each call.
        devices: as there.
    """
    with tempfile.TemporaryDirectory() as whole:
        folders = [Path(whole, str(number)) for number in range(len(calls))]
        for folder, args in zip(folders, calls, strict=True):
            folder.mkdir()
            (folder / "call").write_bytes(pickle.dumps((function, args, devices)))
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(f"{' '.join(map(str, folders))}\n")
        server.stdin.flush()
        server.stdout.readline()
        return [_result(function, folder) for folder in folders]


def _result(function: Callable[..., Any], folder: Path) -> Any:
    result, error = folder / "result", folder / "error"
    if not result.exists():
        told = error.read_text() if error.exists() else "its process did not start"
        told = told or "its process has ended"
        raise AssertionError(f"{function.__name__} on simulated devices failed:\n{told}")
    return pickle.loads(result.read_bytes())


@cache
def _server() -> subprocess.Popen[str]:
    """The server, which ends with this process."""
    build()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.simcuda.process"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait()


def _serve() -> None:
    import torch

    import fxpipe
    import tests.simcuda.cuda  # noqa: F401

    # all that the first call of a pipe would import in each process
    for module in pkgutil.walk_packages(fxpipe.__path__, "fxpipe."):
        # caches import transformers, which imports what pytest rewrites if it runs in a process
        if not module.name.endswith(("__main__", "generation.caches")):
            with suppress(ImportError):  # it needs an extension that was deleted
                import_module(module.name)
    for name in ("torch._dynamo", "torch._functorch.aot_autograd", "torch.export._trace"):
        import_module(name)
    torch.set_num_threads(1)
    gc.freeze()  # collections look at nothing that is imported
    for line in sys.stdin:
        children = []
        for folder in line.split():
            child = os.fork()
            if child == 0:
                _run(Path(folder))
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        print(flush=True)


def _run(folder: Path) -> None:
    import torch

    with open(folder / "error", "w") as errors:
        os.dup2(errors.fileno(), 1)  # the server's own output is for its answers
        os.dup2(errors.fileno(), 2)
        faulthandler.enable(errors)
        faulthandler.dump_traceback_later(DEADLINE, exit=True, file=errors)
        # with these, the CPU would compute by other kernels than the simulated devices do
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        try:
            from tests.helpers.times import equal_times
            from tests.simcuda.cuda import install

            function, args, devices = pickle.loads((folder / "call").read_bytes())
            install(devices)
            with equal_times():
                found = function(*args)
            (folder / "partial").write_bytes(pickle.dumps(found))
            (folder / "partial").rename(folder / "result")
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what is still queued on the devices would run while Python ends


if __name__ == "__main__":
    _serve()
