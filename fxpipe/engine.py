"""The engine runs a pipe's batches and keeps its workers and batches in flight between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.options import Options
from fxpipe.errors import RESTORE, EndedError, InputError
from fxpipe.locks import PipeLock, locked
from fxpipe.parts import Parts
from fxpipe.runtime.backend import Backend, Worker
from fxpipe.runtime.batch import MicroBatches
from fxpipe.runtime.choice import ThreadChoice
from fxpipe.runtime.host import BatchHost, Job, Logged, Watch, draw_seed, next_seed
from fxpipe.runtime.run import BatchRun, FlushedRun
from fxpipe.runtime.weights.live import LiveWeights, Weights
from fxpipe.runtime.weights.optimizers import Optimizers
from fxpipe.runtime.weights.progress import Progress
from fxpipe.torchtools import allocator

R = TypeVar("R", bound=BatchRun[Any])


class Engine:
    """The workers, the progress of training, and the batches in flight.

    Attributes:
        updates: whether a step updates the weights; else it adds to ``.grad``.
        progress: optimizers, versions of the weights, and the number of batches.
        kept: stage → the most micro-batches that it kept for backward at once in the last
            training step.
        logged: what the loss returned beside it for the last batch; None before there is one.
        closed: whether the workers have ended.
        meter: measures steps, by an extension; None until somebody asks for metrics.
        in_flight: the BatchRun of the batches in flight, by an extension; None if there are none.
        group: the processes that run the pipe.
        clipping: clips the gradients, by an extension; None if they are not clipped.
        backend: makes what runs programs on the devices.
        beside: what works beside the steps, by an extension: it has ``check`` and ``close``, which
            raise what has failed there.
        times: device → gets the times of its instructions; empty unless somebody takes them.
    """

    def __init__(self, options: Options, choice: ThreadChoice) -> None:
        """Start as many worker threads as ``choice`` may need to run the devices' lists."""
        backend = options.group.backend(options) or _own(options)
        clipping: Any = None
        if options.clips:
            make = Parts.clipping.find("compile(..., clip_norm=, scaler=)")
            clipping = make(options.clip_norm, options.scaler, options.model)
        stages = None
        if options.optimizer is not None:
            group = options.group if options.shards else None
            stages = Optimizers(options.model, options.optimizer, options.owns, self.flush, group)
        self.progress = Progress(options.model, stages, options.owns)
        self.kept: Mapping[int, int] = {}
        self.logged: Logged | None = None
        self.closed = False
        self.meter: Any = None
        self.updates = options.optimizer is not None
        self.group = options.group
        self._options = options
        self._place = options.here if options.ranks and options.places else None
        self.clipping = clipping
        self.backend = backend
        if not options.places:
            allocator.share_memory()
        self._workers = [Worker(f"fxpipe-{i}", options.threads) for i in range(choice.most)]
        self._lock = PipeLock(self._workers)
        self.times: list[list[Any]] = []
        self.in_flight: Any = None
        self.beside: Any = None
        options.group.when_failed(self._call_failed)

    @property
    def batches(self) -> int:
        """How many batches ``step`` has trained on."""
        return self.progress.trained if self.in_flight is None else self.in_flight.count

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm of the last batch; with batches in flight, of the newest batch that all
        devices have certainly finished. None before there is one, and without clipping."""
        norm: float | None = None if self.clipping is None else self.clipping.shown(self)
        return norm

    def step(
        self,
        compiled: Compiled,
        micro: MicroBatches,
        *,
        with_output: bool,
        watch: Watch | None = None,
    ) -> Any:
        """Train on a batch. Returns the loss, or with ``with_output`` loss and output. See
        ``Pipeline.step``, also for errors."""
        if compiled.schedule.overlaps:
            overlap = Parts.overlap.find(f"schedule {compiled.schedule.name!r}")
            return overlap(self, compiled, micro, with_output=with_output, watch=watch)
        traced = compiled.traced
        assert traced.loss is not None
        host = self.host(compiled, micro, with_output=with_output, watch=watch)
        state = self.progress.state_of(traced)
        optimizers = self.progress.optimizers_of(compiled.plan, state, submits=True)

        def result() -> Any:
            loss = host.loss()
            return (loss, host.output()) if with_output else loss

        scale = 1.0 if self.clipping is None else self.clipping.begin(0)
        host.weigh_loss(compiled.plan.specs[traced.loss].dtype, scale)
        run = self._flushed(compiled, state, optimizers, onto_grad=not self.updates)
        run.feed(Job(compiled.kernels, host, self.clipping, compiled.specs))
        try:
            returned = run.advance(result)
        finally:
            if run.committed:  # even if an interrupt came after the commit
                self.progress.count()
                if traced.seeded:
                    draw_seed()
                if self.clipping is not None:
                    self.clipping.settle(1)
        self.kept, self.logged = run.peak_kept, host.logged() if traced.logged else None
        if watch is not None:
            watch.look(host)
        return returned

    def infer(self, compiled: Compiled, micro: MicroBatches) -> list[Any]:
        """The flat outputs of the model for a batch, without gradients."""
        with self.progress.true_weights():
            host, run = self._called(compiled, micro)
            return run.advance(host.called)

    def call(self, compiled: Compiled, micro: MicroBatches) -> list[Any]:
        """The flat outputs of the model for a batch, whose backward drains the pipeline."""
        call = Parts.call.find("calling a pipe in training mode, where gradients are on,")
        host, run = self._called(compiled, micro)
        outputs: list[Any] = call(compiled, host, run, self._lock, self.backend)
        return outputs

    def joins(self, compiled: Compiled) -> bool:
        """Whether a batch of this program can join the batches in flight."""
        run = self.in_flight
        return run is None or (run.program is compiled.program and run.threads == compiled.threads)

    def check(self, *, restores: bool = False) -> None:
        """Check that the pipe can still run; where a checkpoint ``restores`` it, it may have ended.

        Raises:
            InputError: it is closed, or its workers have ended.
            EndedError: an earlier failure has ended it.
        """
        if self.closed:
            raise InputError("the pipe is closed; compile the model again")
        self._options.group.check()
        if self.in_flight is not None:
            self.in_flight.check()
        for worker in self._workers:
            worker.check()
        if self.beside is not None:
            self.beside.check()
        if self.progress.ended and not restores:
            self._refuse_ended()

    def _refuse_ended(self) -> None:
        if why := self.progress.ended:
            raise EndedError(f"the pipe has ended in an earlier call: {why}; {RESTORE}")

    def quiet(self) -> AbstractContextManager[None]:
        """Flush, and return a context manager inside which no other pipe runs anything."""
        self.flush()
        return self._lock.exclusive()

    @locked
    def flush(self) -> None:
        """Run the batches in flight to their end. See ``Pipeline.flush``."""
        self._refuse_ended()
        run = self.in_flight
        if run is None or run.failed:
            self.in_flight = None
            return
        with self._options.group.calling("flush"):
            self.in_flight = None
            run.drain()
            self.kept = run.peak_kept
            if self.clipping is not None:
                self.clipping.settle(run.count)

    @locked
    def abandon(self) -> None:
        """Drop the batches in flight, after an error that left them half done."""
        run, self.in_flight = self.in_flight, None
        if run is not None:
            run.abandon()

    @locked
    def close(self) -> None:
        """Flush and end the workers."""
        try:
            if not self.progress.ended:
                self.flush()
            if self.beside is not None:
                self.beside.close()
        finally:
            self.closed = True
            if self.progress.stages is not None:
                self.progress.stages.close()
            for worker in self._workers:
                worker.close()
            self._options.group.close()
            # it may outlive the pipe by the threads that end its links, and must not keep the model
            self._options.group.when_failed(lambda: "")
            self.backend.close()
            allocator.give_back()

    def _call_failed(self) -> str:
        """Drop the batches in flight after a call that failed, possibly on another rank. Returns
        in words what became of the weights; empty if none were in flight."""
        return "" if self.in_flight is None else self.in_flight.abandon()

    def host(
        self,
        compiled: Compiled,
        micro: MicroBatches,
        *,
        with_output: bool,
        watch: Watch | None = None,
    ) -> BatchHost:
        """The caller's side of a run, with a seed that the first rank gives to all."""
        traced = compiled.traced
        keep = compiled.results if with_output else frozenset[str]()
        if compiled.purpose == "step":
            assert traced.loss is not None
            keep = keep.union([traced.loss], traced.logged.values())
        seed = self._options.group.share("seed", next_seed) if traced.seeded else 0
        return BatchHost(traced, micro, keep, seed, self._place, watch)

    def _called(self, compiled: Compiled, micro: MicroBatches) -> tuple[BatchHost, FlushedRun]:
        """A run for a call without updates, which has been fed the batch."""
        host = self.host(compiled, micro, with_output=True)
        none = [None] * len(compiled.plan.stages)
        state = self.progress.state_of(compiled.traced)
        run = self._flushed(compiled, state, none, onto_grad=False)
        run.feed(Job(compiled.kernels, host, self.clipping, compiled.specs))
        return host, run

    def _flushed(
        self,
        compiled: Compiled,
        state: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer | None],
        *,
        onto_grad: bool,
    ) -> FlushedRun:
        weights = LiveWeights(
            compiled.plan.stages,
            state,
            optimizers,
            onto_grad=onto_grad and self._options.group.replica == 0,
            deferred=compiled.traced.deferred,
        )
        return self.run(FlushedRun, compiled, weights)

    def run(
        self,
        kind: type[R],
        compiled: Compiled,
        weights: Weights,
        first: int = 0,
    ) -> R:
        """A run of the compiled program; ``first`` is the number of its first step."""
        times: Sequence[list[Any]] = self.times
        if not times and self.meter is not None and compiled.purpose == "step":
            times = () if compiled.schedule.overlaps else self.meter.times
        return kind(
            compiled.program,
            compiled.plan,
            self._workers[: compiled.threads],
            self.backend,
            weights,
            first=first,
            times=times,
            ended=self.progress.end,
        )


def _own(options: Options) -> Backend:
    """What runs all devices in this process."""
    if options.places:
        made: Backend = Parts.streams.find(f"{options.here} has streams, and")(options)
        return made
    return Backend(options.group)
