"""``Pipeline``: a module that trains and runs a model over its devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.optim import Optimizer

from fxpipe import views
from fxpipe.calls import Stepped
from fxpipe.compiler.compiled import Compiled, Kind
from fxpipe.compiler.compiler import Change, Compiler, NumbersError
from fxpipe.compiler.lacking import naming_lacks
from fxpipe.compiler.options import Options
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.locks import locked
from fxpipe.module import CompiledModule
from fxpipe.parts import Parts
from fxpipe.runtime.batch import Batch, MicroBatches, check_gradients, check_surroundings
from fxpipe.runtime.host import next_seed
from fxpipe.runtime.loss import StepLoss
from fxpipe.signals import HeldSignals
from fxpipe.signature import SignedLikeTheModel
from fxpipe.torchtools import allocator
from fxpipe.torchtools.pytrees import together
from fxpipe.torchtools.state import HOOKS


class Pipeline(CompiledModule):
    """A model cut into stages over devices, made by ``fxpipe.compile``.

    A pipe shares its dictionaries of parameters, buffers and submodules with the model, so each can
    load the other's state dict. It also has the model's other attributes, such as ``config``,
    unless the pipe has an attribute of that name; setting one sets it in the model. Over ranks, a
    method of the model that computes with what this rank lacks raises InputError, unless an
    extension runs it over the stages, as it also may over several GPUs. ``step`` trains on one
    batch; calling the pipe runs the model's forward. A pipe cannot be moved or copied, because
    compiled graphs refer to its tensors.

    Several threads may use a pipe, one at a time, and several pipes may run at once. Autograd adds
    to ``.grad`` after the pipe's part of a backward pass: keep other threads from ``step`` until
    ``backward`` has returned. Tracing a
    model, as in the first step, changes PyTorch for all threads: meanwhile no pipe runs, and your
    own PyTorch code should not run either. Change the model's tensors yourself only while no step
    runs. A forked process cannot run the pipe.

    Attributes:
        devices: the devices, in order.
    """

    def __init__(self, options: Options, compiler: Compiler, engine: Engine) -> None:
        super().__init__(options, engine)
        self.devices = options.torch_devices
        self._compiler = compiler

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
        calls, engine = self._calls, self._engine
        with HeldSignals() as signals, self._group.calling("step", exchanges=True):
            calls.last, begin, meter = None, perf_counter(), engine.meter
            if meter is not None:
                meter.begin()
            if any(map(vars(self).get, HOOKS)):
                self._refuse_hooks()
            engine.check()
            micro = self._taken(args, kwargs, target, step=True)
            check_gradients()
            kind = Kind("step", engine.updates, return_output)
            calls.compile_seconds = 0.0
            # several ranks agree on each call first
            compiled = self._compiler.known(micro, kind) if self._group.size == 1 else None
            if compiled is None:
                compiled, micro = self._ready(micro, kind)
            calls.steps += 1
            if self._compiler.change is not None:
                self._note(self._compiler.change)
            elif calls.compile_seconds:
                calls.first = [calls.steps]
            if compiled is not calls.filled:
                self._check_data(compiled)
            compiled, micro, watch = self._compiler.weighed(compiled, micro)
            result = engine.step(compiled, micro, with_output=return_output, watch=watch)
            calls.shown = compiled
            loss, *rest = result if return_output else [result]
            seconds = perf_counter() - begin - calls.compile_seconds
            calls.last = Stepped(loss, seconds, calls.compile_seconds)
            if not isinstance(loss, StepLoss):
                loss = loss.as_subclass(StepLoss)
            if meter is not None:
                meter.program = compiled.program
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose results are kept")
        return (loss, *rest) if return_output else loss

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
    @locked
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
            self._engine.flush()
            differentiable = self._model.training and torch.is_grad_enabled()
            compiled, micro = self._ready(micro, Kind("call" if differentiable else "infer"))
            if compiled is not self._calls.filled:
                self._check_data(compiled)
            compiled, micro, _ = self._compiler.weighed(compiled, micro)
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
            has_loss = self._options.loss is not None
            if (target is not None or not has_loss) and self._model.training:
                try:
                    kind = Kind("step", self._engine.updates, outputs=False)
                    self._calls.shown, _ = self._ready(micro, kind)
                    return
                except InputError:
                    if has_loss:
                        raise
            self._calls.shown, _ = self._ready(micro, Kind("call"))

    profile = views.pipeline_profile
    """``pipe.profile(x, target=y, steps=1)`` trains as ``step`` does, and returns the measured
    times: ``fxpipe.extensions.simulator.pipe.profile_pipe``."""

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

    # what it is and does

    @property
    def traced(self) -> Traced:
        """The graph of the whole model and its loss in the last training step; before the first
        step, in the call that was compiled first. ``traced``, ``plan``, ``schedule`` and
        ``program`` raise InputError as long as nothing is compiled."""
        return self._calls.compiled().traced

    @property
    def plan(self) -> Plan:
        """The stages and edges of the last training step. After a cut by names, the stages have
        costs from the first ``simulate`` on."""
        return self._calls.compiled().plan

    @property
    def schedule(self) -> Schedule:
        """The schedule of the last training step, with the times of its tasks where they were
        measured: when the model was cut, or by the last ``profile``. Unless it says itself which
        stages feed which, it has the plan's edges."""
        compiled, known = self._calls.compiled(), Parts.seconds.get()
        schedule, edges = compiled.schedule, compiled.plan.stage_edges
        if schedule.edges is None and schedule.slices == 1:
            schedule = replace(schedule, edges=edges)
        return replace(schedule, seconds=known(self) if known else {})

    @property
    def program(self) -> Program:
        """The program of the last training step, with the lists of all devices. A rank keeps the
        list of its own device only, and lowers the others again for this property."""
        return self._calls.compiled().whole()

    @property
    def kept(self) -> Mapping[int, int]:
        """Stage → the most micro-batches that it kept for backward at once in the last training
        step. If batches overlap, the count is over all batches since the last flush, and over
        several ranks the stages of other ranks are included only after a flush."""
        return dict(self._engine.kept)

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last batch, before clipping; None before the first batch
        or without ``clip_norm`` and ``scaler``. If batches overlap, it is the norm of an earlier
        batch that every device has finished, always the same number of batches back: with ``2bw``
        it is the third before the last."""
        return self._engine.grad_norm

    @property
    def batches(self) -> int:
        """The number of batches that ``step`` has trained on; a checkpoint keeps it."""
        return self._engine.batches

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of the last step, as a flat dict of numbers, which loggers take as it is: loss,
        times, bubble, memory, and what a loss returns beside it; see
        ``fxpipe.extensions.metrics.meter.metrics``. Bubble and times of stages are measured from
        the first time that you read this property."""
        figures: dict[str, float] = Parts.metrics.find("pipe.metrics")(self)
        return figures

    @property
    def weight_versions(self) -> list[int]:
        """Stage → the number of live versions of its weights. Empty before the first step, and if
        batches do not overlap, which needs only one version. 0 for the stages of other ranks."""
        return self._engine.progress.weight_versions

    @property
    def weight_bytes(self) -> list[int]:
        """Stage → the bytes of all live versions of its weights; see ``weight_versions``."""
        return self._engine.progress.weight_bytes

    @property
    @locked
    def optimizer(self) -> Optimizer:
        """One torch optimizer over the model's parameters, with the groups that you made: for
        learning-rate schedulers, logging and ``state_dict``, also before the first step. It is the
        optimizer that ``compile`` was given, or that the given function makes of all parameters.

        ``step`` uses the settings that the groups have when the batch is submitted, even if batches
        overlap. ``state`` is the stages' present state. ``state_dict`` finishes the batches in
        flight first, and ``load_state_dict`` gives the loaded state to the stages. The optimizer's
        own ``step`` updates the weights from ``.grad``, as after ``pipe(x)`` and ``backward``. Over
        several ranks it has the state of this rank's stages, and every rank calls these methods.

        Raises:
            InputError: the pipe has no optimizer, or the given function returns none.
        """
        if self._engine.progress.stages is None:
            raise InputError("the pipe has no optimizer; give compile(..., optimizer=...)")
        return self._engine.progress.stages.one()

    def __repr__(self) -> str:
        """The table of stages, which measures nothing: after a cut by names it has times from the
        first ``simulate`` on. Without its extension, one line."""
        if (table := Parts.table.get()) is None:
            model = type(self._model).__name__
            return f"fxpipe.Pipeline of {model} over {len(self.devices)} devices"
        return table(self)

    simulate = views.pipeline_simulate
    """``pipe.simulate()`` predicts the time and the memory of a step:
    ``fxpipe.extensions.simulator.pipe.simulate_pipe``."""

    # saving and loading

    reset_parameters = views.pipeline_reset_parameters
    """``pipe.reset_parameters(function)`` gives parameters and buffers their initial values:
    ``fxpipe.extensions.initial_values.initial.reset_parameters``."""

    checkpoint = views.pipeline_checkpoint
    """``pipe.checkpoint("run.pt")`` writes to a file all that training needs to go on:
    ``fxpipe.extensions.checkpoint.pipe.checkpoint``."""

    restore = views.pipeline_restore
    """``pipe.restore("run.pt")`` goes on from a file:
    ``fxpipe.extensions.checkpoint.pipe.restore``."""

    save = views.pipeline_save
    """``pipe.save("run")`` writes the same to a folder, from any number of ranks:
    ``fxpipe.extensions.checkpoint.pipe.save``."""

    load = views.pipeline_load
    """``pipe.load("run")`` goes on from a folder: ``fxpipe.extensions.checkpoint.pipe.load``."""

    load_hub = views.pipeline_load_hub
    """``pipe.load_hub("folder")`` loads weights as the hub of Hugging Face has them:
    ``fxpipe.extensions.hub.pipe.load_hub``."""

    save_hub = views.pipeline_save_hub
    """``pipe.save_hub("folder")`` writes weights that ``from_pretrained`` reads:
    ``fxpipe.extensions.hub.pipe.save_hub``."""

    # the way of a batch

    def _note(self, change: Change) -> None:
        """Note that a step was compiled anew."""
        calls = self._calls
        if calls.recompiles is None and (make := Parts.recompiles.get()) is not None:
            calls.recompiles = make(calls.first)
        if calls.recompiles is not None:
            calls.recompiles.note(type(self._model).__name__, calls.steps, change)

    def _refuse_hooks(self) -> None:
        """Raise InputError, as the pipe itself has hooks, which a step would not call."""
        hooks = [name.strip("_").replace("_", " ") for name in HOOKS if vars(self)[name]]
        raise InputError(
            f"the pipe has {' and '.join(hooks)}, which a step would not run, as it calls no "
            "module; remove them, or register forward hooks on the model, which are traced "
            "with it, or train by pipe(x) and backward, which run the hooks of the pipe"
        )

    def _check_data(self, compiled: Compiled) -> None:
        """Raise InputError if a stage of this process reads or writes a tensor without data, and
        RankError if at the first call it has other values in another replica. Then the memory of
        other ranks' parameters is given back."""
        self._calls.shown = self._calls.shown or compiled
        stages = filter(self._options.owns, range(len(compiled.plan.stages)))
        names = frozenset[str]().union(*map(compiled.names, stages))
        state = compiled.traced.state_of(self._options.model)
        names -= self._group.away(self._options, compiled)
        for name, tensor in state.items():
            if name in names and tensor.is_meta:
                kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
                raise InputError(
                    f"{kind} {name!r} has no data, as the model was built on the meta device, or "
                    "an earlier pipe over ranks left it to another rank; give the values first: "
                    "pipe.load(folder), pipe.load_state_dict(...), or pipe.reset_parameters(); "
                    "tensors that are in no state dict, or that no step reads, can be made with "
                    'data (device="cpu") where the model is built'
                )
        if self._calls.filled is None:
            self._group.same_weights({name: state[name] for name in names})
        self._group.release(self._options, compiled)
        self._calls.filled = compiled

    def _taken(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None, *, step: bool
    ) -> MicroBatches:
        """Check the arguments of a step or call, and split them into micro-batches.

        A batch has at most as many micro-batches as samples, unless a step's schedule has a fixed
        number of them. ``_ready`` lets all replicas have as many as the one with the fewest.
        """
        options, has_loss = self._options, self._options.loss is not None
        check_surroundings(step=step)
        targets = () if target is None else target if isinstance(target, tuple) else (target,)
        if targets and not has_loss:
            raise InputError(
                "there is a target but no loss to compare it with; give compile(..., "
                "loss=function), or leave out target"
            )
        asks = step and has_loss and not targets
        hint = "; what the loss compares with is given as step(..., target=...)" if asks else ""
        batch = Batch.of(options.model, args, kwargs, targets, options.batch_dims, hint)
        batch.check_devices("cpu", options.torch_devices[0].type)
        batch = self._compiler.numbered(batch)
        count = self._calls.microbatches
        fixed = step and options.recipe.microbatches is not None
        count = count if fixed else min(count, batch.size)
        return batch.in_parts(count, self._group.replica)

    def _ready(self, micro: MicroBatches, kind: Kind) -> tuple[Compiled, MicroBatches]:
        """Return the compiled program for a call on which all ranks agree, and its batch, split
        anew if the compiler decides so. While a call is compiled, nothing else runs."""
        known = self._compiler.known(micro, kind)
        if known is None and kind.purpose == "step" and self._compiler.decides(micro):
            with self._compiling():
                plain = micro.batch.without_numbers().in_parts(len(micro), micro.replica)
                count = self._compiler.decide(plain, updates=self._engine.updates)
            self._calls.microbatches = count
            micro = micro.batch.in_parts(count, micro.replica)
            known = self._compiler.known(micro, kind)
        counts = set[int]()
        while len(counts) != 1:  # replicas have as many micro-batches as the one with the fewest
            if counts:
                micro = micro.batch.in_parts(min(counts), micro.replica)
                known = self._compiler.known(micro, kind)
            called = self._engine, self._compiler, micro, kind, known, self._along(micro, known)
            compiles = self._group.same_call(*called, first=self._calls.shown is None)
            counts = {*self._group.gather("micro-batches", partial(len, micro))}
        if known is not None and not compiles:
            return known, micro
        with self._compiling():
            self._compiler.plans.proven |= self._engine.batches > 0
            compiled = None
            while compiled is None:
                try:
                    compiled = self._compiler.compile(micro, kind)
                except NumbersError:  # fewer are inputs then
                    batch = self._compiler.fixed(micro.batch)
                    micro = batch.in_parts(len(micro), micro.replica)
        allocator.give_back()
        return compiled, micro

    def _along(self, micro: MicroBatches, known: Compiled | None) -> dict[str, Any]:
        """What other ranks will ask for in this call, if nobody has to compile it."""
        along: dict[str, Any] = {"micro-batches": len(micro)}
        if known is not None and self._group.size > 1:
            along |= self._compiler.told(known, micro)
            if known.traced.seeded:
                along["seed"] = 0 if self._group.rank else next_seed()
        return along

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Inside, nothing else runs, and the time counts as that of compiling."""
        with self._engine.quiet(), naming_lacks(self._options, compiling=True):
            begin = perf_counter()
            try:
                yield
            finally:
                self._calls.compile_seconds += perf_counter() - begin
