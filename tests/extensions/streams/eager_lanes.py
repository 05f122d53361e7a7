"""Devices with streams on the CPU, where a stream has done what it is given when it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.extensions.streams.launching import LaunchingChannels, StreamBackend
from fxpipe.ir.plan import ValueSpec
from fxpipe.ir.program import Program
from fxpipe.runtime.choice import Dispatches
from fxpipe.runtime.host import BatchHost, Job


class LateError(RuntimeError):
    """What a device reports of something that it was given earlier."""


class Kind:
    """Devices that fail late."""

    def is_late(self, error: BaseException) -> bool:
        return isinstance(error, LateError)


@dataclass
class Lanes:
    """Streams of a device whose every instruction is done when it is launched.

    Attributes:
        number: the device's.
        log: what each stream was given, in order.
        marks: how many marks there are.
        lacks: the text of the instruction that finds no memory.
        breaks: the text of the instruction after which the device fails.
        broken: the number of marks when it did.
        asked: how many marks are made before the device tells of a failure.
    """

    number: int
    log: list[tuple[str, str]] = field(default_factory=list)
    marks: int = 0
    lacks: str = ""
    breaks: str = ""
    broken: int | None = None
    asked: int = 0
    kind: Kind = field(default_factory=Kind)

    @property
    def device(self) -> str:
        return f"fake:{self.number}"

    @contextmanager
    def on(self, stream: str, name: str) -> Iterator[None]:
        self.log.append((stream, name))
        if name == self.lacks:
            raise torch.OutOfMemoryError("no memory")
        yield
        if name == self.breaks and self.broken is None:
            self.broken = self.marks

    def wait(self, stream: str, mark: Any) -> None:
        assert isinstance(mark, tuple)
        self.log.append((stream, f"wait {mark[0]}"))

    def mark(self, stream: str) -> Any:
        self.marks += 1
        if self.broken is not None and self.marks > self.broken + self.asked:
            raise LateError("something failed")
        return self.number, stream, self.marks

    def close(self) -> None:
        pass

    def follow(self, stream: str) -> None:
        self.log.append((stream, "followed"))

    def every(self) -> list[Any]:
        return []

    def moment(self, stream: str) -> Any:
        return perf_counter_ns()

    def bring(self, stream: str, value: Any) -> Any:
        assert stream.startswith("in")
        return value.clone() if isinstance(value, Tensor) else value

    def take(self, value: Tensor) -> Tensor:
        assert self.log[-1][1].startswith("offload")
        return value.clone()

    def put(self, value: Tensor) -> Tensor:
        assert self.log[-1][0] == "prefetch"
        return value.clone()

    def room(self, spec: ValueSpec) -> Tensor:
        return spec.room(torch.device("cpu"))


class Backend(StreamBackend):
    """Devices with such lanes."""

    def __init__(self, devices: int) -> None:
        self.lanes: Any = [Lanes(device) for device in range(devices)]
        super().__init__(self.lanes)
        self.made: list[LaunchingChannels] = []
        self.calls: Counter[str] = Counter()

    def channels(
        self, program: Program, threads: int, jobs: Mapping[int, Job]
    ) -> LaunchingChannels:
        made = super().channels(program, threads, jobs)
        self.made.append(made)
        return made

    def begin(self, host: BatchHost) -> None:
        self.calls["begin"] += 1
        for lanes in self.lanes:
            if lanes.broken is not None:
                raise LateError("something failed")

    def end(self) -> None:
        self.calls["end"] += 1

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        return list(times)


def launched(
    model: nn.Module, devices: int, dispatch: Dispatches = "device", **options: Any
) -> tuple[fxpipe.Pipeline, Backend]:
    """A pipe over such devices, with four micro-batches and a loss for classes."""
    options = {"loss": nn.functional.cross_entropy, "microbatches": 4, **options}
    extensions = options.pop("extensions", ())
    pipe = fxpipe.compile(
        model, ["cpu"] * devices, extensions=[fxpipe.Dispatch(dispatch), *extensions], **options
    )
    return pipe, use(pipe, Backend(devices))


def use(pipe: fxpipe.Pipeline, backend: Any) -> Any:
    """Let a pipe that has run nothing yet run on another backend with streams."""
    pipe._engine.backend = backend
    places = (torch.device("cpu"),) * len(pipe.devices)
    object.__setattr__(pipe._options, "places", places)
    return backend
