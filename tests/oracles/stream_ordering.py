"""What streams and events order, by brute force: every path, every pair of accesses."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer

Node = tuple[int, int, int]
"""Step, device, position."""


class Ordering:
    """The instructions of some consecutive windows, and which end before which start."""

    def __init__(self, program: Program, steps: int) -> None:
        self.program = program
        self.nodes: list[Node] = [
            (step, device, position)
            for step in range(steps)
            for device, own in enumerate(program.lists)
            for position in range(len(own))
        ]
        self.index = {node: k for k, node in enumerate(self.nodes)}
        record: dict[Event, Node] = {}
        for node in self.nodes:
            if (event := self.launch(node).record) is not None:
                record[event._replace(batch=event.batch + node[0])] = node
        self.before: list[set[int]] = [set() for _ in self.nodes]
        self.hosts: list[set[int]] = [set() for _ in self.nodes]
        last: dict[tuple[int, str], int] = {}
        latest: dict[int, int] = {}
        for node in sorted(self.nodes, key=lambda node: (node[1], node[0], node[2])):
            k, launch = self.index[node], self.launch(node)
            stream = node[1], launch.stream
            if stream in last:
                self.before[k].add(last[stream])
            if node[1] in latest:
                self.hosts[k].add(latest[node[1]])
            last[stream], latest[node[1]] = k, k
            for event in launch.waits:
                event = event._replace(batch=event.batch + node[0])
                if event in record:
                    self.before[k].add(self.index[record[event]])
        self.past = self._closed([h | b for h, b in zip(self.hosts, self.before, strict=True)])

    @property
    def runs(self) -> bool:
        """Whether the program can be launched at all."""
        return self.past is not None

    def launch(self, node: Node) -> Launch:
        return self.program.launches[node[1]][node[2]]

    def instruction(self, node: Node) -> ins.Instruction:
        return self.program.lists[node[1]][node[2]]

    def _closed(self, launched: list[set[int]]) -> list[int] | None:
        """For each node the set of nodes that end before it, as bits; None if there is a cycle."""
        sends = {
            self._of(node, x.buffer): self.index[node]
            for node in self.nodes
            if isinstance(x := self.instruction(node), ins.Send)
        }
        for node in self.nodes:
            x = self.instruction(node)
            if isinstance(x, ins.Receive) and self._of(node, x.buffer) in sends:
                launched[self.index[node]].add(sends[self._of(node, x.buffer)])
        past: list[int] = [0] * len(self.nodes)
        left = [len(each) for each in launched]
        after: list[list[int]] = [[] for _ in self.nodes]
        for k, each in enumerate(launched):
            for b in each:
                after[b].append(k)
        ready, done = [k for k, count in enumerate(left) if not count], 0
        while ready:
            k = ready.pop()
            done += 1
            for b in self.before[k]:
                past[k] |= past[b] | 1 << b
            for a in after[k]:
                left[a] -= 1
                if not left[a]:
                    ready.append(a)
        return past if done == len(self.nodes) else None

    def is_before(self, one: Node, other: Node) -> bool:
        """Whether ``one`` always ends before ``other`` starts."""
        assert self.past is not None
        return bool(self.past[self.index[other]] >> self.index[one] & 1)

    def _of(self, node: Node, buffer: Buffer) -> Buffer:
        return buffer._replace(batch=buffer.batch + node[0])

    def races(self) -> Iterator[tuple[Node, Node]]:
        """Yield pairs of instructions that conflict and are not ordered, in the lists' order."""
        reads: dict[object, list[Node]] = {}
        writes: dict[object, list[Node]] = {}
        ends: dict[object, list[Node]] = {}
        for node in self.nodes:
            x, device = self.instruction(node), node[1]
            if isinstance(x, ins.Send | ins.Output | ins.Barrier | ins.Pause):
                continue
            for of, buffers in (
                (reads, x.uses(self.program)),
                (writes, x.makes(self.program)),
                (ends, x.ends(self.program)),
            ):
                for buffer in buffers:
                    of.setdefault((device, self._of(node, buffer)), []).append(node)
            if isinstance(x, ins.Receive):
                origin = self.program.origin(x), self._of(node, x.buffer)
                reads.setdefault(origin, []).append(node)
        for what, readers in reads.items():
            for reader in readers:
                for writer in writes.get(what, []):
                    if not self.is_before(writer, reader):
                        yield writer, reader
        for what, enders in ends.items():
            for ender in enders:
                for user in (*reads.get(what, []), *writes.get(what, [])):
                    if user != ender and not self.is_before(user, ender):
                        yield user, ender
        yield from self._memory()
        yield from self._stages()

    def _memory(self) -> Iterator[tuple[Node, Node]]:
        """Yield pairs: memory is freed, then allocated by an instruction that may start before."""
        for device in range(self.program.devices):
            let_go: list[Node] = []
            for node in sorted(node for node in self.nodes if node[1] == device):
                x = self.instruction(node)
                if isinstance(x, ins.Send | ins.Output | ins.Barrier | ins.Pause):
                    continue
                if not isinstance(x, ins.Free):
                    yield from [(one, node) for one in let_go if not self.is_before(one, node)]
                if not isinstance(x, ins.Load | ins.Receive):
                    let_go.append(node)

    def _stages(self) -> Iterator[tuple[Node, Node]]:
        """Yield pairs that change a stage's lasting state in the list's order, but unordered."""
        for stage, device in enumerate(self.program.placement):
            own = [
                node
                for node in sorted(node for node in self.nodes if node[1] == device)
                if getattr(self.instruction(node), "stage", None) == stage
            ]
            for k, node in enumerate(own):
                for other in own[:k]:
                    pair = self.instruction(other), self.instruction(node)
                    if (
                        any(isinstance(x, ins.Update) for x in pair)
                        or all(isinstance(x, ins.Forward) for x in pair)
                        or all(
                            isinstance(x, ins.Backward | ins.WeightGrad)
                            or x.opcode in ("norm", "clip")
                            for x in pair
                        )
                    ) and not self.is_before(other, node):
                        yield other, node
