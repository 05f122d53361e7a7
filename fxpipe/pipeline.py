"""``Pipeline``: a module that trains and runs a model over its devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch

from fxpipe.arguments import check_whole
from fxpipe.changes import Changed, Changes
from fxpipe.compiler.compiled import Compiled, Kind
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.fingerprint import fingerprint
from fxpipe.compiler.options import Options
from fxpipe.compiler.overheads import StepTimes
from fxpipe.compiler.predict import split_target
from fxpipe.compiler.state_snapshot import HOOKS
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.inspection import SignedLikeTheModel
from fxpipe.locks import locked, locked_in_backward
from fxpipe.runtime.batch import Batch, MicroBatches, check_gradients, check_surroundings
from fxpipe.saving import Saved
from fxpipe.signals import SignalsAtOperations
from fxpipe.simulator import Simulation
from fxpipe.simulator.measured import measured_run
from fxpipe.torchtools import allocator
from fxpipe.torchtools.pytrees import together
from fxpipe.torchtools.state import without_collection


class Pipeline(Saved):
    """A model cut into stages over devices, made by ``fxpipe.compile``.

    A pipe has the model's own parameters, buffers and submodules under the same names, so each can
    load the other's state dict. ``step`` trains on one batch; calling the pipe runs the model's
    forward.

    Several threads may use a pipe, one at a time, and several pipes may run at once. Tracing a
    model, as in the first step, changes PyTorch for all threads: meanwhile no pipe runs, and your
    own PyTorch code should not run either. Change the model's tensors yourself only while no step
    runs. A forked process cannot run the pipe.

    Attributes:
        devices: the devices, in order.
    """

    def __init__(self, options: Options, compiler: Compiler, engine: Engine) -> None:
        super().__init__(options, compiler, engine)
        self._filled: Compiled | None = None  # a call whose parameters and buffers have data
        self._changes = Changes(options, engine.progress)
        self._compile_seconds = 0.0  # for which the last step compiled
        self._microbatches = options.microbatches or 4 * len(self.devices)
        self._fixed = options.recipe.microbatches is not None
        self._has_loss = options.loss is not None
        self._device_type = self.devices[0].type

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that only the model has (a flag that its code reads) in the model."""
        options = vars(self).get("_options")
        in_pipe = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if options is None or in_pipe or not hasattr(options.model, name):
            super().__setattr__(name, value)
        else:
            setattr(options.model, name, value)

    # training and calling

    @locked
    def step(
        self, *args: Any, target: Any = None, return_output: bool = False, **kwargs: Any
    ) -> Any:
        """Train on one batch: forward, backward and, with an optimizer, the update.

        The first batch is traced for its micro-batch size only. At the first batch with another
        micro-batch size the model is traced once more, for all sizes that it allows. If a batch has
        to be compiled, the batches in flight are finished first. You may overwrite the tensors of a
        batch once ``step`` has returned: if batches overlap, it has copied them.

        An input whose strides differ from the traced strides is copied to these. The result equals
        that of the plain loop over the copy; for other strides kernels may round differently.

        If batches overlap, a failure ends the pipe: go on from the last checkpoint, which keeps the
        older versions of the weights, too.

        Args:
            *args: the model's positional inputs. Tensors are split along dimension 0, or the one in
                ``batch_dims``. A scalar tensor, or one whose size is 1 there, is given whole to
                every micro-batch.
            target: what the loss compares the output with: a tensor, or a tuple of tensors.
            return_output: also return the model's output for the whole batch.
            **kwargs: the model's keyword inputs.

        Returns:
            The loss of the batch (over replicas, of the batches of all replicas), a detached
            scalar: the mean over micro-batches, each weighted by its samples or by its targets that
            count; see ``compile``. If batches overlap, it may not be computed yet, like a tensor on
            a CUDA device: whatever reads it waits for it.

            With ``return_output``, the pair (loss, detached output). Output tensors are joined as
            the inputs were split, floating-point scalars are averaged by samples, and everything
            else must be the same in every micro-batch.

        Raises:
            InputError: inputs, target or loss do not fit, or gradients are off, as under
                ``torch.no_grad``.
            TraceError: in the first call of its kind: the model or the loss cannot be traced.
            PartitionError: in the first call: the model cannot be cut as asked.
            ExecutionError: an instruction raised. The weights, buffers and optimizers are as before
                the step; but if an update had begun, or batches overlap, the pipe has ended, and
                the message says which stages have updated.
            EndedError: the pipe has ended in an earlier call; restore a checkpoint.
        """
        ranks, begin = self._options.ranks, perf_counter()
        called = self._group.calling("step") if ranks else nullcontext()
        with SignalsAtOperations() as signals, called:
            meter = self._engine.meter
            if meter is not None:
                meter.begin()
            self._refuse_hooks()
            self._engine.check()
            micro = self._taken(args, kwargs, target, step=True)
            check_gradients()
            kind = Kind("step", self._engine.updates, return_output)
            compiled = None if ranks else self._compiler.known(micro, kind)
            self._compile_seconds = 0.0
            if compiled is None:
                compiled, micro = self._ready(micro, kind)
            self._check_data(compiled)
            if self._group.replicas > 1:
                self._changes.check_settings(compiled)
            micro = self._compiler.weighed(compiled, micro)
            if not isinstance(micro.weights, torch.Tensor) and not all(micro.weights):
                compiled = compiled.weighted(micro.weights)
            watching = self._rehearsals.watching(compiled, begin) if ranks else nullcontext()
            with watching:
                result = self._engine.step(compiled, micro, with_output=return_output)
            if self._group.size > 1:
                self._changes.stepped(compiled)
            self._shown = compiled
            if meter is not None:
                meter.end(
                    result[0] if return_output else result, compiled.program, self._compile_seconds
                )
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose results are kept")
        return result

    def flush(self) -> None:
        """Finish the batches in flight, if the schedule lets batches overlap.

        ``state_dict``, ``train``, ``eval``, calling the pipe and leaving a ``with`` block flush,
        too. No result changes: the next batch reads the version of the weights that it would have
        read anyway.

        Raises:
            ExecutionError: an instruction raised. The pipe has ended; the message says with how
                many batches each stage has updated.
            EndedError: the pipe has ended in an earlier call; restore a checkpoint.
        """
        self._engine.flush()

    @SignedLikeTheModel
    @locked_in_backward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch.

        In training mode the output is differentiable: calling ``backward`` on something computed
        from it runs the backwards of all stages. In eval mode, or without gradients, this is
        inference. Batches in flight are finished first. ``torch.compile`` leaves this method
        uncompiled. It has the signature of the model's ``forward``, which frameworks inspect.

        Args:
            *args: the model's positional inputs, split as in ``step``.
            **kwargs: the model's keyword inputs.

        Returns:
            The model's output for the whole batch, joined as in ``step``. A loss in the output has
            the value that ``step`` would return, if ``compile`` was given no ``loss``.

        Raises:
            InputError, TraceError, ExecutionError: as in ``step``.
        """
        with self._group.calling("pipe(...)"):
            self._engine.check()
            micro = self._taken(args, kwargs, step=False)
            self.flush()
            differentiable = self.training and torch.is_grad_enabled()
            compiled, micro = self._ready(micro, Kind("call" if differentiable else "infer"))
            self._check_data(compiled)
            micro = self._compiler.weighed(compiled, micro)
            run = self._engine.call if differentiable else self._engine.infer
            output = run(compiled, micro)
        return together(output, compiled.traced.out_spec)

    @locked
    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """Trace and compile for inputs like these, without running a step.

        Args:
            *args: the model's positional inputs, as ``step`` takes them.
            target: what the loss compares the output with; without it the model's call is compiled.
            **kwargs: the model's keyword inputs.

        Raises:
            InputError, TraceError, PartitionError: as the first ``step`` would.
        """
        with self._group.calling("prepare"):
            self._engine.check()
            micro = self._taken(args, kwargs, target, step=True)
            can_step = target is not None or self._options.loss is None
            if can_step and self.training:
                try:
                    kind = Kind("step", self._engine.updates, outputs=False)
                    self._shown, _ = self._ready(micro, kind)
                    return
                except InputError:
                    if self._options.loss is not None:
                        raise
            self._shown, _ = self._ready(micro, Kind("call"))

    @locked
    def profile(self, *args: Any, target: Any = None, steps: int = 1, **kwargs: Any) -> Simulation:
        """Train on a batch as ``step`` does, and return the measured times of all instructions.

        ``simulate`` predicts with these times from then on, unless devices have streams. Python's
        cyclic garbage is collected only after the steps, as a collection may take longer than one.

        Args:
            *args: the model's positional inputs; the target may be the last of them.
            target: what the loss compares the output with.
            steps: how many steps to run and measure.
            **kwargs: the model's keyword inputs.

        Returns:
            The same as ``simulate`` returns, with measured times in seconds; over replicas, with
            those of this replica. ``costs`` are the times of the stages while all of them run, and
            can be given to ``simulate``. ``memory`` is predicted, as in ``simulate``, from the
            measured times.

        Raises:
            InputError: as in ``step``, or ``steps`` is below 1.
        """
        with self._group.calling("profile"):
            check_whole("steps", steps, 1)
            if target is None and self._options.loss is not None:
                args, target = split_target(self._model, args, kwargs)
            with without_collection():
                start = perf_counter()
                with self._engine.timed() as times:
                    for _ in range(steps):
                        self.step(*args, target=target, **kwargs)
                seconds = perf_counter() - start
            compiled = self._compiled()
            measured = measured_run(self.program, steps, times, self._engine.held(compiled))
            self._rehearsals.learn(compiled, [StepTimes(seconds, times)], steps)
        return measured

    # modes and closing

    @locked
    def train(self, mode: bool = True) -> Pipeline:
        """Flush, and switch the model's mode; each mode has graphs of its own."""
        self.flush()
        self._model.train(mode)
        return self

    def close(self) -> None:
        """Flush and end the worker threads. Afterwards the pipe cannot run; the model may be
        compiled again."""
        self._engine.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._engine.closed

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._group.size > 1:
            self._engine.abandon()  # the other ranks may not come to a flush
        self.close()

    def _refuse_hooks(self) -> None:
        """Raise InputError if the pipe itself has hooks: a step would not call them."""
        hooks = [name.strip("_").replace("_", " ") for name in HOOKS if vars(self)[name]]
        if hooks:
            raise InputError(
                f"the pipe has {' and '.join(hooks)}, which a step would not run, as it calls no "
                "module; remove them, or register forward hooks on the model, which are traced "
                "with it, or train by pipe(x) and backward, which run the hooks of the pipe"
            )

    def _check_data(self, compiled: Compiled) -> None:
        """Raise InputError if a stage of this process reads or writes a tensor without data, and
        RankError if a tensor of the stage has other values in another replica."""
        self._shown = self._shown or compiled
        if self._options.hollow and compiled is not self._filled:
            stages = filter(self._options.owns, range(len(compiled.plan.stages)))
            names = frozenset[str]().union(*map(compiled.names, stages))
            for name, tensor in compiled.traced.state_of(self._model).items():
                if name in names and tensor.is_meta:
                    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
                    raise InputError(
                        f"{kind} {name!r} has no data, as the model was built on the meta device; "
                        "give the values first: pipe.load(folder), pipe.load_state_dict(...), or "
                        "pipe.reset_parameters(); tensors that are in no state dict, or that no "
                        'step reads, can be made with data (device="cpu") where the model is built'
                    )
            self._filled = compiled
        if self._group.replicas > 1:
            self._changes.check(compiled)

    def _taken(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None, *, step: bool
    ) -> MicroBatches:
        """Check the arguments of a step or call, and split them into micro-batches.

        A batch has at most as many micro-batches as samples, unless a step's schedule has a fixed
        number of them. All replicas have as many as the replica with the smallest batch.
        """
        options = self._options
        check_surroundings(step=step)
        targets = () if target is None else target if isinstance(target, tuple) else (target,)
        if targets and not self._has_loss:
            raise InputError(
                "there is a target but no loss to compare it with; give compile(..., "
                "loss=function), or leave out target"
            )
        asks = step and self._has_loss and not targets
        hint = "; what the loss compares with is given as step(..., target=...)" if asks else ""
        batch = Batch.of(options.model, args, kwargs, targets, options.batch_dims, hint)
        batch.check_devices("cpu", self._device_type)
        count, size = self._microbatches, batch.size
        if self._group.replicas > 1:
            size = min(self._group.exchange("the samples of a batch", size))
        count = count if step and self._fixed else min(count, size)
        return batch.in_parts(count, self._group.replica)

    def _ready(self, micro: MicroBatches, kind: Kind) -> tuple[Compiled, MicroBatches]:
        """Return the compiled program for a call on which all ranks agree, and its batch, split
        anew if the compiler decides so. While a call is compiled, nothing else runs."""
        if kind.purpose == "step" and self._compiler.decides(micro):
            with self._compiling():
                count = self._compiler.decide(
                    micro, updates=self._engine.updates, rehearse=self._rehearsals.rehearse
                )
            self._microbatches = count
            micro = micro.batch.in_parts(count, micro.replica)
        known = self._compiler.known(micro, kind)
        compiles = known is None
        timed = [self._rehearsals.timed(known)]
        if self._group.size > 1:
            flushes = known is not None and not self._engine.joins(known)
            common, replica_text = fingerprint(
                *(micro, kind, self._compiler.told(), self._engine.batches),
                compiles=compiles,
                first=self._shown is None,
            )
            chosen, settings, *written = self._changes.told(flushed=self._engine.flushed)
            ranks = self._group.agree(
                "the call",
                common,
                own="\n".join([replica_text, *chosen]),
                twins=settings,
                value=(compiles, flushes, *timed, *written),
            )
            compiles = any(compiles for compiles, *_ in ranks)  # another replica may have to
            timed = [timed for _, _, timed, *_ in ranks]
            self._changes.hear([Changed((), "", *written) for _, _, _, *written in ranks])
            if self._group.replicas > 1 and any(flushes for _, flushes, *_ in ranks):
                self.flush()
        self._rehearsals.agreed = all(timed)
        if known is not None and not compiles:
            return known, micro
        with self._compiling():
            self._compiler.plans.proven |= self._engine.batches > 0
            compiled = self._compiler.compile(micro, kind)
        allocator.give_back()
        return compiled, micro

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Inside, nothing else runs, and the time counts as that of compiling."""
        with self._engine.quiet():
            begin = perf_counter()
            try:
                yield
            finally:
                self._compile_seconds += perf_counter() - begin
