"""What runs in place of the operations that stand for a leaf module in a captured graph.

forward:   results, new values of buffers, held = run(inputs, parameters and buffers)
backward:  gradients = run back(gradients of results, held, inputs, trained parameters)

The forward runs the module as it is, under autograd; ``held`` is what autograd keeps of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from fxpipe.compiler.leaf_modules.draws import SeededDraws
from fxpipe.compiler.leaf_modules.nests import Nest
from fxpipe.errors import InputError, TraceError, told
from fxpipe.ir.called import Called
from fxpipe.kernels.graph import same_order
from fxpipe.torchtools import source as lines
from fxpipe.torchtools.pytrees import memory
from fxpipe.torchtools.state import Autocasts, reparametrized, uncached, under


@dataclass(frozen=True)
class Look:
    """How a tensor looks: its shape, strides and type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Look:
        """That of a tensor; of one whose elements share memory, that of a dense copy."""
        like = torch.empty_like(tensor, device="meta")
        return cls(tuple(like.shape), like.stride(), like.dtype)

    def on_meta(self) -> Tensor:
        """A tensor that looks so, without data."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class LeafCall:
    """One call of a leaf module.

    Attributes:
        number: identifies the call while its model is captured.
        name: the module's name in the model.
        given: positional and keyword arguments.
        returned: the result.
        looks: how its tensors look.
        differentiable: for each of them whether it may have a gradient.
        reached: for each of them the tensors given whose gradients it has a part in, by number.
        state: the names, in the module, of its parameters and buffers.
        written: the names of the buffers that it writes.
        held: the bytes that autograd keeps for its backward, beside its inputs and parameters.
        draws: whether it draws random numbers.
        casts: the autocast under which it is called.
        recording: whether it is called with gradients enabled.
        needs: for each tensor given, and then each of ``state``, whether it needs a gradient.
    """

    number: int
    name: str
    given: Nest
    returned: Nest
    looks: tuple[Look, ...]
    differentiable: tuple[bool, ...]
    reached: tuple[frozenset[int], ...]
    state: tuple[str, ...]
    written: tuple[str, ...]
    held: int
    draws: bool
    casts: Autocasts
    recording: bool = True
    needs: tuple[bool, ...] = ()


class Tape:
    """What autograd keeps of a call for its backward.

    Attributes:
        roots: for each result where its gradient goes in; None if it has none.
        sources: the tensors that need gradients.
    """

    __slots__ = ("roots", "sources")

    def __init__(self, roots: list[GradientEdge | None], sources: list[Tensor]) -> None:
        self.roots, self.sources = roots, sources

    def __repr__(self) -> str:
        return "held"


_turns: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""Module → held by the thread that calls it, with the weights of its device in it."""


class LeafForward(Called):
    """Calls a leaf module as it is: ``(tensors given, parameters and buffers)`` → the tensors among
    its results, the new values of the buffers that it writes, and what its backward takes."""

    def __init__(self, call: LeafCall, module: nn.Module, *, backward: bool = True) -> None:
        self.call, self.module, self.backward = call, module, backward
        self.name = self.__name__ = self.__qualname__ = call.name
        self.__module__ = "called"
        self.parts = frozenset(id(vars(part)) for part in module.modules())

    def __repr__(self) -> str:
        return f"called {self.name}"

    def refusing(self) -> AbstractContextManager[None]:
        return lines.refusing_failures(repr(self.name), gradients=self.backward)

    def without_backward(self) -> LeafForward:
        return LeafForward(self.call, self.module, backward=False)

    def __call__(
        self,
        given: Sequence[Tensor],
        state: Sequence[Tensor],
        seed: Tensor | None = None,
        number: int = 0,
    ) -> list[Any]:
        call = self.call
        recording = call.recording and self.backward
        needs = call.needs if recording else (False,) * len(call.needs)
        sources = [
            x.detach().requires_grad_(has) for x, has in zip((*given, *state), needs, strict=True)
        ]
        inputs, held = sources[: len(given)], sources[len(given) :]
        tensors = dict(zip(call.state, held, strict=True))
        own = dict(self.module.named_parameters())
        for name in tensors.keys() & own.keys():
            if attributes := vars(own[name]):  # set by the user
                vars(tensors[name]).update(attributes)
        # modules write their buffers in place, so they get copies, which become the new values
        tensors |= {name: tensors[name].clone() for name in call.written}
        seeded = nullcontext() if seed is None else SeededDraws(int(seed.item()), number)
        turn = _turns.setdefault(self.module, RLock())
        with turn, torch.set_grad_enabled(recording), seeded, under(call.casts):
            placed = [*map(uncached, inputs)] if call.casts else inputs
            args, kwargs = call.given.filled(placed)
            with reparametrized(self.module, tensors):
                output = self.module(*args, **kwargs)
            results = self._results(output, {memory(x) for x in sources})
        del output
        written = [tensors[name] for name in call.written]
        kept = None
        if recording and any(needs):
            roots = [get_gradient_edge(x) if x.requires_grad else None for x in results]
            kept = Tape(roots, [x for x, has in zip(sources, needs, strict=True) if has])
        return [*(x.detach() for x in results), *(x.detach() for x in written), kept]

    def _results(self, output: Any, shared: set[int]) -> list[Tensor]:
        """The tensors in a result, in memory of their own, as the graph expects them."""
        leaves = pytree.tree_leaves(output)
        if [isinstance(x, Tensor) for x in leaves] != self.call.returned.places:
            raise TraceError(
                f"leaf module {self.name!r} returns tensors at other places than when the model "
                "was traced; let it always return the same"
            )
        results: list[Tensor] = []
        tensors = (x for x in leaves if isinstance(x, Tensor))
        for x, look in zip(tensors, self.call.looks, strict=True):
            if tuple(x.shape) != look.shape:
                raise TraceError(
                    f"leaf module {self.name!r} returns a tensor of size {list(x.shape)}, and "
                    f"returned {list(look.shape)} when the model was traced, so that its size "
                    "depends on values; mark a module around it as the leaf, one that returns "
                    "tensors of one size"
                )
            if memory(x) in shared or not same_order(x, look.strides):
                x = laid_out(x, look.strides)
            shared.add(memory(x))
            results.append(x)
        return results


class LeafBackward(Called):
    """The backward of such a call: ``(gradients of results, held, tensors given, trained
    parameters)`` → the gradients of all that needs one. Of the last two it only needs that nothing
    writes over them."""

    fresh = True

    def __init__(
        self,
        call: LeafCall,
        which: Sequence[int],
        wanted: Sequence[int],
        looks: Sequence[Look],
        added: Collection[int] = (),
    ) -> None:
        """Args:
        call: the call.
        which: the results whose gradients it is given.
        wanted: the tensors given whose gradients it returns, by number.
        looks: how its gradients look.
        added: those that are None, and not zeros, if autograd finds none.
        """
        self.call, self.which, self.wanted, self.looks = call, which, wanted, looks
        self.added = added
        given = [at for at, needs in enumerate(call.needs[: call.given.tensors]) if needs]
        self._returned = [at in wanted for at in given]
        self.name = call.name
        self.__name__ = self.__qualname__ = f"{call.name}.backward"
        self.__module__ = "called"

    def __repr__(self) -> str:
        return f"called {self.name} backward"

    @contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if lines.lacks_memory(error):
                raise
            raise InputError(
                f"the backward of {self.name!r} fails on the first micro-batch ({told(error)}); "
                "correct it"
            ) from error

    def adding(self, results: Collection[int]) -> LeafBackward:
        return LeafBackward(self.call, self.which, self.wanted, self.looks, frozenset(results))

    def __call__(
        self, gradients: Sequence[Tensor], held: Tape, given: object, trained: object
    ) -> list[Tensor | None]:
        pairs = [
            (root, gradient)
            for at, gradient in zip(self.which, gradients, strict=True)
            if (root := held.roots[at]) is not None
        ]
        found: Sequence[Tensor | None] = [None] * len(held.sources)
        if pairs:
            roots, seeds = zip(*pairs, strict=True)
            # a thread of autograd's own would hold the gradients for a moment longer
            with torch.autograd.set_multithreading_enabled(False):
                found = torch.autograd.grad(roots, held.sources, seeds, allow_unused=True)
        returned = [*self._returned, *[True] * (len(found) - len(self._returned))]
        if any(x is not None and not has for x, has in zip(found, returned, strict=True)):
            raise TraceError(
                f"leaf module {self.name!r} has a gradient for something that it is given, and had "
                "none when the model was traced; let all its calls depend on the same inputs, as "
                "with + 0 * x"
            )
        kept = zip(found, held.sources, returned, strict=True)
        shared = {memory(gradient) for gradient in gradients}
        made: list[Tensor | None] = []
        for look, (gradient, source) in zip(
            self.looks, ((x, y) for x, y, has in kept if has), strict=True
        ):
            if gradient is None:
                none = len(made) in self.added
                made.append(None if none else _zeros(look, source))
                continue
            whole = gradient.untyped_storage().nbytes() == gradient.nbytes
            if not whole or memory(gradient) in shared or not same_order(gradient, look.strides):
                gradient = laid_out(gradient, look.strides)
            shared.add(memory(gradient))
            made.append(gradient)
        return made


def _zeros(look: Look, like: Tensor) -> Tensor:
    return like.new_empty_strided(look.shape, look.strides, dtype=look.dtype).zero_()


def laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides, which has the same gradient."""
    room = torch.empty_strided(x.shape, tuple(strides), dtype=x.dtype, device=x.device)
    return room.copy_(x)
