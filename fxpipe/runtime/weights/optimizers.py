"""The optimizers of the stages, and the one of the whole model that stands for them.

The one is an ordinary torch optimizer over the parameters of the whole model, in the user's groups.
In a pipe's step the stages' optimizers update, each with copies of its groups' settings. So
settings that are changed in the one go to the stages when the next batch is submitted, and what the
stages keep is fetched when somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fxpipe.errors import CheckpointError, InputError
from fxpipe.ir.plan import Plan
from fxpipe.runtime.weights.by_hand import ByHand
from fxpipe.runtime.weights.live import Mark, differs, mark, settings, unshared
from fxpipe.runtime.weights.optimizer import GivenOptimizer, refuse_hooks
from fxpipe.runtime.weights.optimizer_state import OptimizerState, differing, loading, take
from fxpipe.runtime.weights.own_attributes import values_of
from fxpipe.runtime.weights.sharding import Shards, refuse_others


class Optimizers:
    """The optimizers of the stages, and the one that stands for all of them.

    Attributes:
        made: stage → its optimizer; None before the first plan.
        whole: the one; None where nobody has given it or asked for it. It steps only where its
            user calls ``step``.
        shards: optimizer → the parts of parameters that it trains in place of the whole. No process
            has the state of all then, so that the one has settings alone.
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
        self.whole: Optimizer | None = None
        self.shards: WeakKeyDictionary[Optimizer, Shards] = WeakKeyDictionary()
        self._model = model
        self._given = given
        self._owns = owns
        self._flush = _weakly(flush)
        self._shard = shard
        # what keeps the state: the stages' optimizers; before them, one with that of a checkpoint
        self._parts: list[Optimizer] = []
        # part → group → setting → as it was in the whole and in the part when it was last compared
        self._seen: list[list[dict[str, tuple[Mark, Mark]]]] = []
        self._others: set[str] = set()  # parameters that no stage of this process trains
        self._unread: set[Tensor] = set()  # those that are in no stage
        self._by_hand: ByHand | None = None
        self._hooks: list[RemovableHandle] = []
        if given.whole is not None:
            self._watch(given.whole, given=True)

    def close(self) -> None:
        """Leave the one to its user as an optimizer like any other, with all that the stages
        keep."""
        if self.whole is not None:
            self._gather()
            self._parts, self._seen = [], []
        for hook in self._hooks:
            hook.remove()

    def __del__(self) -> None:
        self.close()

    def make(self, plan: Plan) -> tuple[Optimizer | None, ...]:
        """Make them for the stages of the first plan, which all plans have.

        Raises:
            InputError: the user's function returns no optimizer, or a wrong one.
            CheckpointError: an optimizer cannot load the state that was restored.
        """
        made = self._make(plan)
        if self.whole is None and self._parts:
            self._loading(take(self._parts, self._names()), made)()
        self.made = made
        self._link(made)
        self.submit()
        self._gather()
        return made

    def one(self) -> Optimizer:
        """The optimizer that stands for those of all stages.

        Raises:
            InputError: the user's function makes none for all parameters that they are parts of, or
                before there are stages one with hooks on its step.
        """
        if self.whole is None:
            self._flush()
            whole = self._given.of_all()
            if self.made is None:  # the stages' will be copies of it
                refuse_hooks(whole, "what optimizer returns")
            self._refuse_others(whole)
            self._given.whole = whole
            self._watch(whole, given=False)
            self._gather()
        self.submit()
        self._gather()
        assert self.whole is not None
        return self.whole

    def begin(self) -> None:
        """Before a batch: give the stages what was changed in the one.

        Raises:
            InputError: the one has other groups than the stages', or what no stage would call.
        """
        if self._by_hand is not None:
            self.submit()
            self._by_hand.refuse()
            self.show()

    def show(self) -> None:
        """Let the state of the one be what the stages keep now."""
        if self.whole is None or self._by_hand is None or not self._parts or self._sharded:
            return
        state = self.whole.state
        apart = {p: state[p] for p in self._unread if p in state}
        state.clear()
        for kept in (apart, *(part.state for part in self._parts)):
            state.update(kept)
        self._by_hand.note_state()

    def submit(self) -> None:
        """Give the stages what was changed in the one since they were last compared: settings,
        its state, and attributes of its own.

        Raises:
            InputError: it has other groups than the stages'.
        """
        if self.whole is None or self._by_hand is None:
            return
        if self._parts and self._by_hand.changed:
            self._flush()
            for part in self._parts:
                self._by_hand.hand_to(part)
            self._by_hand.note()
        groups = self.whole.param_groups
        for part, known in zip(self._parts, self._seen, strict=True):
            if len(known) != len(groups):
                raise InputError(
                    f"the optimizer has {len(groups)} parameter groups, and had {len(known)} when "
                    "the stages' were made of it; add groups before the first step, or close() the "
                    "pipe, add them, and compile again with this optimizer"
                )
            for group, own, seen in zip(groups, part.param_groups, known, strict=True):
                for key, value in settings(group).items():
                    if key not in seen or differs(seen[key][0], value):
                        own[key] = unshared(value)
                        seen[key] = mark(value), mark(own[key])

    def chosen(self) -> list[str]:
        """The settings of the one that its user has made, see ``ByHand.chosen``."""
        return [] if self._by_hand is None else self._by_hand.chosen()

    def state(self) -> OptimizerState:
        """The state for a checkpoint; no batch may be in flight.

        Raises:
            CheckpointError: an optimizer keeps something that belongs to no parameter.
        """
        if self.whole is not None:
            self.one()
        kept = self._parts if self.made is None else [*filter(None, self.made)]
        if self.made is None and not kept and self.whole is not None and self.whole.state:
            kept = [self.whole]
        names, parts = self._names(), [self.shards[each] for each in kept if each in self.shards]
        state = take(kept, {**names, **_named(parts, names)})
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
        if not saved.groups:  # of a pipe that had no stages yet
            return self._reset
        made = self.made
        if made is None and plan is not None:
            made = self._make(plan)
        if made is None:
            parts = self._for_all(saved)
        elif self.whole is not None and not any(made):  # whose settings are restored all the same
            parts = [self._given.of({})]
        else:
            parts = [*filter(None, made)]
        load = self._loading(saved, parts)

        def put() -> None:
            load()
            self.made = made
            self._link(parts)
            self._gather()
            self._chosen_anew()

        return put

    def _for_all(self, saved: OptimizerState) -> list[Optimizer]:
        """Where there are no stages, an optimizer as if one stage had all parameters of a state."""
        own = {name: p for p, name in self._names().items() if name in saved.parameters}
        try:
            return [self._given.of(own)] if own else []
        except InputError as error:
            raise CheckpointError(
                f"before there are stages nothing tells whether the optimizer fits: {error}; call "
                "prepare() before restore()"
            ) from error

    def _reset(self) -> None:
        """Go on from before the first step."""
        self.made = None
        self._link(())
        if self.whole is not None:
            self.whole.state.clear()
        self._chosen_anew()

    def _chosen_anew(self) -> None:
        if self._by_hand is not None:
            self._by_hand.forget_chosen()

    def _make(self, plan: Plan) -> tuple[Optimizer | None, ...]:
        state = dict(self._model.named_parameters(remove_duplicate=False))
        stages = [{a.target: state[a.target] for a in own.parameters} for own in plan.stages]
        owned = [own if self._owns(index) else {} for index, own in enumerate(stages)]
        names = self._names()
        known = [p for own in stages for p in own.values()]
        if self._given.whole is not None:
            known += [p for group in self._given.whole.param_groups for p in group["params"]]
        self._others = {names[p] for p in known} - {names[p] for own in owned for p in own.values()}
        self._unread = set[Tensor](known).difference(*(own.values() for own in stages))
        made = tuple(self._given.of(own) if own else None for own in owned)
        for optimizer, parameters in zip(made, owned, strict=True):
            if optimizer is not None and self._shard is not None:
                refuse_others(optimizer)
                self.shards[optimizer] = Shards(optimizer, [*parameters.values()], *self._shard)
        return made

    def _loading(
        self, saved: OptimizerState, optimizers: Sequence[Optimizer | None]
    ) -> Callable[[], None]:
        """The same as ``loading`` without what other processes train, for optimizers that may train
        parts of parameters."""
        names = self._names()
        kept = {name: s for name, s in saved.parameters.items() if name not in self._others}
        saved = OptimizerState(saved.groups, kept)
        parts = [self.shards[each] for each in filter(None, optimizers) if each in self.shards]
        for own in parts:
            own.follow()  # the parameters may have got their memory since
            saved = own.cut_out(saved, names)
        return loading(saved, optimizers, {**names, **_named(parts, names)})

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    # the one

    def _watch(self, whole: Optimizer, *, given: bool) -> None:
        """Let an optimizer stand for those of the stages. One that was ``given`` is there on every
        rank from the begin."""
        self.whole = whole
        look, hand_out = _weakly(self._look), _weakly(self.submit)
        self._hooks = [
            whole.register_state_dict_pre_hook(look),
            whole.register_load_state_dict_pre_hook(_weakly(self._begin)),
            whole.register_load_state_dict_post_hook(hand_out),
            whole.register_step_pre_hook(look),
            whole.register_step_post_hook(hand_out),
        ]
        self._by_hand = ByHand(whole, given=given)

    def _link(self, parts: Iterable[Optimizer | None]) -> None:
        """Let these keep the state; their settings are not compared yet."""
        self._parts = [*filter(None, parts)]
        self._seen = [[{} for _ in part.param_groups] for part in self._parts]
        if self._by_hand is not None:
            self._by_hand.note()
            self._by_hand.note_groups()

    def _gather(self) -> None:
        """Take over in the one what the stages keep, and the settings that changed there."""
        if self.whole is None or not self._parts:
            return
        for part, known in zip(self._parts, self._seen, strict=True):
            for index, (own, seen) in enumerate(zip(part.param_groups, known, strict=True)):
                for key, value in settings(own).items():
                    if key not in seen or differs(seen[key][1], value):
                        self._take(self.whole.param_groups[index], index, key, value)
        vars(self.whole).update(values_of(self._parts[0]))
        if self._sharded:
            self.whole.state.clear()
        self.show()
        if self._by_hand is not None:
            self._by_hand.note()

    def _take(self, group: dict[str, Any], index: int, key: str, value: Any) -> None:
        """Take over a part's setting; the other parts keep theirs."""
        group[key] = unshared(value)
        if self._by_hand is not None:
            self._by_hand.took(index, key)
        for part, known in zip(self._parts, self._seen, strict=True):
            if key in part.param_groups[index]:
                known[index][key] = mark(group[key]), mark(part.param_groups[index][key])

    @property
    def _sharded(self) -> bool:
        """Whether those that keep the state train parts of parameters."""
        return any(part in self.shards for part in self._parts)

    def _begin(self) -> None:
        """Finish the batches in flight. Raises InputError where no process has all of the state."""
        if self._sharded:
            raise InputError(
                "with shard_optimizer=True pipe.optimizer has the settings of its groups, and no "
                "replica has the state of whole parameters, which state_dict, load_state_dict and "
                "step need; use pipe.save and pipe.load, and pipe.step to train"
            )
        self._flush()

    def _look(self) -> None:
        """Make the one as it is after the batches that are in flight."""
        self._begin()
        self.one()

    def _refuse_others(self, whole: Optimizer) -> None:
        """Raises InputError where the stages' have other groups, or differ in their settings."""
        groups = whole.param_groups
        for part in self._parts:
            shards = self.shards.get(part)
            known = [{*map(id, group["params"])} for group in groups]
            if shards is not None:
                for ids in known:
                    ids |= {id(own) for p, own in shards.of.items() if id(p) in ids}
            first = self._parts[0].param_groups
            same = type(part) is type(whole) and len(part.param_groups) == len(groups)
            if not same or not all(map(_is_part, part.param_groups, known, first)):
                raise InputError(
                    "the function that was given as optimizer= makes other groups for a stage than "
                    "for the whole model, so that there is no one optimizer; use pipe.optimizers, "
                    "which has that of each stage"
                )


def _named(shards: Iterable[Shards], names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
    """The parts of parameters under the names of these."""
    return {part: name for own in shards for part, name in own.named(names).items()}


def _is_part(own: Mapping[str, Any], known: Container[int], first: Mapping[str, Any]) -> bool:
    inside = all(id(parameter) in known for parameter in own["params"])
    return inside and differing(settings(own), settings(first)) is None


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """The same method, for a hook, which does not keep its object alive."""
    weak = WeakMethod(method)

    def call(*_: object) -> None:
        found = weak()
        if found is not None:
            found()

    return call
