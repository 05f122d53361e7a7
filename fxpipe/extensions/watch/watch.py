"""Watch a run while it trains: figures of its last steps, a line in the terminal, and advice."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from os import PathLike
from statistics import median
from typing import Any, Generic, TextIO, TypeVar

import torch

from fxpipe.errors import FxpipeError, InputError
from fxpipe.extensions.metrics.meter import Meter, figures_of
from fxpipe.extensions.shares import tell_shares
from fxpipe.extensions.status_line.line import OneLine, erases
from fxpipe.extensions.watch.flops import flops_of
from fxpipe.formatting import bytes_text
from fxpipe.log import LOGGER
from fxpipe.pipeline import Pipeline

_T = TypeVar("_T")

LAST = 10
"""Figures are medians over so many steps, and instructions are timed in the first of them."""

_SHOWN = 0.5
"""The least seconds between two times that the figures are shown."""

_LONGER = 200
"""These seconds are at least so many times those that showing the figures took."""

_MUCH = 0.1
"""The share of the time from which on something is worth advice."""


class Watched(Generic[_T]):
    """Batches as they come from a loader, and figures of the steps that train on them:
    ``for x, y in fxpipe.watch(pipe, loader): pipe.step(x, target=y)``.

    ``figures`` is a flat dict of numbers that loggers take as it is. It has all of
    ``pipe.metrics``, and, as medians of the last ten steps, ``samples_per_second``,
    ``step_seconds``, the time inside the loop, and ``loader_seconds``, the wait for a batch;
    ``busy/0``, the share of a step for which device 0 computes; ``allocated/0``, the most bytes
    that a CUDA device had allocated; ``tflops``, the 10¹² operations of the model a second, where a
    step counts three times its forward; and ``mfu``, their share of what the devices could do, if
    ``peak`` is given. After ten steps the logger "fxpipe" tells what holds the run up, once.

    A step costs two readings of a clock. Instructions are timed in one step of ten, or in all once
    you read ``pipe.metrics``; ``bubble``, ``stage_seconds`` and ``busy`` are of the last such step.
    Showing the figures takes at most half a percent of the time.
    """

    def __init__(
        self,
        pipe: Pipeline,
        batches: Iterable[_T],
        *,
        peak: float | None = None,
        tensorboard: str | PathLike[str] | None = None,
        show: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        stream: TextIO | None = None,
    ) -> None:
        """Watch the steps of a pipe. The first one compiles, and counts nowhere.

        Args:
            pipe: the pipe, which makes one step for each batch.
            batches: any loader.
            peak: the operations that one device could do in a second, for ``mfu``.
            tensorboard: a folder for TensorBoard's records of the figures, written as often as
                the line.
            show: whether one line on standard error shows the run, if that is a terminal or a
                notebook's; only on the first rank. It changes at most twice a second.
            clock: seconds.
            stream: where the line is shown.

        Raises:
            InputError: the peak is not positive, or TensorBoard is not installed.
        """
        if peak is not None and not peak > 0:
            raise InputError(f"peak is {peak!r}; give the operations a second of one device")
        self._counted: tuple[object, int] = (None, 0)  # a compiled step, and its operations
        self._pipe, self._batches, self._peak, self._clock = pipe, batches, peak, clock
        self._spent: deque[float] = deque(maxlen=LAST)
        self._waited: deque[float] = deque(maxlen=LAST)
        self._steps = 0
        self._writer = None if tensorboard is None else _writer(tensorboard)
        out = stream or sys.stderr
        own = show and not pipe._group.rank and erases(out)
        self._line = OneLine(out) if own else None
        self._meter, self._due = Meter.of(pipe), 0.0

    def __len__(self) -> int:
        """The number of batches, if the loader knows it."""
        if not isinstance(self._batches, Sized):
            raise TypeError(f"{type(self._batches).__name__} has no length")
        return len(self._batches)

    def __iter__(self) -> Iterator[_T]:
        """Each batch, in order; the figures are those of the steps so far."""
        clock, calls, engine = self._clock, self._pipe._calls, self._pipe._engine
        begin, last, meter = clock(), calls.last, self._meter
        try:
            for batch in self._batches:
                came = clock()
                if self._steps % LAST == 0 and engine.meter is None:
                    engine.meter = meter
                yield batch
                end = clock()
                if engine.meter is meter and not meter.stays:
                    engine.meter = None
                if calls.last is not last:
                    last = calls.last
                    if last is not None and last.compile_seconds == 0.0:
                        self._waited.append(came - begin)
                        self._spent.append(end - came)
                        self._steps += 1
                        if end >= self._due:
                            self._tell(end)
                        if self._steps == LAST:
                            self._advise()
                begin = clock()
            if self._writer is not None:
                self._write(self._writer, self.figures)
        finally:
            if engine.meter is meter and not meter.stays:
                engine.meter = None
            if self._line is not None:
                self._line.write("")
            if self._writer is not None:
                self._writer.flush()

    @property
    def figures(self) -> dict[str, float]:
        """The figures, made when they are asked for; empty before the second step."""
        if not self._spent:
            return {}
        return self._figures(figures_of(self._pipe, self._pipe._engine.meter or self._meter))

    def _tell(self, now: float) -> None:
        """Show the figures, and say when to do so next."""
        if self._line is not None or self._writer is not None:
            figures = self.figures
            if self._line is not None:
                self._line.write(_text(figures))
            if self._writer is not None:
                self._write(self._writer, figures)
        self._due = (done := self._clock()) + max(_SHOWN, _LONGER * (done - now))

    def _write(self, writer: Any, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, self._pipe.batches)

    def _figures(self, metrics: dict[str, float]) -> dict[str, float]:
        pipe, compiled = self._pipe, self._pipe._calls.compiled()
        step, wait = median(self._spent), median(self._waited)
        if compiled is not self._counted[0]:
            self._counted = compiled, 3 * flops_of(compiled.traced.graph) * len(compiled.kernels)
        flops, samples = self._counted[1], compiled.samples * len(compiled.kernels)
        found = {
            **metrics,
            "samples_per_second": samples * pipe._options.replicas / (step + wait),
            "step_seconds": step,
            "loader_seconds": wait,
            "tflops": flops / step / 1e12,
        }
        if self._peak is not None:
            found["mfu"] = flops / step / (self._peak * len(pipe.devices))
        busy = [0.0] * len(pipe.devices)
        for stage, device in enumerate(compiled.schedule.placement):
            busy[device] += metrics.get(f"stage_seconds/{stage}", 0.0)
        found |= {f"busy/{device}": spent / step for device, spent in enumerate(busy) if spent}
        for device, place in enumerate(pipe._options.places):
            if place.type == "cuda":
                found[f"allocated/{device}"] = torch.cuda.max_memory_allocated(place)
        return found

    def _advise(self) -> None:
        """Say once what holds a run up, with the line to write."""
        wait, step = median(self._waited), median(self._spent)
        if self._pipe._group.rank:
            return
        _ = self.figures  # which notes the times of the step whose instructions were timed
        meter = self._pipe._engine.meter or self._meter
        tell_shares(self._pipe, self._pipe._calls.compiled(), meter.read)
        if wait > _MUCH * (wait + step):
            LOGGER.warning(
                "the loader takes %.0f %% of the time, for which all devices wait; let other "
                "processes load: DataLoader(..., num_workers=2, pin_memory=True)",
                100 * wait / (wait + step),
            )
        try:
            predicted = self._pipe.simulate()
        except FxpipeError:
            return
        waits = max(sum(each.copying.values()) for each in predicted.idle)
        copies = waits / float(predicted.makespan)
        if copies > _MUCH:
            LOGGER.warning(
                "a device is predicted to wait for transfers for %.0f %% of a step; take larger "
                "micro-batches, or a cut where less crosses: compile(..., microbatches=%d)",
                100 * copies,
                max(1, len(self._pipe._calls.compiled().kernels) // 2),
            )


def _writer(folder: str | PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "tensorboard= needs TensorBoard, which is not installed: pip install tensorboard"
        ) from error
    return SummaryWriter(folder)


def _text(figures: dict[str, float]) -> str:
    """The figures as one line."""
    busy = [value for name, value in figures.items() if name.startswith("busy/")]
    peaks = [value for name, value in figures.items() if name.startswith("peak_memory/")]
    parts = [
        f"step {figures['batches']:.0f}",
        f"loss {figures['loss']:.4g}",
        f"{figures['samples_per_second']:.4g} samples/s",
        f"{1e3 * figures['step_seconds']:.4g} ms",
        f"loader {1e3 * figures['loader_seconds']:.3g} ms",
    ]
    if "bubble" in figures:
        parts.append(f"bubble {100 * figures['bubble']:.0f} %")
    if busy:
        parts.append(f"busy {'/'.join(f'{100 * share:.0f}' for share in busy)} %")
    if peaks:
        parts.append(f"memory {bytes_text(int(max(peaks)))}")
    parts.append(f"{figures['tflops']:.3g} TFLOP/s")
    if "mfu" in figures:
        parts.append(f"MFU {100 * figures['mfu']:.0f} %")
    return "  ".join(parts)
