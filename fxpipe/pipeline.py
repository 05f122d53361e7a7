"""``Pipeline``: a module that trains and runs a model over its devices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from fxpipe import views
from fxpipe.calls import Calls
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.lacking import naming_lacks
from fxpipe.compiler.options import Options
from fxpipe.compiler.residence import homes
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.extend import View
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.locks import locked
from fxpipe.parts import Parts
from fxpipe.signature import SignedLikeTheModel
from fxpipe.torchtools.meta import load_part
from fxpipe.torchtools.part import state_in_part
from fxpipe.torchtools.state import HOOKS


class Pipeline(nn.Module):
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
        super().__init__()
        model = options.model
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.devices = options.torch_devices
        self._options = options
        self._group = options.group
        self._compiler = compiler
        self._engine, self._lock = engine, engine._lock
        hooks = {name: vars(self)[name] for name in HOOKS}
        self._calls = Calls(options, compiler, engine, hooks)

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
        return self._calls.step(args, kwargs, target, return_output)

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
        return self._calls.forward(args, kwargs)

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
        self._calls.prepare(args, kwargs, target)

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

    @locked
    def state_dict(self, *args: Any, full: bool = False, **kwargs: Any) -> Any:
        """The model's state dict. Flushes first, so that it has the newest weights.

        Over several ranks, each rank has the newest weights of its own stages only. It returns the
        entries of its stages; the rank of stage 0 also returns those that belong to no stage.

        Args:
            *args: as for the model's ``state_dict``.
            **kwargs: the same.
            full: return all entries on every rank, as new tensors. Every rank has to call it then.
        """
        self._engine.flush()
        with self._engine.progress.true_weights(), state_in_part():
            state = self._model.state_dict(*args, **kwargs)
        if (own := self._owned()) is None:
            return state
        group, prefix = self._group, kwargs.get("prefix", "")
        part = own.part(self._model, state, prefix)
        changed = group.joined if full else group.shown
        with group.calling("state_dict") if full else nullcontext():
            for name, value in part.items():
                if isinstance(value, torch.Tensor):
                    part[name] = changed(name.removeprefix(prefix), value)
            if not full:
                return part
            gives = not group.column and (own.shared or not group.replica)
            parts = group.collect("state", part if gives else {})
        return own.joined(state, parts)

    @locked
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as the model's own method does. Flushes first; the next batch reads the
        loaded values.

        A rank loads the entries of its own stages and ignores all others, which may be missing. If
        the model was built on the meta device, loaded tensors get their memory here.
        """
        self._engine.flush()
        if self._group.size > 1:
            named = state_dict.items()
            tensor, group = torch.Tensor, self._group
            state_dict = {n: group.parted(n, x) if isinstance(x, tensor) else x for n, x in named}
        true = self._engine.progress.true_weights()
        if self._group.size == 1 and not self._options.hollow:
            with true:
                return self._model.load_state_dict(state_dict, *args, **kwargs)
        used, homes = self._used(), self._homes()
        with true, naming_lacks(self._options):
            return load_part(self._model, used, homes, state_dict, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Flush and load; ``load_state_dict`` of a module that holds the pipe calls this."""
        self._engine.flush()
        self._model._load_from_state_dict(*args, **kwargs)

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

    # the model's attributes

    @property
    def _model(self) -> nn.Module:
        return self._options.model

    @property
    def training(self) -> bool:
        """The model's mode; frameworks also set it by this attribute."""
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_options" in vars(self):  # else nn.Module.__init__ sets it
            self._model.training = mode

    if not TYPE_CHECKING:  # type checkers know all methods of a pipe, and tell a misspelt one

        def __getattr__(self, name: str) -> Any:
            if isinstance(view := vars(Pipeline).get(name), View):
                return view.__get__(self, Pipeline)  # its error again, which names the extension
            try:
                return super().__getattr__(name)
            except AttributeError:
                options = vars(self).get("_options")
                if options is None or name.startswith("__") or not hasattr(options.model, name):
                    raise
            apart = self._group.size > 1 or len({*options.places}) > 1
            over_stages = Parts.over_stages.get() if apart else None
            if over_stages is not None and (own := over_stages(self, name)) is not None:
                return own
            return self._group.attribute(options.model, getattr(options.model, name))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Refuse ``to``, ``cuda``, ``half`` and the like, unless they change nothing."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            with suppress(Exception):  # such as .cuda() without CUDA
                if tensor.is_meta or fn(tensor) is tensor:
                    continue
            raise InputError(
                f"a compiled model cannot be moved or cast, as {name!r} ({tensor.dtype} on "
                f"{tensor.device}) would be: its graphs hold devices and types; close() the pipe, "
                "change the model, and compile it again, or keep a framework from placing it"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a pipe cannot be copied or pickled: it has threads and traced graphs; save its "
            "state_dict() and compile a new one, or copy.deepcopy(pipe), which copies the model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Flush, and copy the model, as for ``torch.optim.swa_utils.AveragedModel``."""
        self._engine.flush()
        with self._engine.progress.true_weights():
            return copy.deepcopy(self._model, memo)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that only the model has (a flag that its code reads) in the model."""
        options = vars(self).get("_options")
        in_pipe = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if options is None or in_pipe or not hasattr(options.model, name):
            super().__setattr__(name, value)
        else:
            setattr(options.model, name, value)

    def _owned(self) -> Any:
        """The tensors that this rank owns or uses, by an extension; None for all."""
        return self._group.owned(self._model, self._calls.shown, self._options)

    def _homes(self) -> dict[torch.Tensor, torch.device]:
        """The tensors that have a device with memory of its own."""
        return homes(self._options, self._calls.shown)

    def _used(self) -> dict[int, torch.Tensor]:
        """Id → parameter or buffer, for those whose values this process needs."""
        if (own := self._owned()) is not None:
            needed: dict[int, torch.Tensor] = own.needed(self._model)
            return needed
        return {id(x): x for x in (*self._model.parameters(), *self._model.buffers())}
