"""A tiny model with a skip and BatchNorm, everything that a step may change, and a watchdog."""

from __future__ import annotations

import _thread
import copy
import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe

CUTS = {2: ["middle"], 3: ["middle", "last"]}
"""Devices → the cuts of a Tiny for them."""


class Tiny(nn.Module):
    """What the first layer makes skips the middle one; all of them have BatchNorm or a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.last(self.middle(h) + h)
        return y


def batch(samples: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs of a Tiny and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def pipe_of(devices: int, schedule: str = "1f1b", **options: Any) -> fxpipe.Pipeline:
    """A pipe of a Tiny, with two micro-batches."""
    torch.manual_seed(0)
    return fxpipe.compile(
        Tiny(),
        ["cpu"] * devices,
        schedule=schedule,
        microbatches=2,
        loss=nn.functional.cross_entropy,
        partition=CUTS[devices],
        **options,
    )


@dataclass
class Snapshot:
    """Everything that a step may change: state dict, gradients, optimizer, generator."""

    model: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    optimizer: dict[str, Any] | None
    generator: Tensor = field(default_factory=torch.get_rng_state)

    @staticmethod
    def of(pipe: fxpipe.Pipeline) -> Snapshot:
        return Snapshot(
            {name: value.clone() for name, value in pipe.state_dict().items()},
            {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in pipe.named_parameters()
            },
            copy.deepcopy(pipe.optimizer.state_dict()) if pipe._engine.updates else None,
        )

    def restore(self, pipe: fxpipe.Pipeline) -> None:
        pipe.load_state_dict(self.model)
        for name, parameter in pipe.named_parameters():
            gradient = self.gradients[name]
            parameter.grad = None if gradient is None else gradient.clone()
        if self.optimizer is not None:
            pipe.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        torch.set_rng_state(self.generator)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and not list(self.differences(other))

    def differences(self, other: Snapshot) -> Iterator[str]:
        """The names of what is not equal to the bit."""
        yield from _different("model", self.model, other.model)
        yield from _different("grad", self.gradients, other.gradients)
        yield from _different("optimizer", self.optimizer, other.optimizer)
        yield from _different("generator", self.generator, other.generator)


def _different(name: str, one: Any, two: Any) -> Iterator[str]:
    if type(one) is not type(two):
        yield name
    elif isinstance(one, Tensor):
        if one.dtype != two.dtype or not torch.equal(one, two):
            yield name
    elif isinstance(one, dict):
        if one.keys() != two.keys():
            yield f"{name}: keys"
        for key in one.keys() & two.keys():
            yield from _different(f"{name}.{key}", one[key], two[key])
    elif isinstance(one, list | tuple):
        if len(one) != len(two):
            yield f"{name}: length"
        for index, (a, b) in enumerate(zip(one, two, strict=False)):
            yield from _different(f"{name}[{index}]", a, b)
    elif one != two:
        yield name


def soon(holds: Callable[[], bool]) -> bool:
    """Whether something holds before long; a busy machine may take its time."""
    for _ in range(3000):
        if holds():
            return True
        time.sleep(0.01)
    return False


def raise_signal() -> None:
    """As Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


class Metronome(threading.Thread):
    """Ticks, and counts how long this process was kept from ticking by others on the machine.

    A bound on the time until something comes would otherwise be one on what else runs there.

    Attributes:
        late: seconds in which a thread that was due did not run.
    """

    TICK = 0.02

    def __init__(self) -> None:
        super().__init__(name="metronome", daemon=True)
        self.late = 0.0
        self._over = threading.Event()

    def __enter__(self) -> Metronome:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(self.TICK):
            now = time.monotonic()
            self.late += max(now - before - self.TICK, 0.0)
            before = now


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer, and end it if it hangs, with the stacks of all threads.

    Time in which the machine let this process wait does not count.
    """
    start = time.monotonic()
    metronome = Metronome()
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        faulthandler.dump_traceback(2, all_threads=True)
        _thread.interrupt_main()

    timer = threading.Timer(seconds + 60, expire)  # a hang; slowness is measured below
    timer.daemon = True
    timer.start()
    try:
        with metronome:
            yield
    except KeyboardInterrupt:
        if expired.is_set():
            raise AssertionError(f"hung for more than {seconds + 60} s") from None
        raise
    finally:
        timer.cancel()
    took = time.monotonic() - start - metronome.late
    assert took < seconds, f"took {took:.2f} s, not less than {seconds} s"
