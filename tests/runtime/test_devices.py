"""Devices and their threads: how many there are, how long they live, what they take."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fxpipe
from fxpipe import InputError
from fxpipe.ir.instruction import every_opcode
from fxpipe.runtime import interpreter
from fxpipe.runtime.backend import Worker
from tests.helpers.tiny import CUTS, Tiny, batch, soon, within


def pipe_of(devices: Any = ("cpu", "cpu"), **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(Tiny(), devices, microbatches=2, **options)


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fxpipe")}


def in_new_thread(call: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    "devices",
    [["cpu", "cpu"], ("cpu", torch.device("cpu")), 2],
    ids=["list", "tuple", "number"],
)
def test_devices_are_given_by_name_as_devices_or_as_a_number(devices: Any) -> None:
    if isinstance(devices, int) and torch.cuda.is_available():
        pytest.skip("a number is one of CUDA devices")
    with pipe_of(devices) as pipe:
        assert pipe.devices == (torch.device("cpu"),) * 2


def test_a_device_is_a_thread_and_close_ends_it() -> None:
    before = workers()
    pipe = pipe_of(["cpu"] * 3)
    assert len(workers() - before) == 3
    pipe.close()
    assert soon(lambda: not workers() - before)
    pipe.close()  # once more does nothing


def test_a_pipe_that_nobody_holds_ends_its_threads() -> None:
    x, y = batch()
    before = workers()
    pipe = pipe_of(loss=functional.cross_entropy)
    pipe.step(x, target=y)
    del pipe
    gc.collect()
    assert soon(lambda: not workers() - before)


def test_a_model_whose_pipe_is_gone_can_be_compiled_again() -> None:
    model = Tiny()
    fxpipe.compile(model, ["cpu"])
    gc.collect()
    fxpipe.compile(model, ["cpu"]).close()


def test_twenty_pipes_leave_no_thread_behind() -> None:
    x, _ = batch()
    before = workers()
    for index in range(20):
        pipe = pipe_of()
        if index % 10 == 0:
            pipe(x)
        if index % 2:
            pipe.close()
    del pipe
    gc.collect()
    assert soon(lambda: not workers() - before)


def test_an_error_while_compiling_ends_the_threads() -> None:
    before = workers()
    with pytest.raises(fxpipe.FxpipeError):
        pipe_of(example=(torch.zeros(4, 7),))
    gc.collect()
    assert soon(lambda: not workers() - before)


def test_threads_share_the_intra_op_threads_and_others_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: dict[str, int] = {}
    x, y = batch()

    class Counting(Tiny):
        pass

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    torch.set_num_threads(4)
    with fxpipe.compile(
        Counting(), ["cpu"] * 2, microbatches=2, loss=loss, partition=CUTS[2]
    ) as pipe:
        assert torch.get_num_threads() == 4
        assert in_new_thread(torch.get_num_threads) == 4
        pipe.step(x, target=y)
        assert torch.get_num_threads() == 4
        assert in_new_thread(torch.get_num_threads) == 4

        def counting(machine: Any, instruction: Any) -> None:
            counts[threading.current_thread().name] = torch.get_num_threads()
            instruction.run(machine)

        table = dict.fromkeys(every_opcode().values(), counting)
        monkeypatch.setattr(interpreter, "HANDLERS", table)
        pipe.step(x, target=y)
    assert counts == {"fxpipe-0": 2, "fxpipe-1": 2}
    assert in_new_thread(torch.get_num_threads) == 4


def test_more_devices_than_threads_have_one_each() -> None:
    torch.set_num_threads(4)
    with pipe_of(["cpu"] * 5):
        assert torch.get_num_threads() == 4
        assert in_new_thread(torch.get_num_threads) == 4


def test_backward_after_the_pipe_is_closed_says_so() -> None:
    x, _ = batch()
    pipe = pipe_of()
    output = pipe(x).sum()
    pipe.close()
    with within(1), pytest.raises(InputError, match="the pipe is closed; compile the model again"):
        output.backward()


def test_backward_after_the_last_name_of_the_pipe_is_gone_works() -> None:
    x, _ = batch()
    before = workers()
    model = Tiny()
    output = fxpipe.compile(model, ["cpu"] * 2, microbatches=2)(x).sum()
    gc.collect()
    with within(5):
        output.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    del output
    gc.collect()
    assert soon(lambda: not workers() - before)


def test_steps_from_several_threads_at_once_do_not_wait_for_each_other_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slowly(worker: Worker, job: Callable[[], None]) -> None:
        submit(worker, job)
        time.sleep(0.002)  # for another step to come between two devices of this one

    x, y = batch()
    submit = Worker.submit
    with pipe_of(["cpu"] * 3, partition=CUTS[3], loss=functional.cross_entropy) as pipe:
        pipe.eval()
        expected = pipe.step(x, target=y)
        monkeypatch.setattr(Worker, "submit", slowly)
        found: list[Tensor] = []

        def step() -> None:
            for _ in range(10):
                found.append(pipe.step(x, target=y))

        threads = [threading.Thread(target=step, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 40
        assert all(torch.equal(each, expected) for each in found)


def test_a_process_that_leaves_its_pipe_open_ends_cleanly() -> None:
    source = """
import torch, fxpipe
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
pipe = fxpipe.compile(model, ["cpu"] * 2, microbatches=2)
pipe(torch.zeros(4, 3))
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
