"""Forked processes: a pipe's threads stay behind, and nobody waits for them."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.helpers.tiny import adam, batch, pipe_of
from tests.oracles.delayed_loop import MSE


def in_child(call: Callable[[], str]) -> str:
    """What a call returns in a forked process, or the error that it raises."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it ends, if it hangs
        try:
            os.write(writes, call().encode())
        except BaseException as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_forked_process_says_where_the_pipes_threads_are(schedule: str) -> None:
    x, y = batch()
    with pipe_of(2, schedule, optimizer=adam) as pipe:
        losses = [pipe.step(x, target=y) for _ in range(3)]
        forked = "InputError: this process was forked from the one that compiled the pipe"

        def anew() -> str:
            pipe.close()
            model = copy.deepcopy(pipe._model)
            with fxpipe.compile(model, 2, microbatches=2) as other, torch.no_grad():
                return str(tuple(other(x).shape))  # autograd's threads are not here either

        assert in_child(lambda: str(pipe.step(x, target=y))).startswith(forked)
        assert in_child(lambda: str(pipe(x))).startswith(forked)
        if schedule == "1f1b":  # nothing is in flight: all is there
            assert in_child(lambda: " ".join(pipe.state_dict())) == " ".join(pipe.state_dict())
        else:
            assert in_child(lambda: str(pipe.state_dict())).startswith(forked)
        assert in_child(anew) == str((len(y), 3))
        losses.append(pipe.step(x, target=y))
    with pipe_of(2, schedule, optimizer=adam) as alone:
        assert [float(loss) for loss in losses] == [
            float(alone.step(x, target=y)) for _ in range(4)
        ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_forked_while_others_use_and_trace_pipes_waits_for_none_of_them() -> None:
    forked: list[str] = []

    class Forking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling() and not forked:
                forks.set()
                done.wait(60)
            return x + 1

    forks, done = threading.Event(), threading.Event()
    x, y = batch()
    with pipe_of(2) as pipe:
        pipe.step(x, target=y)
        names = " ".join(pipe.state_dict())
        other = fxpipe.compile(nn.Sequential(nn.Linear(4, 4), Forking()), 1, loss=MSE)
        tracing = threading.Thread(target=lambda: other.step(x, target=x))
        tracing.start()
        forks.wait(60)
        forked.append(in_child(lambda: " ".join(pipe.state_dict())))
        done.set()
        tracing.join()
        other.close()
    assert forked == [names]
