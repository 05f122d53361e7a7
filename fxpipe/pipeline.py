"""The pipeline: a module that trains and runs the model over its devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.options import Options
from fxpipe.compiler.predict import split_target
from fxpipe.compiler.timetable import Purpose
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.inspection import Inspected
from fxpipe.runtime.batch import Intake, MicroBatches
from fxpipe.runtime.weights import checkpoint
from fxpipe.signals import SignalsAtOperations
from fxpipe.simulator import Simulation
from fxpipe.simulator.measured import measured_run
from fxpipe.torchtools.pytrees import together
from fxpipe.turn import in_turn


class Pipeline(Inspected):
    """A model cut into stages over devices. Make one with ``fxpipe.compile``.

    It has the model's own parameters, buffers and submodules under their own names, so state
    dicts move both ways. ``step`` trains on one batch; calling it is the model's forward.

    Threads take turns in it, and pipes run side by side. While a first step traces a model, which
    changes PyTorch for all threads, no pipe runs, and other code of yours should not. What changes
    the model past the pipe is to be kept apart from steps. A forked process cannot run it.

    Attributes:
        devices: where the stages are, in order.
    """

    def __init__(self, options: Options, compiler: Compiler, engine: Engine) -> None:
        super().__init__(options, compiler, engine)
        self._intake = Intake(
            options.model,
            self.devices[0].type,
            options.microbatches or 4 * len(self.devices),
            fixed=options.recipe.microbatches is not None,
            has_loss=options.loss is not None,
            batch_dims=options.batch_dims,
        )

    # training and calling

    @in_turn
    def step(
        self, *args: Any, target: Any = None, return_output: bool = False, **kwargs: Any
    ) -> Any:
        """Train on one batch: forward, backward and, with an optimizer, the update.

        The first batch is traced for its size alone. Where the micro-batches of a later one are of
        another size, the model is traced once more, for any size that it allows. Where a batch has
        something compiled, those in flight are run to their end first. The tensors of
        a batch may be filled anew when it returns: where batches overlap, it has copied them.

        An input whose strides are others than those that were traced is copied into these: the
        result equals the loop's over the copy, in which kernels may round otherwise.

        Where batches overlap, a failure takes all stages back to one batch: go on with batch number
        ``batches``. The next ones read the weights of then, as after ``load_state_dict``, since
        older versions are dropped; a checkpoint keeps these.

        Args:
            *args: the model's positional inputs. Tensors are split along dimension 0, or what
                ``batch_dims`` says; one without dimensions, or with a single row, is for all.
            target: what the loss compares with: a tensor, or a tuple of them.
            return_output: also return the model's output for the whole batch.
            **kwargs: the model's keyword inputs.

        Returns:
            The loss of the batch, a detached scalar: the mean over micro-batches, each weighted by
            its samples or its targets that count; see ``compile``. Where batches overlap it may be
            on its way, as a tensor on a CUDA device may be: whatever reads it waits for it. With
            ``return_output`` the pair (loss, detached output), where tensors are joined as the
            inputs were split, floating-point numbers averaged by samples, and all else must be the
            same in every micro-batch.

        Raises:
            InputError: inputs, target or loss do not fit.
            TraceError: the first call of its kind: the model or the loss cannot be traced.
            PartitionError: the first call: the model cannot be cut as asked.
            ExecutionError: something raised; the weights are as before, or as it says.
        """
        with SignalsAtOperations() as signals:
            micro = self._take(args, kwargs, target, step=True)
            compiled = self._ready(
                micro, "step", updates=self._engine.updates, outputs=return_output
            )
            micro = self._compiler.weighed(compiled, micro)
            if not all(micro.weights):
                compiled = compiled.weighted(micro.weights)
            made = self._engine.step(compiled, micro, with_output=return_output)
            self._shown = compiled
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose results are kept")
        return made

    def flush(self) -> None:
        """Run the batches in flight to their end, where the schedule lets them overlap.

        ``state_dict``, ``train``, ``eval``, calling the pipe and leaving a ``with`` block do it
        too. It changes no result: the next batch reads the version that it would have read.

        Raises:
            ExecutionError: something raised while they ran; it says which batches count.
        """
        self._engine.flush()

    @in_turn
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch.

        In eval mode or without gradients, inference. In training mode the output is
        differentiable: calling ``backward`` on something computed from it drains the pipeline.
        Batches in flight are run to their end first. ``torch.compile`` calls it as it is.

        Args:
            *args: the model's positional inputs, split as in ``step``.
            **kwargs: its keyword inputs.

        Returns:
            The model's output for the whole batch, joined as in ``step``.

        Raises:
            InputError, TraceError, ExecutionError: as in ``step``.
        """
        micro = self._take(args, kwargs, step=False)
        self.flush()
        differentiable = self.training and torch.is_grad_enabled()
        purpose: Purpose = "call" if differentiable else "infer"
        compiled = self._ready(micro, purpose, input_gradients=differentiable)
        run = self._engine.call if differentiable else self._engine.infer
        output = run(compiled, micro)
        self._shown = self._shown or compiled
        return together(output, compiled.traced.out_spec)

    @in_turn
    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """Trace and compile for inputs like these, without running a step.

        Args:
            *args: the model's positional inputs, as ``step`` takes them.
            target: what the loss compares with; without it the model's call is compiled.
            **kwargs: its keyword inputs.

        Raises:
            InputError, TraceError, PartitionError: what the first ``step`` would raise.
        """
        micro = self._take(args, kwargs, target, step=True)
        can_step = target is not None or self._options.loss is None
        if can_step and self.training:
            try:
                self._shown = self._ready(
                    micro, "step", updates=self._engine.updates, outputs=False
                )
                return
            except InputError:
                if self._options.loss is not None:
                    raise
        self._shown = self._ready(micro, "call", input_gradients=True)

    @in_turn
    def profile(self, *args: Any, target: Any = None, steps: int = 1, **kwargs: Any) -> Simulation:
        """The same, measured: train on a batch as ``step`` does, and take the time.

        Args:
            *args: the model's inputs; the target may be the last of them.
            target: what the loss compares with.
            steps: how many steps to run, and to measure.
            **kwargs: the model's keyword inputs.

        Returns:
            The times of all instructions in seconds. Its ``costs`` are those of the stages as
            they ran beside each other, and ``simulate`` takes them. Its ``memory`` is predicted,
            as ``simulate``'s is, for the times that were measured.

        Raises:
            InputError: as ``step``, or ``steps`` is below 1.
        """
        if steps < 1:
            raise InputError(f"steps is {steps}; a profile needs at least 1")
        if target is None and self._options.loss is not None:
            args, target = split_target(self._model, args, kwargs)
        with self._engine.timed(len(self.devices)) as times:
            for _ in range(steps):
                self.step(*args, target=target, **kwargs)
        return measured_run(self.program, steps, times, self._engine.held(self._compiled()))

    # the model's state

    @in_turn
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own: its keys, its shapes. Flushes first: it is the newest version."""
        self.flush()
        return self._model.state_dict(*args, **kwargs)

    @in_turn
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into the model, as its own. Flushes first; the next batch reads what was loaded."""
        self.flush()
        return self._model.load_state_dict(state_dict, *args, **kwargs)

    @in_turn
    def checkpoint(self, path: str | os.PathLike[str], *, extra: Any = None) -> None:
        """Write to a file all that a run needs to go on as if it had not stopped. Flushes first.

        That is the weights, in all the versions that batches to come read, buffers, what the
        optimizers keep, the states of torch's generators, for the CPU and the pipe's devices, and
        the number of batches; without an optimizer, ``.grad`` too. All stands under its name in
        the model, so any partition can go on from it. The file is one of safetensors, without
        code and with a checksum. Others may write and read it at once: it is replaced as a whole.

        Args:
            path: of the file.
            extra: what else the run has, for ``restore`` to return: the state of a learning-rate
                scheduler or of ``random``, an epoch. Tensors, numbers, strings, and lists, tuples
                and dicts of them.

        Raises:
            CheckpointError: the file cannot be written, or hold ``extra``; an older one is left.
        """
        self.flush()
        checkpoint.write(self._engine.progress.checkpoint(extra), path)

    @in_turn
    def restore(self, path: str | os.PathLike[str]) -> Any:
        """Go on from a checkpoint, at any time, on any number of devices.

        All is checked before anything changes; each optimizer is tried out on a copy of what the
        checkpoint has for it. Where the optimizer function goes by the stage, ``prepare`` the pipe
        first. A learning-rate scheduler changes its optimizer when it is made: ``prepare``, make
        the schedulers over ``optimizers``, restore, and give each its state from ``extra``.

        Returns:
            What ``checkpoint`` was given as ``extra``.

        Raises:
            CheckpointError: the file is no checkpoint, damaged, or of another model or optimizer.
                The pipe is as it was.
        """
        self._engine.check()
        self.flush()
        saved = checkpoint.read(path)
        self._engine.progress.restore(saved, self._shown.plan if self._shown else None)
        return saved.extra

    @in_turn
    def train(self, mode: bool = True) -> Pipeline:
        """Switch the model's mode; each mode has graphs of its own. Flushes first."""
        self.flush()
        self._model.train(mode)
        self.training = mode
        return self

    # its life

    def close(self) -> None:
        """Flush, end the worker threads and let the model be compiled again; the pipe is done."""
        self._engine.close()

    @property
    def closed(self) -> bool:
        """Whether the pipe is done."""
        return self._engine.closed

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._engine.abandon()  # what it has left half done shall not go on
        self.close()

    def _take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, *, step: bool
    ) -> MicroBatches:
        self._engine.check()
        return self._intake.take(args, kwargs, target, step=step)

    def _ready(self, micro: MicroBatches, purpose: Purpose, **wanted: bool) -> Compiled:
        """What runs a call. Where something is to be compiled, nothing else runs meanwhile."""
        known = self._compiler.known(micro, purpose, **wanted)
        if known is not None:
            return known
        with self._engine.quiet():
            return self._compiler.compile(micro, purpose, **wanted)
