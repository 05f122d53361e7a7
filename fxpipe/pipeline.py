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
from fxpipe.runtime.ranks.group import refuse_on_ranks
from fxpipe.runtime.ranks.message import digest
from fxpipe.runtime.weights import checkpoint_file, checkpoint_folder
from fxpipe.runtime.weights.checkpoint import Checkpoint
from fxpipe.runtime.weights.initial import Initialise, initialise
from fxpipe.signals import SignalsAtOperations
from fxpipe.simulator import Simulation
from fxpipe.simulator.simulate import measured_run
from fxpipe.torchtools.meta import allocated
from fxpipe.torchtools.pytrees import together
from fxpipe.turn import in_turn


class Pipeline(Inspected):
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
        self._hollow = options.hollow > 0
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
            The loss of the batch, a detached scalar: the mean over micro-batches, each weighted by
            its samples or its targets that count; see ``compile``. Where batches overlap it may not
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
        with SignalsAtOperations() as signals, self._group.calling("step"):
            micro = self._take(args, kwargs, target, step=True)
            compiled = self._ready(
                micro, "step", updates=self._engine.updates, outputs=return_output
            )
            self._check_data(compiled)
            micro = self._compiler.weighed(compiled, micro)
            if not all(micro.weights):
                compiled = compiled.weighted(micro.weights)
            made = self._engine.step(compiled, micro, with_output=return_output)
            self._shown = compiled
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

    @in_turn
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch.

        In eval mode or without gradients, inference. In training mode the output is
        differentiable: calling ``backward`` on something computed from it drains the pipeline.
        Batches in flight are finished first. ``torch.compile`` leaves this method uncompiled.

        Args:
            *args: the model's positional inputs, split as in ``step``.
            **kwargs: its keyword inputs.

        Returns:
            The model's output for the whole batch, joined as in ``step``.

        Raises:
            InputError, TraceError, ExecutionError: as in ``step``.
        """
        with self._group.calling("call of the pipe"):
            micro = self._take(args, kwargs, step=False)
            self.flush()
            differentiable = self.training and torch.is_grad_enabled()
            purpose: Purpose = "call" if differentiable else "infer"
            compiled = self._ready(micro, purpose, input_gradients=differentiable)
            self._check_data(compiled)
            run = self._engine.call if differentiable else self._engine.infer
            output = run(compiled, micro)
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
        with self._group.calling("prepare"):
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
        """Train on a batch as ``step`` does and measure it: ``simulate`` with measured times.

        Args:
            *args: the model's inputs; the target may be the last of them.
            target: what the loss compares with.
            steps: how many steps to run and measure.
            **kwargs: the model's keyword inputs.

        Returns:
            The times of all instructions in seconds. Its ``costs`` are the times of the stages
            while all of them ran at once, and can be given to ``simulate``. Its ``memory`` is
            predicted as in ``simulate``, from the measured times.

        Raises:
            InputError: as in ``step``, or ``steps`` is below 1.
        """
        if steps < 1:
            raise InputError(f"steps is {steps}; a profile needs at least 1")
        if target is None and self._options.loss is not None:
            args, target = split_target(self._model, args, kwargs)
        with (
            self._group.calling("profile"),
            self._engine.timed(len(self.devices)) as times,
        ):
            for _ in range(steps):
                self.step(*args, target=target, **kwargs)
        return measured_run(self.program, steps, times, self._engine.held(self._compiled()))

    # the model's state

    @in_turn
    def state_dict(self, *args: Any, full: bool = False, **kwargs: Any) -> Any:
        """The model's own state dict. Flushes first, so that it is the newest version.

        Args:
            *args: as of the model's own.
            full: over several ranks, which each have the newest weights of their own stages only:
                all of the model on every rank, as new tensors; every rank has to call it. Otherwise
                a rank returns what its stages own, and rank 0 also what belongs to no stage.
            **kwargs: as of the model's own.
        """
        self.flush()
        state = self._model.state_dict(*args, **kwargs)
        if self._group.size == 1:
            return state
        owned = self._owned()
        kept = self._model.state_dict(keep_vars=True, prefix=kwargs.get("prefix", ""))
        own = {name: value for name, value in state.items() if id(kept.get(name)) in owned}
        if not full:
            return own
        with self._group.calling("state_dict"):
            parts = self._group.exchange("state", own)
        found = {name: value for part in parts for name, value in part.items()}
        return {name: found[name] for name in state}

    def _owned(self) -> set[int]:
        """The ids of the parameters and buffers that this rank keeps up to date."""
        compiled = self._compiled()
        model = self._model
        state: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        state |= dict(model.named_buffers(remove_duplicate=False))
        own: set[int] = set()
        others: set[int] = set()
        for stage in range(len(compiled.plan.stages)):
            found = {id(state[name]) for name in compiled.names(stage) if name in state}
            (own if self._options.owns(stage) else others).update(found)
        return own if self._group.rank else {id(x) for x in state.values()} - (others - own)

    @in_turn
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the model's own. Flushes first; the next batch reads what was loaded.

        A rank takes what its own stages have, and passes over the rest, which may be missing. Where
        the model was built on the meta device, what is loaded gets its memory here.
        """
        self.flush()
        if self._group.size == 1 and not self._options.hollow:
            return self._model.load_state_dict(state_dict, *args, **kwargs)
        used, kept = self._used(), self._model.state_dict(keep_vars=True)
        others = {
            name: value
            for name, value in kept.items()
            if isinstance(value, torch.Tensor) and id(value) not in used
        }
        loaded = [used[id(v)] for name, v in kept.items() if name in state_dict and id(v) in used]
        with allocated(loaded):
            return self._model.load_state_dict({**state_dict, **others}, *args, **kwargs)

    @in_turn
    def reset_parameters(self, function: Initialise | None = None) -> None:
        """Give parameters and buffers their initial values, as one process would draw them.

        A model that was built on the meta device gets its memory here: a rank allocates what its
        own stages have. It draws the numbers of all others as well, one tensor at a time, so that
        the values are the same to the bit for any number of ranks, and go on from the state of
        torch's generator on rank 0. So they are those of the same model built on the CPU after the
        same ``torch.manual_seed``, if every module's constructor makes its tensors, then its
        submodules in the order in which it registers them, and last calls its
        ``reset_parameters``, as PyTorch's own layers do. What else a constructor draws is not
        known: ``nn.TransformerEncoder`` copies its first layer, and here each layer draws. Of a
        tied weight the values of the first module that has it stay.

        Args:
            function: called with each module, after the modules inside of it, as by
                ``model.apply``; without it ``reset_parameters`` of each module that has it.

        Raises:
            InputError: nothing is compiled yet, so that the stages are not known; a function
                fails; or a tensor without data gets no values. It has no data then, as before.
        """
        with self._group.calling("reset_parameters"):
            self.flush()
            used = self._used().values()
            torch.set_rng_state(self._group.share("generator", torch.get_rng_state))
            initialise(self._model, used, function)

    @in_turn
    def checkpoint(self, path: str | os.PathLike[str], *, extra: Any = None) -> None:
        """Write to a file all that training needs to go on as if not interrupted. Flushes first.

        That is the weights, in all versions that later batches read, the buffers, the optimizers'
        state, the states of torch's generators for the CPU and the pipe's devices, and the number
        of batches; without an optimizer also ``.grad``. Everything is stored under its name in the
        model, so training can go on with any partition. The file is in safetensors format, without
        code and with a checksum. It is replaced atomically, so other processes may read it.

        Args:
            path: the path of the file.
            extra: anything else to keep, which ``restore`` returns: the state of a learning-rate
                scheduler or of ``random``, an epoch. Tensors, numbers, strings, and lists, tuples
                and dicts of them.

        Raises:
            CheckpointError: the file cannot be written, or cannot hold ``extra``; an older file
                stays as it is.
        """
        self.flush()
        checkpoint_file.write(self._engine.progress.checkpoint(extra), path)

    @in_turn
    def restore(self, path: str | os.PathLike[str]) -> Any:
        """Go on from a checkpoint, at any time, on any number of devices.

        Everything is checked before anything changes; each optimizer first makes a step on a copy
        of its restored state. If the optimizer function makes different optimizers for different
        stages, call ``prepare`` first. A learning-rate scheduler changes its optimizer when it is
        constructed: call ``prepare``, make the schedulers over ``optimizers``, restore, and load
        their states from ``extra``.

        Returns:
            The ``extra`` that ``checkpoint`` was given.

        Raises:
            CheckpointError: the file is no checkpoint, damaged, or of another model or optimizer.
                Nothing has changed.
        """
        self._engine.check()
        self.flush()
        return self._go_on_from(checkpoint_file.read(path))

    @in_turn
    def save(self, folder: str | os.PathLike[str], extra: Any = None) -> None:
        """Write to a folder all that training needs to go on as if not interrupted. Flushes first.

        It has what ``checkpoint`` writes to a file, as a folder of ``torch.distributed.checkpoint``
        (DCP) with the model's own names, which also runs without this library can read::

            torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, "run.pt")
            model.load_state_dict(torch.load("run.pt")["model"])

        An older folder is replaced once the new one is complete and on disk.

        Args:
            folder: the path of the folder, which may hold an older checkpoint, and nothing else.
            extra: anything else to keep, which ``load`` returns; as in ``checkpoint``.

        Raises:
            CheckpointError: the folder cannot be written, or cannot hold ``extra``; an older
                checkpoint stays as it is.
        """
        refuse_on_ranks(self._group, "save", "keep pipe.state_dict(full=True) instead")
        self.flush()
        saved = self._engine.progress.checkpoint(extra)
        checkpoint_folder.write(saved, self._model.state_dict(), folder, self._group)

    @in_turn
    def load(self, folder: str | os.PathLike[str]) -> Any:
        """Go on from a folder that ``save`` wrote, on any number of devices; see ``restore``.

        Returns:
            The ``extra`` that ``save`` was given.

        Raises:
            CheckpointError: it is no such folder, or damaged, or of another model or optimizer.
                Nothing has changed.
        """
        refuse_on_ranks(self._group, "load", "use pipe.load_state_dict() instead")
        self._engine.check()
        self.flush()
        return self._go_on_from(checkpoint_folder.read(folder))

    @in_turn
    def train(self, mode: bool = True) -> Pipeline:
        """Switch the model's mode; each mode has graphs of its own. Flushes first."""
        self.flush()
        self._model.train(mode)
        self.training = mode
        return self

    # its life

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

    def _take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, *, step: bool
    ) -> MicroBatches:
        self._engine.check()
        return self._intake.take(args, kwargs, target, step=step)

    def _go_on_from(self, saved: Checkpoint) -> Any:
        with allocated(self._used().values() if self._options.hollow else ()):
            self._engine.progress.restore(saved, self._shown.plan if self._shown else None)
        return saved.extra

    def _used(self) -> dict[int, torch.Tensor]:
        """The parameters and buffers whose values this process needs, by their ids."""
        model = self._model
        tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
        if self._group.size == 1:
            return tensors
        if self._shown is None:
            raise InputError(
                "nothing is compiled yet, so that it is not known which stages this rank has; give "
                "compile(..., example=inputs), or call prepare(inputs) first"
            )
        owned = self._owned()
        return {key: tensor for key, tensor in tensors.items() if key in owned}

    def _check_data(self, compiled: Compiled) -> None:
        """Raises InputError where a stage of this process has a parameter or buffer without data.

        It passes once for all: no tensor loses its data again.
        """
        self._shown = self._shown or compiled
        used = self._used() if self._hollow else {}
        model = self._model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()) if used else ():
            if id(tensor) in used and tensor.is_meta:
                kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
                raise InputError(
                    f"{kind} {name!r} has no data, as the model was built on the meta device; give "
                    "the values first: pipe.load(folder), pipe.load_state_dict(...), or "
                    "pipe.reset_parameters(); a buffer that is in no state dict can be made with "
                    'data (device="cpu") where the model is built'
                )
        self._hollow = False

    def _ready(self, micro: MicroBatches, purpose: Purpose, **wanted: bool) -> Compiled:
        """The compiled program for a call; while it is compiled, nothing else runs."""
        known = self._compiler.known(micro, purpose, **wanted)
        if self._group.size > 1:
            self._group.agree("the call", self._described(micro, purpose, known is None))
        if known is not None:
            return known
        with self._engine.quiet():
            return self._compiler.compile(micro, purpose, **wanted)

    def _described(self, micro: MicroBatches, purpose: Purpose, compiles: bool) -> str:
        """What must be the same on all ranks for this call; at the first, also the values."""
        batch = micro.batch
        shown = [
            f"{tuple(leaf.shape)} {leaf.dtype}" + (f", {digest(leaf)}" if compiles else "")
            if isinstance(leaf, torch.Tensor)
            else repr(leaf)
            for leaf in batch.leaves
        ]
        lines = [
            f"{purpose} of {batch.size} samples in {len(micro)} micro-batches",
            f"batch number {self._engine.batches}",
            f"the pipe is in {'training' if self.training else 'evaluation'} mode",
            "it is compiled anew" if compiles else "it is compiled already",
            *(f"{name}: {leaf}" for name, leaf in zip(batch.names, shown, strict=True)),
        ]
        return "\n".join(lines)
