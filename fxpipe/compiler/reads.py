"""What the model and its loss read of the values of calls that are no tensors.

A value that no code reads has no effect on graphs. A number that is read is a constant of the first
graph, and from its first change on an input of the next one, if it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, signature
from operator import itemgetter
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.compiler.number import Number, NumberPlace, Question, answers
from fxpipe.compiler.unread import is_constant, is_number, may_be_unread, unread
from fxpipe.ir.traced import NUMBERS
from fxpipe.runtime.batch import Batch

KINDS = 64
"""Of so many kinds of calls, the last ones, it is known what is read of them."""


@dataclass
class _Kind:
    """What is known of a kind of call.

    Attributes:
        read: the leaves that some code reads; None before the first trace.
        last: the numbers of the call before: leaf → number.
        inputs: the leaves that are inputs as numbers.
        constants: those that can be none.
        proven: those that some graph has as inputs.
        asked: the numbers that are inputs → what the code has asked of them.
    """

    read: set[int] | None = None
    last: dict[int, float] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)
    asked: dict[Any, dict[str, Question]] = field(default_factory=dict)


class Reads:
    """For each kind of call (see ``Batch.kind``): which leaves are read, which of these numbers are
    inputs of graphs, and what the code has asked of them."""

    def __init__(self) -> None:
        self._kinds: dict[Any, _Kind] = {}  # the one used last comes last
        self._proven: set[str] = set()  # of the numbers in no argument

    def _of(self, batch: Batch) -> _Kind:
        key = batch.kind
        kind = self._kinds[key] = self._kinds.pop(key) if key in self._kinds else _Kind()
        while len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        return kind

    def numbered(self, batch: Batch, others: Mapping[str, float]) -> Batch:
        """The same batch, with numbers as inputs: those that are in it and have changed once, and
        ``others``, which the code reads elsewhere."""
        given = {i: batch.leaves[i] for i in batch.plain if is_number(batch.leaves[i])}
        if not given and not others:
            return batch
        kind = self._of(batch)
        changed = {index for index, number in given.items() if kind.last.get(index) != number}
        kind.inputs |= changed & kind.last.keys() & (kind.read or set()) - kind.constants
        kind.last |= given
        inputs = sorted(kind.inputs)
        return batch.with_numbers(inputs, others) if inputs or others else batch

    def key(self, batch: Batch) -> tuple[Any, ...]:
        """Everything that the graph of a call depends on besides the size of its batch."""
        if not (batch.plain or batch.numbers):
            return batch.key(()), ()
        kind = self._of(batch)
        return batch.key(self._read(kind, batch)), self._answers(kind, batch)

    def like(self, batch: Batch) -> tuple[Any, ...]:
        """Everything that the graph of a call depends on besides sizes."""
        kind = self._of(batch)
        return *batch.like(self._read(kind, batch)), self._answers(kind, batch)

    def proven(self, batch: Batch) -> None:
        """Note that there is a graph with the numbers of a batch as inputs."""
        self._of(batch).proven.update(batch.numbers)
        self._proven.update(batch.others)

    def fix(self, batch: Batch) -> Collection[str]:
        """Let numbers of a batch, which cannot all be inputs, be constants from now on: those that
        no graph has as inputs yet, or all if there are none. Returns the names of those that are in
        no argument."""
        kind, count = self._of(batch), batch.spec.num_leaves
        own = {index for index in batch.numbers if index < count}
        leaves = own - kind.proven
        others = [name for name in batch.others if name not in self._proven]
        if not leaves and not others:
            leaves, others = own, [*batch.others]
        kind.inputs -= leaves
        kind.constants |= leaves
        return others

    def stand_ins(self, batch: Batch, places: Sequence[NumberPlace]) -> StandIns:
        """For the trace of a micro-batch of this batch, whose other numbers are in ``places``."""
        kind = self._of(batch)
        kind.read = set() if kind.read is None else kind.read
        return StandIns(batch, kind.read, self._asked(kind, batch), places)

    def _read(self, kind: _Kind, batch: Batch) -> Collection[int]:
        return range(len(batch.leaves)) if kind.read is None else kind.read

    def _asked(self, kind: _Kind, batch: Batch) -> dict[str, Question]:
        return kind.asked.setdefault((*batch.numbers, *batch.others), {})

    def _answers(self, kind: _Kind, batch: Batch) -> tuple[bool | None, ...]:
        if not batch.numbers:
            return ()
        return answers(self._asked(kind, batch), [*batch.numbers.values()])


class StandIns:
    """What stands for the values of a call that are no tensors while it is traced: a ``Number`` for
    each number that is an input of the graph, and an ``Unread`` for what is not known to be read.
    """

    def __init__(
        self,
        batch: Batch,
        read: set[int],
        asked: dict[str, Question],
        places: Sequence[NumberPlace],
    ) -> None:
        """Args:
        batch: the batch of the call.
        read: the leaves that are known to be read; gets more.
        asked: gets what the code asks of the numbers.
        places: where the numbers are that are in no argument.
        """
        self._batch, self._read, self._asked, self._places = batch, read, asked, places
        self._found: set[int] = set()
        self._made: list[tuple[int, ReferenceType[Any]]] = []
        self._numbers: list[ReferenceType[Number]] = []

    @property
    def numbers(self) -> bool:
        """Whether numbers are inputs of the graph."""
        return bool(self._batch.numbers)

    @property
    def seen(self) -> bool:
        """Whether something has been read for which an ``Unread`` stands."""
        return bool(self._found)

    def found(self, error: Exception | None = None, *, all_read: bool = False) -> bool:
        """Take over which leaves were found to be read, or are kept by what was made; returns
        whether there are some, so that all has to run again. If they may have a part in an error,
        all count as read."""
        if error is None:
            self._found.update(index for index, made in self._made if made() is not None)
        if all_read or (error is not None and not self._found):
            self._found.update(self._unknown)
        self._read |= self._found
        found = bool(self._found)
        self._found.clear()
        self._made.clear()
        return found

    @property
    def kept(self) -> bool:
        """Whether something keeps a ``Number`` after the trace, such as an attribute that the code
        has set. It would be no number there."""
        return any(made() is not None for made in self._numbers)

    @property
    def _needed(self) -> bool:
        """Whether something may stand for a value."""
        return self.numbers or any(map(is_constant, self._batch.leaves)) or bool(self._unknown)

    @property
    def _unknown(self) -> list[int]:
        leaves = enumerate(self._batch.leaves[: self._batch.spec.num_leaves])
        return [i for i, leaf in leaves if may_be_unread(leaf) and i not in self._read]

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """``Batch.unflatten`` for the trace of a micro-batch, and the numbers in places: numbers
        that are inputs are tensors, and other values, which get in inside, are 0."""
        count, unknown = self._batch.spec.num_leaves, self._unknown
        given = [
            0 if index in unknown or is_constant(leaf) else leaf
            for index, leaf in enumerate(leaves[:count])
        ]
        return *pytree.tree_unflatten(given, self._batch.spec), tuple(leaves[count:])

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model runs with what stands for values. Its forward takes the numbers that
        are inputs as tensors, and without them as they are."""
        if not self._needed:
            yield
            return
        forward, own = model.forward, vars(model).get("forward")

        def standing(*args: Any, **kwargs: Any) -> Any:
            tensors = kwargs.pop(NUMBERS, ())
            given = args, {name: kwargs[name] for name in sorted(kwargs)}
            return self._run(lambda given: forward(*given[0], **given[1]), given, 0, tensors)

        vars(standing)["__signature__"] = _with_numbers(forward)
        vars(model)["forward"] = standing
        try:
            yield
        finally:
            if own is None:
                del vars(model)["forward"]
            else:
                vars(model)["forward"] = own

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """A loss that runs with what stands for values in its targets. The numbers that are inputs
        follow them, as tensors; without them it runs as it is."""
        if not self._needed:
            return loss
        targets = self._batch.spec.child(2).num_children

        def standing(output: Any, *given: Any) -> Any:
            def run(targets: Any) -> Any:
                return loss(output, *targets)

            return self._run(run, given[:targets], self._batch.inputs, given[targets:])

        with suppress(ValueError):  # a function written in C has no signature
            of = loss.forward if isinstance(loss, nn.Module) else loss
            vars(standing)["__signature__"] = signature(of)
        return standing

    def _run(
        self, run: Callable[[Any], Any], given: Any, first: int, tensors: Sequence[Tensor]
    ) -> Any:
        """Run something with what stands for the values in its arguments, the first leaf of which
        has this index, and for the numbers in places, which are given as tensors, or stay."""
        batch = self._batch
        leaves, spec = pytree.tree_flatten(given)
        unknown = set(self._unknown)
        for index, leaf in enumerate(leaves, first):
            if isinstance(leaf, Tensor):
                if index in batch.numbers:
                    leaves[index - first] = self._number(index, leaf)
            elif index in unknown:
                made = unread(batch.leaves[index], partial(self._found.add, index))
                leaves[index - first] = made
                self._made.append((index, ref(made)))
                del made
            else:
                leaves[index - first] = batch.numbers.get(index, batch.leaves[index])
        given = pytree.tree_unflatten(leaves, spec)
        del leaves
        before = [place.get() for place in self._places] if tensors else []
        for index, (place, tensor) in enumerate(
            zip(self._places, tensors, strict=False), batch.spec.num_leaves
        ):
            place.set(self._number(index, tensor))
        try:
            return run(given)
        finally:
            for place, value in zip(self._places, before, strict=False):
                place.set(value)

    def _number(self, index: int, tensor: Tensor) -> Number:
        """What stands for a number."""
        at = [*self._batch.numbers].index(index)
        value, of = self._batch.numbers[index], itemgetter(at)
        return Number(value, tensor, of, f"v{at}", self._asked, self._numbers)


def _with_numbers(forward: Callable[..., Any]) -> Any:
    """The signature of a forward with one argument more."""
    known = signature(forward)
    parameters = [*known.parameters.values()]
    last = bool(parameters) and parameters[-1].kind is Parameter.VAR_KEYWORD
    own = Parameter(NUMBERS, Parameter.KEYWORD_ONLY, default=())
    parameters.insert(len(parameters) - last, own)
    return known.replace(parameters=parameters)
