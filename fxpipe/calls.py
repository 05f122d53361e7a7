"""The way of a batch: from the arguments of a call to its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from fxpipe.compiler.compiled import Compiled, Kind
from fxpipe.compiler.compiler import Change, Compiler, NumbersError
from fxpipe.compiler.lacking import naming_lacks
from fxpipe.compiler.options import Options
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.parts import Parts
from fxpipe.runtime.batch import Batch, MicroBatches, check_gradients, check_surroundings
from fxpipe.runtime.host import next_seed
from fxpipe.runtime.loss import StepLoss
from fxpipe.signals import HeldSignals
from fxpipe.torchtools import allocator
from fxpipe.torchtools.pytrees import together


class Stepped(NamedTuple):
    """The loss of a step, and its seconds: those for which it compiled, and the rest."""

    loss: Any
    seconds: float
    compile_seconds: float


class Calls:
    """Takes the calls of a pipe: checks the arguments, splits them into micro-batches, compiles
    what no earlier call was like, and has the engine run it. See ``Pipeline``, also for errors.

    Attributes:
        shown: the last training step; before the first one, the call that was compiled first.
        last: what the last call of ``step`` has given; None before it, and after a failure.
    """

    def __init__(
        self,
        options: Options,
        compiler: Compiler,
        engine: Engine,
        hooks: Mapping[str, Mapping[int, Any]],
    ) -> None:
        """``hooks`` are those of the pipe itself, by the name of their attribute."""
        self.shown: Compiled | None = None
        self.last: Stepped | None = None
        self._options, self._compiler, self._engine = options, compiler, engine
        self._group = options.group
        self._hooks = hooks
        self._filled: Compiled | None = None  # a call whose parameters and buffers have data
        self._steps, self._first = 0, list[int]()  # and the step that compiled first
        self._recompiles: Any = None  # counts the steps that compile anew, by an extension
        self._compile_seconds = 0.0  # for which the last step compiled
        self._microbatches = options.microbatches or 4 * len(options.torch_devices)
        self._fixed = options.recipe.microbatches is not None

    def step(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, return_output: bool
    ) -> Any:
        """Train on a batch; returns its loss, or loss and output."""
        with HeldSignals() as signals, self._group.calling("step", exchanges=True):
            self.last, begin, meter = None, perf_counter(), self._engine.meter
            if meter is not None:
                meter.begin()
            if any(self._hooks.values()):
                self._refuse_hooks()
            self._engine.check()
            micro = self.taken(args, kwargs, target, step=True)
            check_gradients()
            kind = Kind("step", self._engine.updates, return_output)
            self._compile_seconds = 0.0
            # several ranks agree on each call first
            compiled = self._compiler.known(micro, kind) if self._group.size == 1 else None
            if compiled is None:
                compiled, micro = self._ready(micro, kind)
            self._steps += 1
            if self._compiler.change is not None:
                self._note(self._compiler.change)
            elif self._compile_seconds:
                self._first = [self._steps]
            if compiled is not self._filled:
                self._check_data(compiled)
            compiled, micro, watch = self._compiler.weighed(compiled, micro)
            result = self._engine.step(compiled, micro, with_output=return_output, watch=watch)
            self.shown = compiled
            loss, compiling = result[0] if return_output else result, self._compile_seconds
            result = (StepLoss.of(loss), *result[1:]) if return_output else StepLoss.of(loss)
            self.last = Stepped(loss, perf_counter() - begin - compiling, compiling)
            if meter is not None:
                meter.program = compiled.program
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose results are kept")
        return result

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward; returns its output, differentiable in training mode."""
        with self._group.calling("pipe(...)"):
            self._engine.check()
            micro = self.taken(args, kwargs, step=False)
            self._engine.flush()
            differentiable = self._options.model.training and torch.is_grad_enabled()
            compiled, micro = self._ready(micro, Kind("call" if differentiable else "infer"))
            if compiled is not self._filled:
                self._check_data(compiled)
            compiled, micro, _ = self._compiler.weighed(compiled, micro)
            run = self._engine.call if differentiable else self._engine.infer
            output = run(compiled, micro)
        return together(output, compiled.traced.out_spec)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> None:
        """Compile a step for a batch, or without a target for the loss the model's call."""
        with self._group.calling("prepare"):
            self._engine.check()
            micro = self.taken(args, kwargs, target, step=True)
            has_loss = self._options.loss is not None
            if (target is not None or not has_loss) and self._options.model.training:
                try:
                    kind = Kind("step", self._engine.updates, outputs=False)
                    self.shown, _ = self._ready(micro, kind)
                    return
                except InputError:
                    if has_loss:
                        raise
            self.shown, _ = self._ready(micro, Kind("call"))

    def compiled(self) -> Compiled:
        """The call that is shown. Raises InputError if nothing is compiled yet."""
        if self.shown is None:
            raise InputError(
                "nothing is compiled yet; call step once, or give compile(..., example=inputs)"
            )
        return self.shown

    def _note(self, change: Change) -> None:
        """Note that a step was compiled anew."""
        if self._recompiles is None and (make := Parts.recompiles.get()) is not None:
            self._recompiles = make(self._first)
        if self._recompiles is not None:
            self._recompiles.note(type(self._options.model).__name__, self._steps, change)

    def _refuse_hooks(self) -> None:
        """Raise InputError, as the pipe itself has hooks, which a step would not call."""
        hooks = [name.strip("_").replace("_", " ") for name, own in self._hooks.items() if own]
        raise InputError(
            f"the pipe has {' and '.join(hooks)}, which a step would not run, as it calls no "
            "module; remove them, or register forward hooks on the model, which are traced "
            "with it, or train by pipe(x) and backward, which run the hooks of the pipe"
        )

    def _check_data(self, compiled: Compiled) -> None:
        """Raise InputError if a stage of this process reads or writes a tensor without data, and
        RankError if at the first call it has other values in another replica. Then the memory of
        other ranks' parameters is given back."""
        self.shown = self.shown or compiled
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
        if self._filled is None:
            self._group.same_weights({name: state[name] for name in names})
        self._group.release(self._options, compiled)
        self._filled = compiled

    def taken(
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
        count = self._microbatches
        count = count if step and self._fixed else min(count, batch.size)
        return batch.in_parts(count, self._group.replica)

    def _ready(self, micro: MicroBatches, kind: Kind) -> tuple[Compiled, MicroBatches]:
        """Return the compiled program for a call on which all ranks agree, and its batch, split
        anew if the compiler decides so. While a call is compiled, nothing else runs."""
        known = self._compiler.known(micro, kind)
        if known is None and kind.purpose == "step" and self._compiler.decides(micro):
            with self._compiling():
                plain = micro.batch.without_numbers().in_parts(len(micro), micro.replica)
                count = self._compiler.decide(plain, updates=self._engine.updates)
            self._microbatches = count
            micro = micro.batch.in_parts(count, micro.replica)
            known = self._compiler.known(micro, kind)
        counts = set[int]()
        while len(counts) != 1:  # replicas have as many micro-batches as the one with the fewest
            if counts:
                micro = micro.batch.in_parts(min(counts), micro.replica)
                known = self._compiler.known(micro, kind)
            called = self._engine, self._compiler, micro, kind, known, self._along(micro, known)
            compiles = self._group.same_call(*called, first=self.shown is None)
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
                along["seed"] = 0 if self._group.rank else next_seed(known.traced)
        return along

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Inside, nothing else runs, and the time counts as that of compiling."""
        with self._engine.quiet(), naming_lacks(self._options, compiling=True):
            begin = perf_counter()
            try:
                yield
            finally:
                self._compile_seconds += perf_counter() - begin
