"""Ctrl-C in a whole process: it trains on, or ends, as if nothing had been half done."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.tiny import Metronome

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")

HANGS = 300
"""Seconds after which a process is ended; a busy machine may take long to start one."""

START = """
import signal
import sys
import time
import torch
from torch.nn import functional
import fxpipe
from fxpipe.runtime import interpreter
from tests.helpers.tiny import CUTS, Snapshot, Tiny, batch

signal.signal(signal.SIGINT, signal.default_int_handler)

def compiled():
    torch.manual_seed(0)
    return fxpipe.compile(
        Tiny(), ["cpu"] * 3, microbatches=3, loss=functional.cross_entropy, partition=CUTS[3],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )

def snapshot(pipe):
    pipe.prepare(x, target=y)
    assert pipe.optimizer
    return Snapshot.of(pipe)

x, y = batch()
pipe = compiled()
"""

TRAINS = """
states = [snapshot(pipe)]

def state(number):  # after so many steps of a pipe that nobody interrupts
    while len(states) <= number:
        reference.step(x, target=y)
        states.append(snapshot(reference))
    return states[number]

reference, pipe = pipe, None
for turn in range(TURNS):
    if turn < FRESH:  # has to compile first
        if pipe is not None:
            pipe.close()
        pipe, done = compiled(), 0
    caught, error = 0.0, None
    try:
        print("armed", flush=True)
        for _ in range(STEPS // TURNS):
            pipe.step(x, target=y)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt as interrupt:
        caught, error = time.monotonic(), interrupt
    found = snapshot(pipe)
    while done < STEPS - 1 and found != state(done):
        done += 1
    assert done < STEPS - 1, "no state between two steps"
    done += 1
    pipe.step(x, target=y)
    assert snapshot(pipe) == state(done), "the next step is wrong"
    print(caught, flush=True)
print("done", flush=True)
"""

SLOW = """
def slowly(machine, instruction):
    if machine.device == 1:
        print("armed", flush=True)
        sys.stdin.readline()
    instruction.run(machine)

pipe.prepare(x, target=y)
interpreter.HANDLERS[fxpipe.ir.instruction.Backward] = slowly
pipe.step(x, target=y)
"""


@contextmanager
def running(source: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(HANGS, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


@pytest.mark.deep
def test_a_process_that_is_interrupted_at_random_trains_on_as_if_it_had_not_been() -> None:
    turns, fresh = 10, 3
    moments = random.Random(0)
    settings = f"STEPS, TURNS, FRESH = 900, {turns}, {fresh}\n"
    with running(START + settings + TRAINS) as process:
        assert process.stdin and process.stdout and process.stderr
        for turn in range(turns):
            line = process.stdout.readline()
            assert line == "armed\n", line + process.stderr.read()
            time.sleep(moments.uniform(0, 1 if turn < fresh else 0.05))
            with Metronome() as metronome:
                sent = time.monotonic()
                process.send_signal(signal.SIGINT)
                line = process.stdout.readline()
            assert line, process.stderr.read()
            assert 0 < float(line) - sent < 1 + metronome.late
        assert process.stdout.read() == "done\n"
        assert process.stderr.read() == ""
        assert process.wait(30) == 0


@pytest.mark.deep
def test_a_process_that_is_interrupted_inside_an_instruction_ends_cleanly() -> None:
    with running(START + SLOW) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "armed\n"
        time.sleep(0.2)
        errors = ""
        with Metronome() as metronome:
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            while not errors.endswith("KeyboardInterrupt\n"):
                line = process.stderr.readline()
                assert line, errors
                errors += line
            took = time.monotonic() - sent
        assert took < 1 + metronome.late
        note = process.stderr.readline()
        assert note.startswith("interrupted: ") and "device 1 was at instruction" in note
        process.stdin.write("go on\n")  # until here the instruction was not through
        process.stdin.flush()
        assert process.stdout.read() == process.stderr.read() == ""
        assert process.wait(30) in (1, -signal.SIGINT)  # of Python's own, not of a crash
