"""Runs a function on several ranks: processes of this machine that torch.distributed connects."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.helpers.remembered import remembering
from tests.helpers.times import equal_times

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.extensions.ranks.forked"])

DEADLINE = 240.0
"""Seconds after which ranks that hang are ended, and their stacks are shown."""


class Failed(Exception):
    """A rank raised: its error, as text with the traceback."""


def on_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    replicas: int | None = None,
) -> list[Any]:
    """Call ``function(mesh, *args)`` on each rank, and return rank → result. The mesh has the
    dimension "pp", or with a number of replicas "dp" and "pp".

    Raises:
        Failed: a rank raised, or was still running at the deadline.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            start(rank, size, folder, function, *args, timeout=timeout, replicas=replicas)
            for rank in range(size)
        ]
        try:
            for process in ranks:
                process.join(DEADLINE)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [result_of(folder, rank) for rank in range(size)]


def start(
    rank: int,
    size: int,
    folder: str,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    replicas: int | None = None,
) -> Any:
    """Start a rank; ``result_of`` has its result when it has ended."""
    own = rank, size, folder, served(), function, args, timeout, replicas
    process = CONTEXT.Process(target=_run, args=own)
    process.start()
    return process


@cache
def served() -> int:
    """The port of a store in this process, which outlives the ranks, as under torchrun."""
    _stores.append(_tcp("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    port: int = _stores[0].port
    return port


def store_of(port: int, folder: str) -> Any:
    """The store of the ranks that share a folder, in a process of its own."""
    whole = _tcp("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(folder, whole)  # type: ignore[attr-defined]


_stores: list[Any] = []
_tcp: Any = dist.TCPStore  # type: ignore[attr-defined]


def result_of(folder: str, rank: int) -> Any:
    """What the function returned on a rank. Raises Failed if it raised or did not end."""
    errors = Path(folder, f"error-{rank}")
    if errors.exists() and errors.stat().st_size:
        raise Failed(f"rank {rank}:\n{errors.read_text()}")
    found = Path(folder, f"result-{rank}")
    if not found.exists():
        raise Failed(f"rank {rank} was ended")
    return torch.load(found, weights_only=False)


_folders: list[Path] = []


def shared_folder() -> Path:
    """A folder of all ranks that ``on_ranks`` has started, which goes with them."""
    return _folders[-1]


def _run(
    rank: int,
    size: int,
    folder: str,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    replicas: int | None,
) -> None:
    _folders.append(Path(folder))
    with open(Path(folder, f"error-{rank}"), "w") as errors:
        faulthandler.dump_traceback_later(DEADLINE - 20, file=errors)
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            dist.init_process_group(
                "gloo",
                store=store_of(port, folder),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
            shape = (size,) if replicas is None else (replicas, size // replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp")[-len(shape) :])
            with remembering(), equal_times():
                torch.save(function(mesh, *args), Path(folder, f"result-{rank}"))
        except BaseException:
            traceback.print_exc(file=errors)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
            # as at the end of a script, which multiprocessing's processes leave out: who has failed
            # stays until the others have heard of it
            atexit._run_exitfuncs()


__all__ = ["CONTEXT", "DeviceMesh", "Failed", "on_ranks", "result_of", "shared_folder", "start"]
