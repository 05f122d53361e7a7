"""The pipeline: a module that trains and runs the model over its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fxpipe.batch import Batch
from fxpipe.call import differentiable_call
from fxpipe.compiler import Compiled, Compiler, Purpose
from fxpipe.cpu import Worker
from fxpipe.errors import InputError
from fxpipe.execution import Execution
from fxpipe.host import BatchHost, draw_seed, next_seed
from fxpipe.optimizer import OptimizerFactory, make_optimizer
from fxpipe.plan import Plan
from fxpipe.program import Program
from fxpipe.schedule import Schedule, find_recipe
from fxpipe.table import stage_table
from fxpipe.traced import Value
from fxpipe.weights import LiveWeights

Recipes = Callable[[int, int], Schedule]


class Pipeline(nn.Module):
    """A model cut into stages over devices. Make one with ``fxpipe.compile``.

    It has the model's own parameters, buffers and submodules under their own names, so state
    dicts move both ways. ``step`` trains on one batch; calling it is the model's forward.

    Attributes:
        devices: where the stages are, in order.
    """

    _model: nn.Module
    _compiler: Compiler

    def __init__(
        self,
        model: nn.Module,
        compiler: Compiler,
        devices: Sequence[torch.device],
        recipe: Recipes,
        microbatches: int | None,
        optimizer: OptimizerFactory | None,
        threads: int,
    ) -> None:
        super().__init__()
        # the very dictionaries of the model: one module under two names, with the same keys
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        # set past nn.Module, which would register the model as a submodule of itself
        self.__dict__.update(_model=model, _compiler=compiler)
        self.devices = tuple(devices)
        self._recipe = recipe
        self._microbatches = microbatches
        self._factory = optimizer
        self._optimizers: tuple[Optimizer | None, ...] | None = None
        self._shown: Compiled | None = None
        self._stashed: Mapping[int, int] = {}
        self._workers = [Worker(f"fxpipe-{index}", threads) for index in range(len(self.devices))]
        self._closed = False

    # training and calling

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_output: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Train on one batch: forward, backward and, with an optimizer, the update.

        Args:
            *args: the model's positional inputs; tensors with dimension 0 = batch.
            target: what the loss compares with: a tensor, or a tuple of them.
            return_output: also return the model's output for the whole batch.
            **kwargs: the model's keyword inputs.

        Returns:
            The loss of the batch, a detached scalar: the mean over micro-batches, each weighted
            by its samples. With ``return_output`` the pair (loss, detached output).

        Raises:
            InputError: inputs, target or loss do not fit.
            TraceError: the first call of its kind: the model or the loss cannot be traced.
            ExecutionError: something raised while it ran; the weights are as before the step.
        """
        batch = self._batch(args, kwargs, target)
        microbatches = self._count(batch)
        compiled = self._compiler.compile(
            batch, microbatches, self._recipe, "step", updates=self._factory is not None
        )
        traced = compiled.traced
        assert traced.loss is not None
        names = {out.name for out in traced.outputs if isinstance(out, Value)}
        names &= compiled.plan.results
        keep = frozenset({traced.loss} | (names if return_output else set()))
        host = BatchHost(traced, batch, microbatches, keep, next_seed(traced))
        host.weigh_loss(traced.loss, compiled.plan.specs[traced.loss].dtype)
        optimizers = self._make_optimizers(compiled.plan)
        execution = self._execution(compiled, host, optimizers, onto_grad=self._factory is None)

        def result() -> Any:
            assert traced.loss is not None
            draw_seed(traced)
            loss = host.loss(traced.loss)
            return (loss, host.output()) if return_output else loss

        made = execution.advance(result)
        self._shown, self._stashed = compiled, execution.peak_kept
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch.

        In eval mode or without gradients, inference. In training mode the output is
        differentiable: calling ``backward`` on something computed from it drains the pipeline.
        """
        batch = self._batch(args, kwargs, None)
        differentiable = self.training and torch.is_grad_enabled()
        microbatches = min(self._count(batch, clip=True), batch.size)
        purpose: Purpose = "call" if differentiable else "infer"
        recipe = find_recipe("gpipe" if differentiable else "inference")
        compiled = self._compiler.compile(
            batch, microbatches, recipe, purpose, input_gradients=differentiable
        )
        names = frozenset(
            out.name
            for out in compiled.traced.outputs
            if isinstance(out, Value) and out.name in compiled.plan.results
        )
        host = BatchHost(compiled.traced, batch, microbatches, names, next_seed(compiled.traced))
        none = [None] * len(compiled.plan.stages)
        execution = self._execution(compiled, host, none, onto_grad=False)
        if differentiable:
            output = differentiable_call(compiled, host, execution, batch)
        else:

            def result() -> list[Any]:
                draw_seed(compiled.traced)
                return host.flat_output()

            output = execution.advance(result)
        self._shown = self._shown or compiled
        return pytree.tree_unflatten(output, compiled.traced.out_spec)

    # what can be looked at

    @property
    def plan(self) -> Plan:
        """The stages and edges of the last training step, or of what was compiled first."""
        return self._compiled().plan

    @property
    def schedule(self) -> Schedule:
        """The schedule of the last training step."""
        return self._compiled().schedule

    @property
    def program(self) -> Program:
        """The program of the last training step."""
        return self._compiled().program

    @property
    def stashed(self) -> Mapping[int, int]:
        """Stage → the most micro-batches that it kept for backward at once, as counted in the
        last training step."""
        return dict(self._stashed)

    @property
    def optimizers(self) -> tuple[Optimizer | None, ...]:
        """Stage → its optimizer, once the first step or ``example`` has made them; for learning
        rate schedulers. None for a stage without parameters."""
        if self._factory is None:
            raise InputError("the pipe has no optimizer; give compile(..., optimizer=...)")
        return self._make_optimizers(self._compiled().plan)

    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """Trace and compile for inputs like these, without running a step."""
        batch = self._batch(args, kwargs, target)
        can_step = target is not None or self._compiler.loss is None
        microbatches = self._count(batch)
        if can_step and self.training:
            try:
                self._shown = self._compiler.compile(
                    batch, microbatches, self._recipe, "step", updates=self._factory is not None
                )
                return
            except InputError:
                if self._compiler.loss is not None:
                    raise
        self._shown = self._compiler.compile(
            batch, microbatches, find_recipe("gpipe"), "call", input_gradients=True
        )

    def __repr__(self) -> str:
        """The table of stages."""
        return stage_table(self._model, self._shown, self.devices)

    # the model's state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own: its keys, its shapes."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into the model, as its own."""
        return self._model.load_state_dict(state_dict, *args, **kwargs)

    def train(self, mode: bool = True) -> Pipeline:
        """Switch the model's mode; each mode has graphs of its own."""
        self._model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise InputError(
            "a compiled model cannot be moved or cast: its graphs hold its devices and types; "
            "close() the pipe, change the model, and compile it again"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a pipe cannot be copied or pickled: it has threads and traced graphs; save its "
            "state_dict() and compile a new one"
        )

    # its life

    def close(self) -> None:
        """End the worker threads and let the model be compiled again; the pipe is done."""
        self._closed = True
        for worker in self._workers:
            worker.close()

    @property
    def closed(self) -> bool:
        """Whether the pipe is done."""
        return self._closed

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # inside

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Batch:
        if self._closed:
            raise InputError("the pipe is closed; compile the model again")
        targets = () if target is None else target if isinstance(target, tuple) else (target,)
        if targets and self._compiler.loss is None:
            raise InputError(
                "there is a target but no loss to compare it with; give compile(..., "
                "loss=function), or leave out target"
            )
        batch = Batch.of(self._model, args, kwargs, targets)
        for name, leaf in zip(batch.names, batch.leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                raise InputError(f"{name} is on {leaf.device}; move it to the CPU ({name}.cpu())")
        return batch

    def _count(self, batch: Batch, clip: bool = False) -> int:
        if self._microbatches is None:
            return min(4 * len(self.devices), batch.size)
        return min(self._microbatches, batch.size) if clip else self._microbatches

    def _execution(
        self,
        compiled: Compiled,
        host: BatchHost,
        optimizers: Sequence[Optimizer | None],
        *,
        onto_grad: bool,
    ) -> Execution:
        state = self._compiler.state(compiled.traced)
        weights = LiveWeights(compiled.plan.stages, state, optimizers, onto_grad=onto_grad)
        return Execution(
            compiled.program, compiled.plan, compiled.kernels, host, weights, self._workers
        )

    def _make_optimizers(self, plan: Plan) -> tuple[Optimizer | None, ...]:
        if self._factory is None:
            return (None,) * len(plan.stages)
        if self._optimizers is None:
            state = dict(self._model.named_parameters(remove_duplicate=False))
            made: list[Optimizer | None] = []
            for stage in plan.stages:
                parameters = [state[argument.target] for argument in stage.parameters]
                made.append(make_optimizer(self._factory, parameters) if parameters else None)
            self._optimizers = tuple(made)
        return self._optimizers

    def _compiled(self) -> Compiled:
        if self._shown is None:
            raise InputError(
                "nothing is compiled yet; call step once, or give compile(..., example=inputs)"
            )
        return self._shown
