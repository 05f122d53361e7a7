"""Which submodules are leaf modules, and the graph of a model that has some.

The user asks for some. If a line cannot be traced, the smallest submodule around it that can be
called as it is becomes one, too. A line in the model's own ``forward`` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxpipe.compiler.leaf_modules.calls import LeafCalls
from fxpipe.compiler.leaf_modules.held import Held
from fxpipe.compiler.leaf_modules.nests import UnfitLeaf
from fxpipe.errors import TraceError
from fxpipe.log import LOGGER
from fxpipe.passes.tracing.explain import called

_COST = (
    "its stage alone is not captured into CUDA graphs, and has autograd drive its backward, whole "
    "in the first of two halves"
)


class Leaves:
    """The leaf modules of a model, and whether its loss is one.

    Attributes:
        model: the model.
        called: name → submodule that graphs call as it is. No trace looks into it. It may grow.
        loss: whether graphs call the loss as it is, too.
        unasked: leaf module that the user did not ask for → the line in it that cannot be traced,
            and why.
    """

    def __init__(
        self,
        model: nn.Module,
        asked: Mapping[str, nn.Module],
        function: Callable[..., Any] | None = None,
    ) -> None:
        """Begin with the leaf modules that the user asked for.

        Args:
            model: the model.
            asked: name → leaf module.
            function: the loss, if it is not the model that returns it.
        """
        self.model = model
        self.called = dict(asked)
        self.loss = False
        self._function = function
        self.unasked: dict[str, str] = {}
        self._told: set[str] = set()

    def begin(self) -> None:
        """Look up the leaf modules by name again, in case some were replaced."""
        named = dict(self.model.named_modules())
        self.called.update((name, named[name]) for name in self.called if name in named)

    def take(self, error: TraceError) -> None:
        """Make the smallest submodule around a line that cannot be traced a leaf module, and all
        submodules of its class, which would fail at the same line. If there is none, raises
        ``error``, or one that says more, and forgets the leaf modules that no graph calls."""
        where, around, cause = error.where, list(error.submodules), error.__cause__
        if isinstance(error, UnfitLeaf) and error.name in self.unasked:
            where = self.unasked[error.name]
            around = called(self.model, error) or _around(error.name)
            kind = type(self.model).__name__
            error = TraceError(f"{kind} cannot be traced at {where}, and {error}", where)
        named = dict(self.model.named_modules())
        name = next((n for n in reversed(around) if n in named.keys() - self.called.keys()), None)
        if name is None:
            for each in self.unasked.keys() - self._told:
                del self.unasked[each], self.called[each]
            raise error from cause
        inside = (self.unasked[n] for n in self.unasked if n.startswith(f"{name}."))
        where = next(inside, where)
        for each in _alike(named, name):
            self.called.setdefault(each, named[each])
            self.unasked.setdefault(each, where)

    @contextmanager
    def calls(self) -> Iterator[LeafCalls | None]:
        """The calls of leaf modules, while the model is traced."""
        if not (self.called or self.loss):
            yield None
            return
        calls = LeafCalls(self.called, self.loss)
        try:
            yield calls
        finally:
            calls.forget()

    def take_loss(self, error: TraceError) -> None:
        """Call the loss, which cannot be traced, as it is from now on. Raises ``error`` if it names
        no line of the user's code."""
        if not error.where:
            raise error
        self.loss = True
        LOGGER.warning(
            "the loss cannot be traced at %s. It is therefore called as it is: %s",
            error.where,
            _COST,
        )

    def call_loss(self, why: str) -> None:
        """Call the loss, which does something besides computing, as it is from now on."""
        self.loss = True
        LOGGER.warning(
            "the loss %s, which a graph would not do. It is therefore called as it is, once for "
            "each micro-batch: %s. To log numbers of the batch without this cost, return them as "
            "tensors beside the loss, see docs/training.md",
            why,
            _COST,
        )

    def held(self) -> Held:
        """What the loss reaches, but for the model."""
        return Held(self._function, "loss", self.model.modules())

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Inside, the loss runs only to be looked at: what it changes in Python objects is put
        back, if steps call it as it is."""
        held = self.held()
        try:
            yield
        finally:
            if self.loss:
                held.put_back()

    def tell(self) -> None:
        """Warn, once, of leaf modules that the user did not ask for."""
        new = [
            name
            for name in self.unasked
            if name not in self._told
            and not any(name.startswith(f"{other}.") for other in self.called)
        ]
        self._told.update(self.unasked)
        for where in dict.fromkeys(self.unasked[name] for name in new):
            names = [name for name in new if self.unasked[name] == where]
            kinds = sorted({type(self.called[name]).__name__ for name in names})
            share = _share(self.model, [self.called[name] for name in names])
            listed = ", ".join(map(repr, names)) if len(names) <= 3 else ", ".join(kinds)
            LOGGER.warning(
                "%s cannot be traced at %s. So this is called as it is: %s, with %s of the "
                "parameters: no cut falls into it, which leaves %s of them to cut, and %s. "
                "compile(..., extensions=[fxpipe.LeafModules(%s)]) does the same without this "
                "warning",
                type(self.model).__name__,
                where,
                ", ".join(map(repr, names[:3])) + ", …" * (len(names) > 3),
                _percent(share),
                _percent(100 - share),
                _COST,
                listed,
            )


def _around(name: str) -> list[str]:
    """The names of the submodules around one, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _share(model: nn.Module, modules: Iterable[nn.Module]) -> float:
    """The share of a model's parameters that these submodules have, in per cent."""
    held = {id(p): p.numel() for module in modules for p in module.parameters()}
    return 100 * sum(held.values()) / max(sum(p.numel() for p in model.parameters()), 1)


def _percent(share: float) -> str:
    return f"{share:.0f} %" if share >= 1 or not share else "less than 1 %"


def _alike(named: Mapping[str, nn.Module], name: str) -> list[str]:
    """The names of all submodules of the same class; only the given name if the class is one of
    PyTorch's, or if one of these submodules is inside another."""
    kind = type(named[name])
    same = [other for other, module in named.items() if type(module) is kind]
    nested = any(type(m) is kind for each in same for m in list(named[each].modules())[1:])
    return [name] if nested or kind.__module__.startswith("torch.") else same
