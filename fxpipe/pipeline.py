"""The pipeline: a module that trains and runs the model over its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
from fxpipe.runtime.batch import Batch, MicroBatches, check_surroundings
from fxpipe.saving import Saved
from fxpipe.signals import SignalsAtOperations
from fxpipe.simulator import Simulation
from fxpipe.simulator.measured import measured_run
from fxpipe.torchtools.pytrees import together
from fxpipe.torchtools.state import without_collection


class Pipeline(Saved):
    """A model cut into stages over devices. Make one with ``fxpipe.compile``.

    It has the model's own parameters, buffers and submodules under their own names, so state
    dicts move both ways. ``step`` trains on one batch; calling it is the model's forward.

    Several threads may use a pipe, one at a time, and several pipes may run at once. Tracing a
    model, as the first step does, changes PyTorch for all threads: no pipe runs meanwhile, and
    your own PyTorch code should not either. Change the model's tensors yourself only while no step
    runs. A forked process cannot run the pipe.

    Attributes:
        devices: where the stages are, in order.
    """

    def __init__(self, options: Options, compiler: Compiler, engine: Engine) -> None:
        super().__init__(options, compiler, engine)
        self._filled: Compiled | None = None  # whose parameters and buffers have data
        self._changes = Changes(options, engine.progress)
        self._microbatches = options.microbatches or 4 * len(self.devices)
        self._fixed = options.recipe.microbatches is not None
        self._has_loss = options.loss is not None
        self._device_type = self.devices[0].type

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what only the model has in the model, whose code reads it, such as a flag."""
        options = vars(self).get("_options")
        own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if options is None or own or not hasattr(options.model, name):
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
        micro-batch size the model is traced once more, for all sizes that it allows. If a batch
        needs compilation, the batches in flight are finished first. The tensors of a batch may be
        overwritten when ``step`` returns: where batches overlap, it has copied them.

        An input whose strides differ from the traced ones is copied to the traced strides. The
        result equals that of the plain loop over the copy, for which kernels may round differently.

        Where batches overlap, a failure rolls all stages back to the same batch: go on with batch
        number ``batches``. Older versions of the weights are dropped then, so the next batches read
        the newest one, as after ``load_state_dict``; a checkpoint keeps the older versions.

        Args:
            *args: the model's positional inputs. Tensors are split along dimension 0, or the one in
                ``batch_dims``. A scalar tensor or one of size 1 goes whole to every micro-batch.
            target: what the loss compares with: a tensor, or a tuple of them.
            return_output: also return the model's output for the whole batch.
            **kwargs: the model's keyword inputs.

        Returns:
            The loss of the batch, or of the batches of all replicas, a detached scalar: the mean
            over micro-batches, each weighted by its samples or its targets that count; see
            ``compile``. Where batches overlap it may not
            be computed yet, like a tensor on a CUDA device: whatever reads it waits for it. With
            ``return_output`` the pair (loss, detached output). Output tensors are joined as the
            inputs were split, floating-point scalars are averaged by samples, and everything else
            must be the same in every micro-batch.

        Raises:
            InputError: inputs, target or loss do not fit.
            TraceError: the first call of its kind: the model or the loss cannot be traced.
            PartitionError: the first call: the model cannot be cut as asked.
            ExecutionError: an instruction raised; the weights are as before the step, unless the
                message says otherwise.
        """
        ranks = self._options.ranks
        called = self._group.calling("step") if ranks else nullcontext()
        with SignalsAtOperations() as signals, called:
            meter = self._engine.meter
            if meter is not None:
                meter.begin()
            self._refuse_hooks()
            self._engine.check()
            micro = self._taken(args, kwargs, target, step=True)
            kind = Kind("step", self._engine.updates, return_output)
            compiled = None if ranks else self._compiler.known(micro, kind)
            if compiled is None:
                compiled, micro = self._ready(micro, kind)
            self._check_data(compiled)
            if self._group.replicas > 1:
                self._changes.check_settings(compiled)
            micro = self._compiler.weighed(compiled, micro)
            if not all(micro.weights):
                compiled = compiled.weighted(micro.weights)
            made = self._engine.step(compiled, micro, with_output=return_output)
            if self._group.size > 1:
                self._changes.stepped(compiled)
            self._shown = compiled
            if meter is not None:
                meter.end(made[0] if return_output else made, compiled.program)
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose results are kept")
        return made

    def flush(self) -> None:
        """Finish the batches in flight, where the schedule lets batches overlap.

        ``state_dict``, ``train``, ``eval``, calling the pipe and leaving a ``with`` block flush
        too. No result changes: the next batch reads the version that it would have read anyway.

        Raises:
            ExecutionError: an instruction raised; the message says which batches count.
        """
        self._engine.flush()

    @SignedLikeTheModel
    @locked_in_backward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch.

        In eval mode or without gradients, inference. In training mode the output is
        differentiable: calling ``backward`` on something computed from it drains the pipeline.
        Batches in flight are finished first. ``torch.compile`` leaves this method uncompiled. It
        has the signature of the model's ``forward``, which frameworks look at.

        Args:
            *args: the model's positional inputs, split as in ``step``.
            **kwargs: its keyword inputs.

        Returns:
            The model's output for the whole batch, joined as in ``step``. A loss that the model
            returns is that of ``step``, where ``compile`` has none.

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
            target: what the loss compares with; without it the model's call is compiled.
            **kwargs: its keyword inputs.

        Raises:
            InputError, TraceError, PartitionError: what the first ``step`` would raise.
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
        """Train on a batch as ``step`` does and measure it: ``simulate`` with measured times.

        Args:
            *args: the model's inputs; the target may be the last of them.
            target: what the loss compares with.
            steps: how many steps to run and measure.
            **kwargs: the model's keyword inputs.

        Returns:
            The times of all instructions in seconds, over replicas those of this one's. Its
            ``costs`` are the times of the stages while all of them ran at once, and can be given to
            ``simulate``, which predicts with these times from now on. Its ``memory`` is predicted
            as in ``simulate``, from the measured times. Python's cyclic garbage is collected
            only afterwards, as this may take longer than a step.

        Raises:
            InputError: as in ``step``, or ``steps`` is below 1.
        """
        with self._group.calling("profile"):
            check_whole("steps", steps, 1)
            if target is None and self._options.loss is not None:
                args, target = split_target(self._model, args, kwargs)
            with without_collection():
                start = perf_counter()
                with self._engine.timed(len(self.devices)) as times:
                    for _ in range(steps):
                        self.step(*args, target=target, **kwargs)
                seconds = perf_counter() - start
        compiled = self._compiled()
        found = measured_run(self.program, steps, times, self._engine.held(compiled))
        self._rehearsals.learn(compiled, StepTimes(seconds, times), steps)
        return found

    # its life

    @locked
    def train(self, mode: bool = True) -> Pipeline:
        """Switch the model's mode; each mode has graphs of its own. Flushes first."""
        self.flush()
        self._model.train(mode)
        return self

    def close(self) -> None:
        """Flush and end the worker threads. The pipe can run nothing more; the model may be
        compiled again."""
        self._engine.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._engine.closed

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._engine.abandon()  # batches that the error left half done must not go on
        self.close()

    def _refuse_hooks(self) -> None:
        """Raises InputError where hooks of the pipe itself would not be called by a step."""
        found = [name.strip("_").replace("_", " ") for name in HOOKS if vars(self)[name]]
        if found:
            raise InputError(
                f"the pipe has {' and '.join(found)}, which a step, that calls no module, would "
                "leave out; remove them, or register forward hooks on the model, in whose graph "
                "they are, or train by pipe(x) and backward, which run those of the pipe"
            )

    def _check_data(self, compiled: Compiled) -> None:
        """Raises InputError where a stage of this process reads or writes what has no data, and
        RankError where the stage has other values in another replica."""
        self._shown = self._shown or compiled
        if self._options.hollow and compiled is not self._filled:
            self._refuse_hollow(compiled)
        if self._group.replicas > 1:
            self._changes.check(compiled)

    def _refuse_hollow(self, compiled: Compiled) -> None:
        own = filter(self._options.owns, range(len(compiled.plan.stages)))
        names = frozenset[str]().union(*map(compiled.names, own))
        state = compiled.traced.state_of(self._model)
        for name, tensor in state.items():
            if name in names and tensor.is_meta:
                kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
                raise InputError(
                    f"{kind} {name!r} has no data, as the model was built on the meta device; give "
                    "the values first: pipe.load(folder), pipe.load_state_dict(...), or "
                    "pipe.reset_parameters(); what is in no state dict, or what no step reads, can "
                    'be made with data (device="cpu") where the model is built'
                )
        self._filled = compiled

    def _taken(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None, *, step: bool
    ) -> MicroBatches:
        """The micro-batches of a step or of a call. Raises InputError where the arguments do not
        fit.

        A batch with fewer samples has fewer micro-batches, unless a step's schedule is for exactly
        so many. All replicas have as many as the one with the smallest batch.
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
        """The compiled program for a call, and its batch in as many micro-batches as the compiler
        decides, if it does. While it is compiled, nothing else runs."""
        if kind.purpose == "step" and self._compiler.decides(micro):
            with self._engine.quiet():
                count = self._compiler.decide(
                    micro, updates=self._engine.updates, rehearse=self._rehearsals.rehearse
                )
            self._microbatches = count
            micro = micro.batch.in_parts(count, micro.replica)
        known = self._compiler.known(micro, kind)
        compiles = known is None
        if self._group.size > 1:
            flushes = known is not None and not self._engine.joins(known)
            common, own = fingerprint(
                *(micro, kind, self._compiler.told(), self._engine.batches),
                compiles=compiles,
                first=self._shown is None,
            )
            chosen, settings, *written = self._changes.told(flushed=self._engine.flushed)
            values = (compiles, flushes, *written)
            own = "\n".join([own, *chosen])
            ranks = self._group.agree("the call", common, own=own, twins=settings, value=values)
            compiles = any(each for each, *_ in ranks)  # another replica may have to
            self._changes.hear([Changed((), "", *each) for _, _, *each in ranks])
            if self._group.replicas > 1 and any(each for _, each, *_ in ranks):
                self.flush()
        if known is not None and not compiles:
            return known, micro
        with self._engine.quiet():
            return self._compiler.compile(micro, kind), micro
