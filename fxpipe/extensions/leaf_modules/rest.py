"""Trace the model's own ``forward`` up to a line, and make the rest of it one leaf module.

before:  class Net(nn.Module): forward(x) = F.ctc_loss(self.head(self.body(x)), …)
traced:  body = self.body(x);  head = self.head(body);  fxpipe_rest = self.fxpipe_rest(x, head)

The leaf runs ``forward`` again, on a copy of the model whose first calls of submodules return the
outputs that were already computed. The parameters and buffers that the rest reads are inputs of the
leaf, so that other stages may use them, too.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from fxpipe.extensions.leaf_modules.draws import DrawsWatched
from fxpipe.extensions.leaf_modules.nests import REST, UnfitLeaf
from fxpipe.extensions.leaf_modules.watching import Flow, ValueChecks, storage_of, tensors_of
from fxpipe.ir.traced import Traced
from fxpipe.torchtools.pytrees import equal, taken_apart
from fxpipe.torchtools.state import tried


class _Reached(BaseException):
    """Ends ``forward`` after a call. Not an Exception, which ``forward`` might catch."""


class ModuleCalls:
    """The submodules that a model's own ``forward`` calls, in their order.

    Attributes:
        names: call → the submodule's name.
        written: the calls whose outputs ``forward`` writes into.
        limit: how many calls can precede the rest: those before the first random number that
            ``forward`` itself draws, which the rest would draw again, and before the first call
            whose output makes sense only there, inside a transform such as ``torch.func.vjp``,
            below ``torch.enable_grad``, or as a nested tensor; all calls if there is neither.
        checks: the numbers that ``forward``'s own checks of values read. The trace leaves these
            checks out; the rest does them in every step.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model to record its calls; the caller restores the model's state."""
        self.names: list[str] = []
        outputs: list[list[tuple[Tensor, int]]] = []
        ends: list[int] = []

        def begin() -> None:
            self.checks.open = False
            if watch.drew:
                ends.append(len(self.names))

        def end(name: str, output: Any) -> None:
            leaves = pytree.tree_leaves(taken_apart(output))
            if any(map(_bound, leaves)):
                ends.append(len(self.names))
            self.names.append(name)
            outputs.append([(x, x._version) for x in leaves if isinstance(x, Tensor)])
            watch.drew, self.checks.open = False, True

        def run() -> None:
            for each in (self.names, outputs, ends):
                each.clear()
            watch.drew, self.checks = False, ValueChecks()
            with self.checks, _called_directly(model, begin, end):
                model.forward(*args, **kwargs)

        with DrawsWatched() as watch:
            tried(run)
        self.limit = min(ends, default=len(self.names))
        self.written = {
            index
            for index, tensors in enumerate(outputs)
            if any(x._version != version for x, version in tensors)
        }

    def latest(self, trace: Callable[[int], tuple[Traced | None, int]]) -> Traced | None:
        """Return the graph that traces as much of ``forward`` as possible, or None.

        ``trace(count)`` traces with the rest beginning after ``count`` calls. It returns the graph,
        or None if it fails, and how many calls it reached.
        """
        low, high, at = -1, self.limit + 1, self.limit  # low can be traced, high cannot
        best: Traced | None = None
        while high - low > 1:
            traced, reached = trace(at)
            if traced is not None:
                low, best = at, traced
            else:
                high = min(at, reached + 1)
            at = high - 1 if reached < at else (low + high) // 2
        return best


class Rest(nn.Module):
    """What a model's own ``forward`` computes after some of its calls of submodules.

    Attributes:
        learnt: whether ``learn`` has run.
    """

    def __init__(self, model: nn.Module, calls: ModuleCalls, count: int) -> None:
        """Let the rest begin after ``count`` of the calls."""
        super().__init__()
        self._names = calls.names[:count]
        self._written = calls.written
        self.learnt = False
        self._state: tuple[str, ...] = ()
        self._writes: tuple[str, ...] = ()
        self._outputs: list[Any] = []  # those not read, without data; None for those that are read
        self._specs: list[pytree.TreeSpec] = []  # of the outputs: a graph forgets their classes
        # in a tuple: as a submodule, it would make the model's parameters this module's own
        self._copy = (_Copy(model, self._names),)

    def learn(self, model: nn.Module, args: Any, kwargs: Any, outputs: Sequence[Any]) -> None:
        """Run the rest once, to find which outputs, parameters and buffers it reads or writes."""
        state = _state(model)
        before = {name: (x._version, x.clone()) for name, x in state.items()}

        def run() -> set[Any]:
            with Flow({**dict(enumerate(outputs)), **state}) as flow:
                output = self._copy[0].run(args, kwargs, self._given(outputs), {})
            found: set[Any] = flow.origins(output)
            return found

        read = tried(run)
        writes = {
            name
            for name, (version, value) in before.items()
            if state[name]._version != version or not equal(state[name], value)
        }
        inside = tuple(f"{name}." for name in self._names)
        self._writes = tuple(name for name in state if name in writes)
        self._state = tuple(
            name for name in state if name in read | writes or not name.startswith(inside)
        )
        self.learnt = True
        self._specs = [pytree.tree_structure(output) for output in outputs]
        self._outputs = [
            None if index in read else pytree.tree_map_only(Tensor, lambda x: x.to("meta"), output)
            for index, output in enumerate(outputs)
        ]

    def call(self, model: nn.Module, args: Any, kwargs: Any, outputs: Sequence[Any]) -> Any:
        """Compute the model's output by a call of this module, and write the model's buffers."""
        state = [operator.attrgetter(name)(model) for name in self._state]
        pairs = zip(outputs, self._outputs, strict=True)
        read = [pytree.tree_leaves(output) if unread is None else None for output, unread in pairs]
        output, written = self(args, kwargs, read, state)
        for name, value in zip(self._writes, written, strict=True):
            with torch.no_grad():
                operator.attrgetter(name)(model).copy_(value)
        return output

    def forward(self, args: Any, kwargs: Any, outputs: Any, tensors: Any) -> Any:
        """Return the model's output, and the new values of the buffers that it writes."""
        state = dict(zip(self._state, tensors, strict=True))
        state.update((name, state[name].clone()) for name in self._writes)
        copy = self._copy[0]
        device = next((x.device for x in tensors_of((outputs, tensors, args, kwargs))), None)
        full = [
            pytree.tree_unflatten(output, spec)
            if unread is None
            else pytree.tree_map_only(Tensor, lambda x: torch.zeros_like(x, device=device), unread)
            for output, unread, spec in zip(outputs, self._outputs, self._specs, strict=True)
        ]
        zeros = {i: full[i] for i, unread in enumerate(self._outputs) if unread is not None}
        passed = {storage_of(copy.state[name]) for name in state}
        absent = {name: x for name, x in copy.state.items() if storage_of(x) not in passed}
        with Flow({**zeros, **absent}) as flow:
            output = taken_apart(copy.run(args, kwargs, self._given(full), state))
        if read := flow.origins(output):
            first = next(iter(read))
            what = repr(first) if isinstance(first, str) else f"what {self._names[first]!r} returns"
            raise UnfitLeaf(
                REST,
                f"reads {what}, and did not when the model was traced; move what depends on values "
                "into a submodule of its own",
            )
        return output, [state[name] for name in self._writes]

    def _given(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs, with copies of those that ``forward`` writes into."""
        return [
            pytree.tree_map_only(Tensor, torch.clone, output) if index in self._written else output
            for index, output in enumerate(outputs)
        ]


def split(model: nn.Module, calls: ModuleCalls, count: int, reached: list[str]) -> nn.Module:
    """Return a twin of the model that has the rest of ``forward`` as one more submodule, REST.

    The twin shares the model's parameters. Its rest begins after ``count`` of the calls; each run
    of it sets ``reached`` to the names of the submodules that are called before.
    """
    rest = Rest(model, calls, count)
    kind = type(model)
    assigned = vars(model).get("forward")  # to the model itself, instead of its class

    @functools.wraps(kind.forward if assigned is None else assigned)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []
        checks = ValueChecks(calls.checks)
        reached.clear()

        def begin() -> None:
            checks.open = False

        def end(name: str, output: Any) -> None:
            checks.open = True
            written = len(outputs) in calls.written
            outputs.append(pytree.tree_map_only(Tensor, torch.clone, output) if written else output)
            reached.append(name)
            if len(outputs) == count:
                raise _Reached

        if count:
            with suppress(_Reached), checks, _called_directly(model, begin, end):
                if assigned is None:
                    kind.forward(self, *args, **kwargs)
                else:
                    assigned(*args, **kwargs)
        if reached != calls.names[:count]:
            raise UnfitLeaf(REST, "follows other calls of submodules when the model is traced")
        if not rest.learnt:
            rest.learn(model, args, kwargs, outputs)
        return rest.call(self, args, kwargs, outputs)

    if assigned is not None:
        signature = inspect.signature(assigned)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        vars(forward)["__signature__"] = signature.replace(
            parameters=[first, *signature.parameters.values()]
        )
    body = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    twin: nn.Module = object.__new__(type(kind.__name__, (kind,), body))
    vars(twin).update({name: value for name, value in vars(model).items() if name != "forward"})
    twin._modules = {**model._modules, REST: rest}
    return twin


@contextmanager
def _called_directly(
    model: nn.Module, begin: Callable[[], None], end: Callable[[str, Any], None]
) -> Iterator[None]:
    """Inside, call ``begin`` and ``end`` around each submodule that this thread calls, except for
    submodules that are called by another submodule."""
    names = {id(vars(module)): name for name, module in model.named_modules() if name}
    original: Any = nn.Module.__call__
    thread = get_ident()
    inside = False

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        name = names.get(id(vars(self)))
        if name is None or inside or get_ident() != thread:
            return original(self, *args, **kwargs)
        begin()
        inside = True
        try:
            output = original(self, *args, **kwargs)
        finally:
            inside = False
        end(name, output)
        return output

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


class _Copy:
    """A copy of a model that shares its tensors, and whose first calls return given outputs."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Copy a model; ``names`` are the submodules of its first calls, in order."""
        self.state = _state(model)
        self._names = names
        self._outputs: list[Any] = []
        self._copies: dict[int, nn.Module] = {}
        self._model = self._copied(model)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):  # the real model runs them
            vars(self._model)[hooks] = type(vars(model)[hooks])()
        for name, module in self._model.named_modules():
            if name in names:
                module._compiled_call_impl = functools.partial(self._called, name, module)

    def run(self, args: Any, kwargs: Any, outputs: Sequence[Any], state: Any) -> Any:
        """Return the model's output; its first calls return ``outputs``, and ``state`` replaces its
        parameters and buffers of those names."""
        self._outputs = list(outputs)
        try:
            output = torch.func.functional_call(self._model, state, args, kwargs)
            if self._outputs:
                self._refuse()
        finally:
            self._outputs = []
        return output

    def _called(self, name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._outputs:
            return module._call_impl(*args, **kwargs)
        if name != self._names[len(self._names) - len(self._outputs)]:
            self._refuse()
        return self._outputs.pop(0)

    def _refuse(self) -> None:
        raise UnfitLeaf(REST, "follows other calls of submodules than when the model was traced")

    def _copied(self, module: nn.Module) -> nn.Module:
        if id(module) in self._copies:
            return self._copies[id(module)]
        copy = self._copies[id(module)] = object.__new__(type(module))
        for name, value in vars(module).items():
            bound = isinstance(value, MethodType) and value.__self__ is module
            vars(copy)[name] = MethodType(value.__func__, copy) if bound else value
        copy._parameters, copy._buffers = dict(module._parameters), dict(module._buffers)
        if isinstance(copy, nn.RNNBase):  # its list of weights must follow its parameters
            copy._flat_weights = list(copy._flat_weights)
        copy._modules = {
            name: None if child is None else self._copied(child)
            for name, child in module._modules.items()
        }
        return copy


def _bound(x: Any) -> bool:
    """Whether a call's output, computed without gradients, makes sense only where it was made."""
    if not isinstance(x, Tensor):
        return False
    return is_functorch_wrapped_tensor(x) or x.grad_fn is not None or x.is_nested


def _state(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state.update(model.named_buffers(remove_duplicate=False))
    return state
