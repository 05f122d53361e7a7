"""The verifier of a traced graph: what it takes and returns, and that it has no side effects.

It reports all faults at once, in time proportional to the number of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fxpipe.errors import Fault, VerificationError
from fxpipe.ir.traced import SEED, Traced, Value
from fxpipe.verify.plan import GraphFaults


def verify_traced(traced: Traced) -> Traced:
    """Return the graph, or raise VerificationError with every fault in it."""
    faults = list(_TracedGraph(traced).faults())
    if faults:
        raise VerificationError("the traced graph", faults, traced)
    return traced


class _TracedGraph(GraphFaults):
    """The rules of the whole model's graph."""

    def __init__(self, traced: Traced) -> None:
        super().__init__("", traced.graph, under_autograd=traced.under_autograd)
        self.traced = traced

    def faults(self) -> Iterator[Fault]:
        yield from self._lint()
        yield from self._functional()
        yield from self._placeholders()
        yield from self._buffers()
        yield from self._named()
        yield from self._returned()

    def _placeholders(self) -> Iterator[Fault]:
        traced = self.traced
        held = [*self._own((*traced.parameters, *traced.buffers))]
        inputs = [name for name in traced.inputs if name is not None]
        found = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        seed = [SEED] if SEED in found else []
        yield from self._same(
            "placeholder",
            found,
            [*held, *inputs, *seed],
            "take exactly the parameters, the buffers, the inputs and, where the graph draws "
            f"random numbers, {SEED}",
        )

    def _buffers(self) -> Iterator[Fault]:
        """Check that parameters are read once, buffers written once, and constants read."""
        traced = self.traced
        for target, count in Counter(a.target for a in traced.parameters).items():
            if count > 1:
                what = f"parameter {target}"
                yield Fault(f"is read as {count} arguments", "read it once", subject=what)
        for target, count in Counter(write.target for write in traced.writes).items():
            if count > 1:
                yield self._of(target, f"is written {count} times", "write its last value alone")
        read = {argument.target for argument in traced.buffers}
        for target in () if traced.under_autograd else traced.constants:
            if target not in read:
                yield self._of(target, "is a constant that the graph does not read", "leave it out")
        written = {write.target for write in traced.writes}
        for norm in traced.deferred:
            if norm.moments not in written:
                yield self._of(norm.moments, "gathers moments, and is not written", "write it")

    def _of(self, target: str, what: str, cure: str) -> Fault:
        return Fault(what, cure, subject=f"buffer {target}")

    def _named(self) -> Iterator[Fault]:
        """Check that each write, output and loss names a single value of the graph."""
        traced = self.traced
        writes = [*self._own(traced.writes)]
        outputs = [out.name for out in traced.outputs if isinstance(out, Value)]
        loss = [] if traced.loss is None else [traced.loss]
        for word, names in (("write", writes), ("output", outputs), ("loss", loss)):
            for name in dict.fromkeys(names):
                node = self.nodes.get(name)
                if node is None or node.op == "output":
                    yield self._fault(
                        f"the {word} is {name!r}, which no node makes",
                        "name the node that makes it",
                    )
                elif not (self.under_autograd or self._is_single(node)):
                    yield self._fault(
                        f"is the {word}, but not a single value", "name an item", name
                    )

    def _returned(self) -> Iterator[Fault]:
        traced = self.traced
        # in a graph that calls modules, these write the buffers
        wanted = [] if traced.under_autograd else [write.value for write in traced.writes]
        wanted += [out.name for out in traced.outputs if isinstance(out, Value)]
        end = next(iter(reversed(self.graph.nodes)), None)
        if end is not None and end.op == "output" and isinstance(end.args[0], tuple):
            if traced.loss is not None and len(end.args[0]) == len(wanted) + 1:
                wanted.append(traced.loss)  # the loss is not an output of the model
        yield from self._returns(
            wanted,
            "writes, outputs and loss",
            "return one tuple: its writes, its outputs that are values, and the loss if it is "
            "none of them",
        )
