"""The optimizers of the stages, and the whole optimizer that users see in their place.

The whole optimizer is an ordinary torch optimizer over the parameters of the whole model, in the
user's groups. A pipe's step updates with the stages' optimizers, which share its state and have
copies of its groups' settings. So settings that the user changes in the whole optimizer are copied
to the stages when the next batch is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakMethod

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fxpipe.errors import InputError
from fxpipe.ir.plan import Plan
from fxpipe.parts import Parts
from fxpipe.runtime.group import Group
from fxpipe.runtime.weights.live import Mark, differs, marked, setting_text, settings, unshared
from fxpipe.runtime.weights.optimizer import GivenOptimizer, bring, refuse_step_hooks
from fxpipe.torchtools.optimizers import Several, class_of, parts_of, with_given


class Optimizers:
    """The optimizers of the stages, and the whole optimizer.

    Attributes:
        made: stage → its optimizer; None before the first plan.
        others: the names of parameters that only other processes update.
    """

    def __init__(
        self,
        model: nn.Module,
        given: GivenOptimizer,
        owns: Callable[[int], bool],
        flush: Callable[[], None],
        shard: Group | None,
    ) -> None:
        """The stages are not known yet.

        Args:
            model: the model.
            given: makes the optimizers.
            owns: whether this process trains a stage.
            flush: a method that finishes the batches in flight.
            shard: the ranks, if each replica updates some of the parameters, and has no state of
                the others.
        """
        self.made: tuple[Optimizer | None, ...] | None = None
        self._model = model
        self._given = given
        self._owns = owns
        self._flush = _weakly(flush)
        self._shard = shard
        self.others: set[str] = set()
        self._members: list[list[int]] = []  # group → ids of its parameters
        # group and setting → its marks in the whole optimizer and in each stage's, when last equal
        self._sent: dict[tuple[int, str], tuple[Mark, list[Mark]]] = {}
        self._stepped: set[tuple[int, str]] = set()  # settings that steps have changed
        self._hooks: list[RemovableHandle] = []
        if given.whole is not None:
            self.one()

    def close(self) -> None:
        """Leave the whole optimizer to its user, as an ordinary one."""
        self._fetch()
        if isinstance(whole := self._given.whole, Several):
            whole.hand_back()
        for hook in self._hooks:
            hook.remove()

    def __del__(self) -> None:
        self.close()

    def make(self, plan: Plan) -> tuple[Optimizer | None, ...]:
        """Make the optimizers for the stages of the first plan; all later plans have these stages.

        Raises:
            InputError: the user's function returns no optimizer, or a wrong one.
        """
        whole, names = self.one(), self._names()
        state = dict(self._model.named_parameters(remove_duplicate=False))
        stages = [{a.target: state[a.target] for a in s.parameters} for s in plan.stages]
        owned = [self._updated(s) if self._owns(index) else None for index, s in enumerate(stages)]
        own = {names[p] for stage in owned if stage for p in stage.values()}
        self.others = {names[p] for stage in stages for p in stage.values()} - own
        for parameter, name in names.items():
            if name in self.others:
                whole.state.pop(parameter, None)
        bring(whole)
        # PyTorch's own update each parameter by itself
        own_kinds = any(not type(p).__module__.startswith("torch.optim.") for p in parts_of(whole))
        if own_kinds and (warn := Parts.coupled.get()) is not None:
            warn(whole, len([*filter(None, stages)]))
        made = tuple(None if stage is None else self._given.of(stage) for stage in owned)
        self.made = made
        self._sent.clear()
        self.submit()
        return made

    def _updated(self, stage: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter] | None:
        """Those of a stage's parameters that this replica updates; None if there are none at
        all."""
        if not stage or self._shard is None:
            return dict(stage) or None
        by, replica = self._shard.deal([*stage], [*stage.values()]), self._shard.replica
        return {name: p for (name, p), of in zip(stage.items(), by, strict=True) if of == replica}

    def one(self) -> Optimizer:
        """The whole optimizer, with the settings that steps have changed. It is made if there is
        none yet.

        Raises:
            InputError: the user's function returns no optimizer, or a wrong one.
        """
        whole = self._given.all()
        if not self._hooks:
            look = _weakly(self._look)
            self._hooks = [
                whole.register_state_dict_pre_hook(look),
                whole.register_load_state_dict_pre_hook(look),
                whole.register_load_state_dict_post_hook(_weakly(self.resend)),
            ]
            self._members = _members(whole)
            if self._shard and any(hasattr(each, "true_weights") for each in parts_of(whole)):
                raise InputError(
                    f"{class_of(whole)} has true_weights(), and with shard_optimizer=True no "
                    "replica would know those of all parameters; leave out shard_optimizer=True"
                )
        self._fetch()
        return whole

    @property
    def whole(self) -> Optimizer | None:
        """The whole optimizer; None if there is none yet."""
        return self._given.whole

    def begin(self) -> None:
        """Before a batch, copy to the stages what the user changed in the whole optimizer.

        Raises:
            InputError: the whole optimizer has other groups than the stages', or a hook or a step
                that no stage would call.
        """
        whole = self._given.all()
        refuse_step_hooks(whole, "the optimizer")
        if _members(whole) != self._members:
            raise InputError(
                "a parameter group of the optimizer has come, or has other parameters than when "
                "the stages' optimizers were made from it; put back those that it had, or close() "
                "the pipe, change the groups, and compile again with this optimizer"
            )
        self.submit()
        # learning-rate schedulers check this flag, and warn of a wrong order
        for each in with_given(whole):
            each._opt_called = True  # type: ignore[attr-defined]

    def submit(self) -> None:
        """Copy to the stages the settings that changed in the whole optimizer since they were last
        equal, and let them share its state if the user has replaced that."""
        whole, parts = self._given.all(), self._parts
        if any(part.state is not whole.state for part in parts):
            self._flush()
            for part in parts:
                part.state = whole.state
        for index, group in enumerate(whole.param_groups):
            for key, value in settings(group).items():
                sent = self._sent.get((index, key))
                if sent is None or differs(sent[0], value):
                    for part in parts:
                        part.param_groups[index][key] = unshared(value)
                    self._note(index, key)

    def lines(self) -> list[str]:
        """The settings of the whole optimizer's groups, a line each, without those that steps have
        changed: processes step at other times."""
        return [
            f"{key} of optimizer group {index}: {setting_text(value)}"
            for index, group in enumerate(self._given.all().param_groups)
            for key, value in settings(group).items()
            if (index, key) not in self._stepped
        ]

    @property
    def _parts(self) -> list[Optimizer]:
        return [*filter(None, self.made or ())]

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _fetch(self) -> None:
        """Copy to the whole optimizer the settings that steps have changed; each stage keeps its
        own."""
        for index, key in list(self._sent):
            _, marks = self._sent[index, key]
            values = [part.param_groups[index][key] for part in self._parts]
            pairs = zip(marks, values, strict=True)
            if changed := [value for known, value in pairs if differs(known, value)]:
                self._given.all().param_groups[index][key] = unshared(changed[-1])
                self._stepped.add((index, key))
                self._note(index, key)

    def _note(self, index: int, key: str) -> None:
        """Note that the stages have a setting of the whole optimizer, or have given it to that."""
        value = self._given.all().param_groups[index][key]
        marks = [marked(part.param_groups[index][key]) for part in self._parts]
        self._sent[index, key] = marked(value), marks

    def _look(self) -> None:
        """Finish the batches in flight, and fetch what they have changed. Raises InputError if no
        process has the whole state."""
        if self._shard is not None:
            raise InputError(
                "with shard_optimizer=True no replica has the state of all parameters, which "
                "state_dict and load_state_dict need; use pipe.save and pipe.load"
            )
        self._flush()
        self._fetch()

    def resend(self) -> None:
        """Copy all settings to the stages anew."""
        self._sent.clear()
        self.submit()


def _members(whole: Optimizer) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in whole.param_groups]


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """A method as a hook that does not keep the method's object alive."""
    weak = WeakMethod(method)

    def call(*_: object) -> None:
        bound = weak()
        if bound is not None:
            bound()

    return call
