"""The optimizers of the stages, made when the stages are known, and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from fxpipe.errors import CheckpointError, InputError
from fxpipe.ir.plan import Plan
from fxpipe.runtime.weights.optimizer import GivenOptimizer
from fxpipe.runtime.weights.optimizer_state import OptimizerState, check, loading, take
from fxpipe.runtime.weights.sharding import Shards, refuse_others
from fxpipe.runtime.weights.whole import WholeOptimizer


class StageOptimizers:
    """The optimizers of the stages, and the one that stands for all of them.

    Attributes:
        made: stage → its optimizer; None before the first plan.
        whole: the one that stands for all; None where nobody has given it or asked for it.
        shards: optimizer → the parts of parameters that it trains in place of the whole.
    """

    def __init__(
        self,
        model: nn.Module,
        given: GivenOptimizer,
        owns: Callable[[int], bool],
        flush: Callable[[], None],
        shard: tuple[int, int] | None,
    ) -> None:
        """No stage is known yet.

        Args:
            model: the model.
            given: makes the optimizers.
            owns: whether this process trains a stage.
            flush: a method that finishes the batches in flight.
            shard: this replica's number and how many there are, where each updates a part of the
                weights.
        """
        self.made: tuple[Optimizer | None, ...] | None = None
        self._model = model
        self._given = given
        self._owns = owns
        self._flush = flush
        self._shard = shard
        self.shards: WeakKeyDictionary[Optimizer, Shards] = WeakKeyDictionary()
        self.whole = (
            None if given.whole is None else WholeOptimizer(given.whole, flush, self.shards)
        )
        self._others: set[str] = set()
        self._saved: OptimizerState | None = None  # of a checkpoint, until a plan is known

    def close(self) -> None:
        """Leave the one optimizer to its user."""
        if self.whole is not None:
            self.whole.close()

    def make(self, plan: Plan) -> tuple[Optimizer | None, ...]:
        """Make them for the stages of the first plan, which all plans have.

        Raises:
            InputError: the user's function returns no optimizer, or a wrong one.
            CheckpointError: an optimizer cannot load the state that was restored.
        """
        made = self._make(plan)
        if self._saved is not None and self._saved.parameters:
            self._loading(self._saved, made)()
        self.made, self._saved = made, None
        if self.whole is not None:
            self.whole.link(made, theirs=False)
        return made

    def one(self) -> Optimizer:
        """The optimizer that stands for those of all stages.

        Raises:
            InputError: the user's function makes none for all parameters that they are parts of.
            CheckpointError: it cannot load the state that was restored.
        """
        if self.whole is not None:
            self.whole.push()
            self.whole.gather()
            return self.whole.optimizer
        self._flush()
        whole = WholeOptimizer(self._given.of_all(), self._flush, self.shards)
        if self.made is not None:
            whole.link(self.made, theirs=True)
        self._given.whole, self.whole = whole.optimizer, whole
        if self._saved is not None:
            self.restoring(self._saved, None)()
        return whole.optimizer

    def state(self) -> OptimizerState:
        """The state for a checkpoint; no batch may be in flight.

        Raises:
            CheckpointError: an optimizer keeps something that belongs to no parameter.
        """
        if self._saved is not None:
            return self._saved
        whole = None if self.whole is None else self.one()
        made = [*filter(None, self.made or ())]
        names, parts = self._names(), [self.shards[each] for each in made if each in self.shards]
        if whole is not None and whole.state and self.made is None:
            made = [whole]
        state = take(made, {**names, **_named(parts, names)})
        for own in parts:
            state = own.told(state, names)
        return state

    def restoring(self, saved: OptimizerState, plan: Plan | None) -> Callable[[], None]:
        """Check that the optimizers can go on from a state; the plan has the stages, if they are
        known. Returns a function that loads the state.

        Raises:
            CheckpointError: the state is of other optimizers.
            InputError: the user's function returns no optimizer for a stage.
        """
        names = self._names()
        saved = self._without_others(saved)
        optimizers = self.made
        if self.whole is not None and not (self._shard and (optimizers or plan)):
            return self._restoring_whole(self.whole, saved, names)
        if optimizers is None and plan is not None:
            optimizers = self._make(plan)
        if optimizers is not None and saved.parameters:
            load = self._loading(saved, optimizers)

            def put() -> None:
                load()
                self.made, self._saved = optimizers, None
                if self.whole is not None:
                    self.whole.link(optimizers, theirs=True)

            return put
        own = {name: p for p, name in names.items() if name in saved.parameters}
        try:
            check(saved, [self._given.of(own) if own else None], names)
        except InputError as error:
            raise CheckpointError(
                f"before there are stages nothing tells whether the optimizer fits: {error}; call "
                "prepare() before restore()"
            ) from error

        def keep() -> None:
            self.made, self._saved = None, saved

        return keep

    def _restoring_whole(
        self, whole: WholeOptimizer, saved: OptimizerState, names: Mapping[nn.Parameter, str]
    ) -> Callable[[], None]:
        """The same for the one optimizer, which hands it to those of the stages."""
        wanted = {*saved.parameters}
        for optimizer in filter(None, self.made or ()) if wanted else ():
            wanted |= {names[p] for group in optimizer.param_groups for p in group["params"]}
        # as if one stage had all of them
        sample = self._given.of({name: p for p, name in names.items() if name in wanted})
        load = loading(saved, [sample], names)

        def put() -> None:
            load()
            whole.link([sample], theirs=True)
            self._saved = None
            if self.made is not None:
                whole.link(self.made, theirs=False)
                whole.hand_out()

        return put

    def _make(self, plan: Plan) -> tuple[Optimizer | None, ...]:
        state = dict(self._model.named_parameters(remove_duplicate=False))
        stages = [{a.target: state[a.target] for a in own.parameters} for own in plan.stages]
        owned = [own if self._owns(index) else {} for index, own in enumerate(stages)]
        names = self._names()
        self._others = {names[p] for own in stages for p in own.values()} - {
            names[p] for own in owned for p in own.values()
        }
        made = tuple(self._given.of(own) if own else None for own in owned)
        for optimizer, parameters in zip(made, owned, strict=True):
            if optimizer is not None and self._shard is not None:
                refuse_others(optimizer)
                self.shards[optimizer] = Shards(optimizer, [*parameters.values()], *self._shard)
        return made

    def _loading(
        self, saved: OptimizerState, optimizers: Sequence[Optimizer | None]
    ) -> Callable[[], None]:
        """The same as ``loading`` for the optimizers of stages, which may train parts."""
        names, saved = self._names(), self._without_others(saved)
        made = filter(None, optimizers)
        parts = [self.shards[each] for each in made if each in self.shards]
        for own in parts:
            own.follow()  # the parameters may have got their memory since
            saved = own.cut_out(saved, names)
        return loading(saved, optimizers, {**names, **_named(parts, names)})

    def _without_others(self, saved: OptimizerState) -> OptimizerState:
        """A state without the parameters that other processes train."""
        own = {name: s for name, s in saved.parameters.items() if name not in self._others}
        return OptimizerState(saved.groups, own)

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}


def _named(shards: Iterable[Shards], names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
    """The parts of parameters under the names of these."""
    return {part: name for own in shards for part, name in own.named(names).items()}
