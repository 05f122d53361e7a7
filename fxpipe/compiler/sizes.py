"""For which sizes of micro-batches the graph of a call is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpipe.compiler.front_end import Call
from fxpipe.compiler.memo import Memo
from fxpipe.ir.traced import Traced
from fxpipe.passes.tracing.shapes import Dims, Shapes


class GraphSizes:
    """Decides for which sizes a graph is captured.

    As long as all micro-batches of a kind of call have the same shapes, its graph is captured for
    these only, which takes a third of the time. For other shapes it is captured for any size of the
    batch and of the dimensions that have changed, and the sizes of a call are put in. If the model
    does not hold for any, each size of these dimensions has its own graph.
    """

    def __init__(self, kind: Callable[[Call], tuple[Any, ...]], memo: Memo) -> None:
        """``kind`` tells everything that a trace depends on but sizes; ``memo`` has the traces."""
        self._kind, self._memo = kind, memo
        # kind of call → the first shapes, which have a graph of their own; None if they do not
        self._first: dict[Any, Shapes | None] = {}
        # kind of call → its dimensions whose sizes are no symbols in a graph that was to have them
        self._rigid: dict[Any, frozenset[tuple[int, int]]] = {}

    def only(self, call: Call) -> Shapes | None:
        """The shapes for which alone the graph of a call has to hold; None if it may hold for
        others, too."""
        shapes = call.shapes
        if call.fixed is not None:
            alone = call.fixed
        elif not call.uniform:
            alone = False
        elif (known := self._class(call)) in self._first:
            alone = self._first[known] == shapes
        else:
            alone = not any(traced.accepts(shapes) for traced in self._free(call))
        return shapes if alone else None

    def first(self, call: Call) -> Shapes | None:
        """The shapes of the first graph for calls like this one, if that holds for these only, and
        there is no graph for other shapes yet."""
        return None if self._free(call) else self._first.get(self._class(call))

    def placed(self, call: Call, shapes: Shapes | None) -> None:
        """Note that a graph of a call was placed on stages: for these shapes, or None for any."""
        self._first.setdefault(self._class(call), shapes)

    def free(self, call: Call) -> tuple[Dims, list[Any]]:
        """For each input and target the dimensions for whose sizes a graph should have symbols:
        that of the batch, and those that have had other sizes; and shapes with these sizes."""
        shapes, rigid = call.shapes, self._rigid.get(self._kind(call), frozenset())
        changed: dict[tuple[int, int], int] = {}  # dimension → another size
        for known in self._traced(call):
            changed |= {
                (leaf, dim): other
                for leaf, (now, then) in enumerate(zip(shapes, known, strict=True))
                for dim, (size, other) in enumerate(zip(now or (), then or (), strict=True))
                if size != other and dim != call.batch.dims[leaf] and (leaf, dim) not in rigid
            }
        free = [
            tuple(
                dim
                for dim, size in enumerate(shape or ())
                if size > 1 and ((leaf, dim) in changed or dim == call.batch.dims[leaf])
            )
            for leaf, shape in enumerate(shapes)
        ]
        others = [
            shape and tuple(changed.get((leaf, dim), size) for dim, size in enumerate(shape))
            for leaf, shape in enumerate(shapes)
        ]
        return free, others

    def captured(self, call: Call, traced: Traced, others: list[Any] | None) -> None:
        """Note that a graph was captured for a call, and whether it holds for the other shapes for
        which it was to hold, too."""
        self._memo("shapes", lambda: (self._kind(call), call.shapes), lambda: True)
        if others is not None and not (traced.of or traced).accepts(others):
            fixed = {
                (leaf, dim)
                for leaf, (now, then) in enumerate(zip(call.shapes, others, strict=True))
                for dim, (size, other) in enumerate(zip(now or (), then or (), strict=True))
                if size != other
            }
            kind = self._kind(call)
            self._rigid[kind] = self._rigid.get(kind, frozenset()) | fixed

    def share(self, other: GraphSizes) -> None:
        """Know what others of the same model know of dimensions."""
        self._rigid = other._rigid

    def keep(self) -> None:
        """Forget what no trace is left of."""
        kinds = {key[:-1] for key in self._memo.keys("trace")}
        self._first = {k: v for k, v in self._first.items() if k[0] in kinds}
        self._rigid = {k: v for k, v in self._rigid.items() if k in kinds}

    def _free(self, call: Call) -> list[Traced]:
        """The graphs of this kind that may hold for other sizes."""
        return self._memo.values("trace", (*self._kind(call), None))

    def _traced(self, call: Call) -> list[Shapes]:
        """The shapes for which graphs of this kind were captured."""
        kind = self._kind(call)
        return [shapes for other, shapes in self._memo.keys("shapes") if other == kind]

    def _class(self, call: Call) -> tuple[Any, ...]:
        """The kind of a call, with its sizes of which each needs a graph."""
        kind, shapes = self._kind(call), call.shapes
        rigid = sorted(self._rigid.get(kind, ()))
        return kind, *((shapes[leaf] or ())[dim] for leaf, dim in rigid)
