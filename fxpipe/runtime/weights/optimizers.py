"""The optimizers of the stages, and the whole optimizer that users see in their place.

The whole optimizer is an ordinary torch optimizer over the parameters of the whole model, in the
user's groups. A pipe's step updates with the stages' optimizers, which have copies of the groups'
settings. So settings that the user changes in the whole optimizer are copied to the stages when the
next batch is submitted, and the stages' state is fetched when the user looks at it.
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
from fxpipe.runtime.weights.shards import Shards


class Optimizers:
    """The optimizers of the stages, and the whole optimizer.

    Attributes:
        made: stage → its optimizer; None before the first plan.
        whole: the whole optimizer; None if nobody has given it or asked for it. It steps only if
            its user calls ``step``.
        shards: optimizer → the parts of parameters that it trains, if it is sharded. No process has
            the state of all parameters then, so the whole optimizer has settings only.
    """

    def __init__(
        self,
        model: nn.Module,
        given: GivenOptimizer,
        owns: Callable[[int], bool],
        flush: Callable[[], None],
        shard: tuple[type[Shards], int, int] | None,
    ) -> None:
        """Take over the user's whole optimizer, if there is one; the stages are not known yet.

        Args:
            model: the model.
            given: makes the optimizers.
            owns: whether this process trains a stage.
            flush: a method that finishes the batches in flight.
            shard: what cuts parameters, this replica's number and the number of replicas, if
                optimizers are sharded.
        """
        self.made: tuple[Optimizer | None, ...] | None = None
        self.shards: WeakKeyDictionary[Optimizer, Shards] = WeakKeyDictionary()
        self._model = model
        self._given = given
        self._owns = owns
        self._flush = _weakly(flush)
        self._shard = shard
        # the optimizers with the state: the stages', or before there are stages a checkpoint's
        self._parts: list[Optimizer] = []
        # part → group → setting → its marks in the whole optimizer and in the part, when last equal
        self._seen: list[list[dict[str, tuple[Mark, Mark]]]] = []
        self._others: set[str] = set()  # parameters that only other processes train
        self._unread: set[Tensor] = set()  # parameters that no stage reads
        self.whole: Optimizer | None = None
        self._by_hand: ByHand | None = None  # None if there is no whole optimizer
        self._hooks: list[RemovableHandle] = []
        if given.whole is not None:
            self._watch(given.whole, given=True)

    def close(self) -> None:
        """Leave the whole optimizer to its user, with the stages' state, as an ordinary one."""
        if self._by_hand is not None:
            self._fetch()
            self._parts, self._seen = [], []
        for hook in self._hooks:
            hook.remove()

    def __del__(self) -> None:
        self.close()

    def make(self, plan: Plan) -> tuple[Optimizer | None, ...]:
        """Make the optimizers for the stages of the first plan; all later plans have these stages.

        Raises:
            InputError: the user's function returns no optimizer, or a wrong one.
            CheckpointError: an optimizer cannot load the state that was restored.
        """
        made = self._make(plan)
        if self._by_hand is None and self._parts:
            self._loading(take(self._parts, self._names()), made)()
        self.made = made
        self._link(made)
        self.submit()
        self._fetch()
        return made

    def one(self) -> Optimizer:
        """The whole optimizer, with the newest state. It is made if there is none yet.

        Raises:
            InputError: the user's function makes an optimizer for all parameters that has other
                groups or settings than the stages'; or, before there are stages, hooks on its step.
        """
        if self._by_hand is None:
            self._flush()
            whole = self._given.of_all()
            if self.made is None:  # the stages' will be copies of it
                refuse_hooks(whole, "what optimizer returns")
            self._refuse_others(whole)
            self._given.whole = whole
            self._watch(whole, given=False)
            self._fetch()
        self.submit()
        self._fetch()
        assert self.whole is not None
        return self.whole

    def begin(self) -> None:
        """Before a batch, copy to the stages what the user changed in the whole optimizer.

        Raises:
            InputError: the whole optimizer has other groups than the stages', or a hook or a step
                that no stage would call.
        """
        if self._by_hand is not None:
            self.submit()
            self._by_hand.refuse()
            self.show()

    def show(self) -> None:
        """Put the stages' current state into the whole optimizer."""
        if self._by_hand is None or not self._parts or self._sharded:
            return
        state = self._by_hand.optimizer.state
        unread = {p: state[p] for p in self._unread if p in state}
        state.clear()
        for kept in (unread, *(part.state for part in self._parts)):
            state.update(kept)
        self._by_hand.note_state()

    def submit(self) -> None:
        """Copy to the stages what changed in the whole optimizer since they were last compared:
        settings and state.

        Raises:
            InputError: it has other groups than the stages'.
        """
        if self._by_hand is None:
            return
        if self._parts and self._by_hand.changed:
            self._flush()
            for part in self._parts:
                self._by_hand.hand_to(part)
            self._by_hand.note_state()
        groups = self._by_hand.optimizer.param_groups
        for part, known in zip(self._parts, self._seen, strict=True):
            if len(known) != len(groups):
                raise InputError(
                    f"the optimizer has {len(groups)} parameter groups, and had {len(known)} when "
                    "the stages' were made from it; add groups before the first step, or close() "
                    "the pipe, add them, and compile again with this optimizer"
                )
            for group, target, seen in zip(groups, part.param_groups, known, strict=True):
                for key, value in settings(group).items():
                    if key not in seen or differs(seen[key][0], value):
                        target[key] = unshared(value)
                        seen[key] = mark(value), mark(target[key])

    def chosen(self) -> list[str]:
        """The settings that the user chose in the whole optimizer, see ``ByHand.chosen``."""
        return [] if self._by_hand is None else self._by_hand.chosen()

    def state(self) -> OptimizerState:
        """The state for a checkpoint; no batch may be in flight.

        Raises:
            CheckpointError: an optimizer keeps state that belongs to no parameter.
        """
        if self._by_hand is not None:
            self.one()
        kept = self._parts if self.made is None else [*filter(None, self.made)]
        if self.made is None and not kept and self.whole is not None and self.whole.state:
            kept = [self.whole]
        names, shards = self._names(), self._shards_of(kept)
        state = take(kept, {**names, **_part_names(shards, names)})
        for shard in shards:
            state = shard.told(state, names)
        return state

    def restoring(self, saved: OptimizerState, plan: Plan | None) -> Callable[[], None]:
        """Check that the optimizers can go on from a state. Returns a function that loads it.

        Args:
            saved: the state.
            plan: the plan with the stages; None if they are not known.

        Raises:
            CheckpointError: the state is of other optimizers.
            InputError: the user's function returns no optimizer for a stage.
        """
        if not saved.groups:  # the pipe that saved it had no stages yet
            return self._reset
        made = self.made
        if made is None and plan is not None:
            made = self._make(plan)
        if made is None:
            parts = self._for_all(saved)
        elif self._by_hand is not None and not any(made):  # settings are restored all the same
            parts = [self._given.of({})]
        else:
            parts = [*filter(None, made)]
        load = self._loading(saved, parts)

        def put() -> None:
            load()
            self.made = made
            self._link(parts)
            self._fetch()
            self._forget_chosen()

        return put

    def _for_all(self, saved: OptimizerState) -> list[Optimizer]:
        """Make one optimizer for all parameters of a state, before there are stages."""
        trained = {name: p for p, name in self._names().items() if name in saved.parameters}
        try:
            return [self._given.of(trained)] if trained else []
        except InputError as error:
            raise CheckpointError(
                f"before there are stages, the optimizer cannot be checked: {error}; call "
                "prepare() before restore()"
            ) from error

    def _reset(self) -> None:
        """Reset to the state before the first step."""
        self.made = None
        self._link(())
        if self.whole is not None:
            self.whole.state.clear()
        self._forget_chosen()

    def _forget_chosen(self) -> None:
        if self._by_hand is not None:
            self._by_hand.forget_chosen()

    def _make(self, plan: Plan) -> tuple[Optimizer | None, ...]:
        state = dict(self._model.named_parameters(remove_duplicate=False))
        stages = [{a.target: state[a.target] for a in s.parameters} for s in plan.stages]
        owned = [stage if self._owns(index) else {} for index, stage in enumerate(stages)]
        names = self._names()
        known = [p for stage in stages for p in stage.values()]
        if self._given.whole is not None:
            known += [p for group in self._given.whole.param_groups for p in group["params"]]
        self._others = {names[p] for p in known} - {names[p] for s in owned for p in s.values()}
        self._unread = set[Tensor](known).difference(*(stage.values() for stage in stages))
        made = tuple(self._given.of(stage) if stage else None for stage in owned)
        for optimizer, parameters in zip(made, owned, strict=True):
            if optimizer is not None and self._shard is not None:
                kind, replica, replicas = self._shard
                kind.check(optimizer)
                self.shards[optimizer] = kind(optimizer, [*parameters.values()], replica, replicas)
        return made

    def _loading(
        self, saved: OptimizerState, optimizers: Sequence[Optimizer | None]
    ) -> Callable[[], None]:
        """Call ``loading`` with the part of a state that these optimizers, which may be sharded,
        train."""
        names, shards = self._names(), self._shards_of(optimizers)
        kept = {name: s for name, s in saved.parameters.items() if name not in self._others}
        saved = OptimizerState(saved.groups, kept)
        for shard in shards:
            shard.follow()  # the parameters may have got their memory since
            saved = shard.cut_out(saved, names)
        return loading(saved, optimizers, {**names, **_part_names(shards, names)})

    def _shards_of(self, optimizers: Iterable[Optimizer | None]) -> list[Shards]:
        return [self.shards[each] for each in filter(None, optimizers) if each in self.shards]

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _watch(self, whole: Optimizer, *, given: bool) -> None:
        """Keep a whole optimizer like the stages' from now on. ``given`` tells that the user gave
        it to ``compile``, so that every rank has it from the start."""
        look, hand_out = _weakly(self._look), _weakly(self.submit)
        self._hooks = [
            whole.register_state_dict_pre_hook(look),
            whole.register_load_state_dict_pre_hook(_weakly(self._begin)),
            whole.register_load_state_dict_post_hook(hand_out),
            whole.register_step_pre_hook(look),
            whole.register_step_post_hook(hand_out),
        ]
        self.whole, self._by_hand = whole, ByHand(whole, given=given)

    def _link(self, parts: Iterable[Optimizer | None]) -> None:
        """Take these optimizers as those with the state; their settings are not compared yet."""
        self._parts = [*filter(None, parts)]
        self._seen = [[{} for _ in part.param_groups] for part in self._parts]
        if self._by_hand is not None:
            self._by_hand.note_state()
            self._by_hand.note_groups()

    def _fetch(self) -> None:
        """Copy the stages' state and changed settings to the whole optimizer."""
        if self._by_hand is None or not self._parts:
            return
        whole = self._by_hand.optimizer
        for part, known in zip(self._parts, self._seen, strict=True):
            for index, (group, seen) in enumerate(zip(part.param_groups, known, strict=True)):
                for key, value in settings(group).items():
                    if key not in seen or differs(seen[key][1], value):
                        self._take(whole.param_groups[index], index, key, value)
                        self._by_hand.took(index, key)
        if self._sharded:
            whole.state.clear()
        self.show()
        self._by_hand.note_state()

    def _take(self, group: dict[str, Any], index: int, key: str, value: Any) -> None:
        """Copy a stage's setting to a group of the whole optimizer; other stages keep theirs."""
        group[key] = unshared(value)
        for part, known in zip(self._parts, self._seen, strict=True):
            if key in part.param_groups[index]:
                known[index][key] = mark(group[key]), mark(part.param_groups[index][key])

    @property
    def _sharded(self) -> bool:
        """Whether the optimizers with the state train parts of parameters."""
        return any(part in self.shards for part in self._parts)

    def _begin(self) -> None:
        """Finish the batches in flight. Raises InputError if no process has the whole state."""
        if self._sharded:
            raise InputError(
                "with shard_optimizer=True pipe.optimizer has only the settings of its groups: no "
                "replica has the state of whole parameters, which state_dict, load_state_dict and "
                "step need; use pipe.save and pipe.load, and pipe.step to train"
            )
        self._flush()

    def _look(self) -> None:
        """Finish the batches in flight, and fetch their state into the whole optimizer."""
        self._begin()
        self.one()

    def _refuse_others(self, whole: Optimizer) -> None:
        """Raises InputError if the stages have other groups, or differ in their settings."""
        groups = whole.param_groups
        for part in self._parts:
            shards = self.shards.get(part)
            known = [{*map(id, group["params"])} for group in groups]
            if shards is not None:
                for ids in known:
                    ids |= {id(cut) for p, cut in shards.of.items() if id(p) in ids}
            first = self._parts[0].param_groups
            same = type(part) is type(whole) and len(part.param_groups) == len(groups)
            if not same or not all(map(_is_part, part.param_groups, known, first)):
                raise InputError(
                    "the function that was given as optimizer= makes other groups for a stage than "
                    "for the whole model, so there is no single optimizer; use pipe.optimizers, "
                    "which has each stage's"
                )


def _part_names(
    shards: Iterable[Shards], names: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, str]:
    """Part of a parameter → the parameter's name."""
    return {part: name for shard in shards for part, name in shard.named(names).items()}


def _is_part(group: Mapping[str, Any], known: Container[int], first: Mapping[str, Any]) -> bool:
    """Whether all parameters of a group are known, and its settings are those of ``first``."""
    inside = all(id(parameter) in known for parameter in group["params"])
    return inside and differing(settings(group), settings(first)) is None


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """A method as a hook that does not keep the method's object alive."""
    weak = WeakMethod(method)

    def call(*_: object) -> None:
        bound = weak()
        if bound is not None:
            bound()

    return call
