"""The submodules that are called as they are: those that were asked for, and, where a line cannot
be traced, the smallest around it that can be called so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from fxpipe.errors import TraceError
from fxpipe.log import LOGGER
from fxpipe.passes.tracing.explain import called
from fxpipe.passes.tracing.leaf_nests import UnfitLeaf

_COST = (
    "autograd drives backward in every stage, no backward comes in halves, and no stage is "
    "captured into CUDA graphs"
)


class Leaves:
    """The leaf modules of a model, and its loss where that is called as it is.

    Attributes:
        modules: name → submodule.
        unasked: those that nobody asked for → the line that cannot be traced, and why.
        loss: whether the loss is called as it is.
    """

    def __init__(self, model: nn.Module, asked: Mapping[str, nn.Module]) -> None:
        """Nothing is traced yet.

        Args:
            model: the model.
            asked: name → submodule that is to be called as it is.
        """
        self.modules = dict(asked)
        self.unasked: dict[str, str] = {}
        self.loss = False
        self._model = model
        self._told: set[str] = set()

    def renew(self) -> None:
        """Take those that are there now, where the model's have been replaced."""
        named = dict(self._model.named_modules())
        self.modules.update((name, named[name]) for name in self.modules if name in named)

    def grow(self, error: TraceError) -> TraceError | None:
        """Let the smallest submodule around what cannot be traced be a leaf.

        Submodules of the same class, which would fail at the same line, become leaves with it.

        Args:
            error: why the model cannot be traced with the present ones.

        Returns:
            Where there is none: the error to raise; see ``shrink``.
        """
        where, around = error.where, list(error.submodules)
        if isinstance(error, UnfitLeaf) and error.name in self.unasked:
            where, around = self.unasked[error.name], called(self._model, error)
            kind = type(self._model).__name__
            error = TraceError(f"{kind} cannot be traced at {where}, and {error}", where)
        named = dict(self._model.named_modules())
        name = next((n for n in reversed(around) if n in named.keys() - self.modules.keys()), None)
        if name is None:
            return error
        inside = (self.unasked[n] for n in self.unasked if n.startswith(f"{name}."))
        where = next(inside, where)
        for each in _alike(named, name):
            self.modules.setdefault(each, named[each])
            self.unasked.setdefault(each, where)
        return None

    def shrink(self, called: Collection[str] = ()) -> None:
        """Forget those that nobody asked for, no earlier graph has, and this one does not call."""
        for left in self.unasked.keys() - self._told - set(called):
            del self.unasked[left], self.modules[left]

    def take_loss(self, error: TraceError) -> None:
        """Let the loss be called as it is.

        Args:
            error: why it cannot be traced.

        Raises:
            TraceError: the fault is no line's.
        """
        if not error.where:
            raise error
        self.loss = True
        LOGGER.warning(
            "the loss cannot be traced at %s. It is therefore called as it is: %s",
            error.where,
            _COST,
        )

    def tell_rest(self, error: TraceError, calls: Sequence[str], count: int) -> None:
        """Warn, once, that the rest of the model's own ``forward`` is called as it is.

        Args:
            error: why.
            calls: the submodules that it calls.
            count: after how many of them the rest begins.
        """
        if error.where in self._told:
            return
        self._told.add(error.where)
        later = [repr(name) for name in dict.fromkeys(calls[count:])]
        called = ", ".join(later) if len(later) <= 3 else f"{len(later)} submodules, {later[0]} …"
        LOGGER.warning(
            "%s cannot be traced at %s. That line is in no submodule. %s is therefore called as it "
            "is%s, in one stage: no cut falls into it, %s. With that line in a submodule of its "
            "own, that alone would be called as it is",
            type(self._model).__name__,
            error.where,
            f"What forward does after its call of {calls[count - 1]!r}" if count else "The model",
            f", with {called}," if later else "",
            _COST,
        )

    def tell(self) -> None:
        """Warn, once, of leaves that nobody asked for."""
        new = [
            name
            for name in self.unasked
            if name not in self._told
            and not any(name.startswith(f"{other}.") for other in self.modules)
        ]
        self._told.update(self.unasked)
        for where in dict.fromkeys(self.unasked[name] for name in new):
            names = [name for name in new if self.unasked[name] == where]
            kinds = sorted({type(self.modules[name]).__name__ for name in names})
            few, listed = len(names) <= 3, ", ".join(map(repr, names))
            LOGGER.warning(
                "%s cannot be traced at %s. %s therefore called as %s: no cut falls into %s, %s. "
                "compile(..., leaf_modules=[%s]) does the same without this warning",
                type(self._model).__name__,
                where,
                f"{listed if few else f'{len(names)} submodules, {names[0]!r} …,'} "
                + ("is" if len(names) == 1 else "are"),
                *(("it is", "it") if len(names) == 1 else ("they are", "them")),
                _COST,
                listed if few else ", ".join(kinds),
            )


def _alike(named: Mapping[str, nn.Module], name: str) -> Iterator[str]:
    """A submodule, and all others of its class; it alone where it is PyTorch's or they nest."""
    kind = type(named[name])
    same = [other for other, module in named.items() if type(module) is kind]
    nested = any(type(m) is kind for each in same for m in list(named[each].modules())[1:])
    alone = nested or kind.__module__.startswith("torch.")
    yield from [name] if alone else same
