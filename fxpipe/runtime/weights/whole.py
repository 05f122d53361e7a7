"""The one optimizer of a pipe, which stands for those of its stages.

It is an ordinary torch optimizer over the parameters of the whole model, in the user's groups. In a
pipe's step the stages' optimizers update, each with copies of its groups' settings. So settings
that are changed here go to the stages when the next batch is submitted, and what the stages keep is
fetched when somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any
from weakref import WeakMethod

from torch.optim import Optimizer

from fxpipe.errors import InputError
from fxpipe.runtime.weights.live import Mark, attributes, differs, mark, settings, unshared
from fxpipe.runtime.weights.optimizer_state import differing
from fxpipe.runtime.weights.sharding import Shards


class WholeOptimizer:
    """An optimizer over all parameters, and those of the stages that it stands for.

    Attributes:
        optimizer: the optimizer, which steps only where its user calls ``step``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        flush: Callable[[], None],
        shards: Mapping[Optimizer, Shards],
    ) -> None:
        """It stands for no stage yet.

        Args:
            optimizer: over all parameters.
            flush: finishes the batches in flight.
            shards: optimizer of a stage → the parts of parameters that it trains, if it does; no
                process has the state of all then, so that there are settings here alone.
        """
        self.optimizer = optimizer
        self._shards = shards
        self._flush = _weakly(flush)
        self._parts: list[Optimizer] = []
        # part → group → setting → as it was in the whole and in the part when it was last compared
        self._seen: list[list[dict[str, tuple[Mark, Mark]]]] = []
        look, hand_out = _weakly(self.look), _weakly(self.hand_out)
        self._hooks = [
            optimizer.register_state_dict_pre_hook(look),
            optimizer.register_load_state_dict_pre_hook(_weakly(self._begin)),
            optimizer.register_load_state_dict_post_hook(hand_out),
            optimizer.register_step_pre_hook(look),
            optimizer.register_step_post_hook(hand_out),
        ]

    def close(self) -> None:
        """Leave it as an optimizer like any other, with all that the stages keep."""
        self.gather()
        self._parts, self._seen = [], []
        for hook in self._hooks:
            hook.remove()

    def __del__(self) -> None:
        self.close()

    def link(self, parts: Sequence[Optimizer | None], *, theirs: bool) -> None:
        """Stand for these optimizers.

        Args:
            parts: stage → its optimizer.
            theirs: whether the settings are those of the parts, and not those here.

        Raises:
            InputError: their groups are not parts of those here.
        """
        own = [part for part in parts if part is not None]
        if theirs:
            self._refuse_others(own)
        self._parts = own
        self._seen = [[{} for _ in part.param_groups] for part in own]
        if theirs:
            self.gather()
        else:
            self.push()
        if self._sharded:
            self.optimizer.state.clear()

    def push(self) -> None:
        """Give the stages the settings that were changed here since they were last compared."""
        groups = self.optimizer.param_groups
        for part, known in zip(self._parts, self._seen, strict=True):
            if len(known) != len(groups):
                raise InputError(
                    f"the optimizer has {len(groups)} parameter groups, and had {len(known)} when "
                    "the stages' were made of it; add groups before the first step, or close() the "
                    "pipe, add them, and compile again with this optimizer"
                )
            for group, own, seen in zip(groups, part.param_groups, known, strict=True):
                for key, value in group.items():
                    before = seen.get(key)
                    if before is None or differs(before[0], value):
                        if key not in ("params", "param_names"):
                            own[key] = unshared(value)
                            seen[key] = mark(value), mark(own[key])

    def gather(self) -> None:
        """Take over what the stages keep, and the settings that changed there."""
        for part, known in zip(self._parts, self._seen, strict=True):
            for index, (own, seen) in enumerate(zip(part.param_groups, known, strict=True)):
                for key, value in settings(own).items():
                    if key not in seen or differs(seen[key][1], value):
                        self._take(index, key, value)
        if self._parts:
            _count_on(self.optimizer, self._parts[0])
            self.optimizer.state.clear()
        for part in self._parts if not self._sharded else ():
            self.optimizer.state.update(part.state)

    @property
    def _sharded(self) -> bool:
        """Whether those that it stands for train parts of parameters."""
        return any(part in self._shards for part in self._parts)

    def _begin(self) -> None:
        """Finish the batches in flight. Raises InputError where no process has all of the state."""
        if self._sharded:
            raise InputError(
                "with shard_optimizer=True pipe.optimizer has the settings of its groups, and no "
                "replica has the state of whole parameters, which state_dict, load_state_dict and "
                "step need; use pipe.save and pipe.load, and pipe.step to train"
            )
        self._flush()

    def look(self) -> None:
        """Make it as it is after the batches that are in flight."""
        self._begin()
        self.push()
        self.gather()

    def hand_out(self) -> None:
        """Give the stages the settings and the state that are here."""
        self.push()
        for part in self._parts:
            _count_on(part, self.optimizer)
            part.state.clear()
            for group in part.param_groups:
                for parameter in group["params"]:
                    if parameter in self.optimizer.state:
                        part.state[parameter] = self.optimizer.state[parameter]

    def _take(self, index: int, key: str, value: Any) -> None:
        """Take over a part's setting; the other parts keep theirs."""
        group = self.optimizer.param_groups[index]
        group[key] = unshared(value)
        for part, known in zip(self._parts, self._seen, strict=True):
            if key in part.param_groups[index]:
                known[index][key] = mark(group[key]), mark(part.param_groups[index][key])

    def _refuse_others(self, parts: Sequence[Optimizer]) -> None:
        """Raises InputError where parts have other groups, or differ in their settings."""
        groups = self.optimizer.param_groups
        for part in parts:
            shards = self._shards.get(part)
            known = [{*map(id, group["params"])} for group in groups]
            if shards is not None:
                for ids in known:
                    ids |= {id(own) for p, own in shards.of.items() if id(p) in ids}
            same = type(part) is type(self.optimizer) and len(part.param_groups) == len(groups)
            if not same or not all(map(_is_part, part.param_groups, known, parts[0].param_groups)):
                raise InputError(
                    "the function that was given as optimizer= makes other groups for a stage than "
                    "for the whole model, so that there is no one optimizer; use pipe.optimizers, "
                    "which has that of each stage"
                )


def _is_part(own: Mapping[str, Any], known: Container[int], first: Mapping[str, Any]) -> bool:
    inside = all(id(parameter) in known for parameter in own["params"])
    return inside and differing(settings(own), settings(first)) is None


def _count_on(optimizer: Optimizer, other: Optimizer) -> None:
    """Let an optimizer's own plain attributes, such as counters, be those of another one."""
    own = vars(optimizer)
    own.update({name: value for name, value in attributes(other).items() if name in own})


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """The same method, for a hook, which does not keep its object alive."""
    weak = WeakMethod(method)

    def call(*_: object) -> None:
        found = weak()
        if found is not None:
            found()

    return call
