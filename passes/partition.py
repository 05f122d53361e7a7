"""Assign the nodes of a graph to stages so that every edge runs forward.

before:  conv_1, relu_1, conv_2, relu_2            (in the order of the program)
after:   {"conv_1": 0, "relu_1": 0, "conv_2": 1, "relu_2": 1}

Stages are runs of consecutive nodes. Among all such cuts, ``balance`` takes one whose slowest
stage is at most SLACK above the best possible, and of those the one that sends the fewest bytes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from fxpipe.errors import PartitionError, near
from fxpipe.passes.measure import NodeCost
from fxpipe.passes.symbolic import leaf_tensors
from fxpipe.traced import Traced

SLACK = 0.01
"""How much slower than the best the slowest stage may be: measured times are no exacter."""


@dataclass(frozen=True)
class Assignment:
    """Which stage computes what.

    Attributes:
        stages: how many there are.
        nodes: node name → stage, for every node that computes.
    """

    stages: int
    nodes: Mapping[str, int]


def balance(traced: Traced, stages: int, costs: Mapping[str, NodeCost]) -> Assignment:
    """Cut into stages of about equal time: minimise the slowest, then the bytes that cross.

    Raises:
        PartitionError: the graph cannot be cut into so many stages.
    """
    nodes = in_order(traced)
    places = _cut_places(traced, nodes)
    if len(places) - 1 < stages:
        raise PartitionError(
            f"the model can be cut into at most {max(len(places) - 1, 0)} stages, not {stages}; "
            "give fewer devices"
        )
    seconds = [0.0, *itertools.accumulate(costs[node.name].seconds for node in nodes)]
    limit = _best_bottleneck([seconds[place] for place in places], stages) * (1 + SLACK)
    crossing = _Crossing(traced, nodes, costs)
    # least[k][j]: the fewest bytes into the first k stages, which end at place j, and its start
    least: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for stage in range(stages):
        reached: dict[int, tuple[int, int]] = {}
        ends = range(stage + 1, len(places) - (stages - stage - 1))
        for start, (bytes_before, _) in least[stage].items():
            within = [j for j in ends if j > start and _fits(seconds, places, start, j, limit)]
            into = crossing.bytes_into(places[start], [places[j] for j in within])
            for j, arriving in zip(within, into, strict=True):
                total = bytes_before + arriving
                if j not in reached or total < reached[j][0]:
                    reached[j] = (total, start)
        least.append(reached)
    cuts = [len(places) - 1]
    for stage in range(stages, 1, -1):
        cuts.append(least[stage][cuts[-1]][1])
    return _assigned(nodes, [places[j] for j in reversed(cuts[1:])])


def cut_at(traced: Traced, stages: int, names: Sequence[str], model: nn.Module) -> Assignment:
    """Cut by names of submodules: a new stage begins at each.

    Raises:
        PartitionError: a name that does not exist, computes nothing, comes before the cut that
            stands before it, or lies where no cut can be; or their number does not fit.
    """
    if len(names) != stages - 1:
        raise PartitionError(
            f"partition names {len(names)} cuts, which make {len(names) + 1} stages, for "
            f"{stages} devices; name {stages - 1}"
        )
    nodes = in_order(traced)
    places = _cut_places(traced, nodes)
    known = [name for name, _ in model.named_modules() if name]
    cuts: list[int] = []
    for name in names:
        if name not in known:
            raise PartitionError(f"partition names no submodule {name!r}: {near(name, known)}")
        place = next((i for i, node in enumerate(nodes) if within(node, name)), None)
        if place is None:
            raise PartitionError(f"submodule {name!r} computes nothing; cut at another one")
        if cuts and place == cuts[-1]:
            raise PartitionError(
                f"the cuts at {names[len(cuts) - 1]!r} and at {name!r} are one and the same, and "
                "a stage between them would be empty; name another one"
            )
        if cuts and place < cuts[-1]:
            raise PartitionError(
                f"a cut at {name!r} after the one at {names[len(cuts) - 1]!r} would make an edge "
                "run backward, for it runs earlier; name the cuts in the order in which they run"
            )
        if place not in places[1:-1]:
            raise PartitionError(
                f"no stage can begin at {name!r}: " + _why_not(traced, nodes, place)
            )
        cuts.append(place)
    return _assigned(nodes, cuts)


def place_like(traced: Traced, reference: Traced, assignment: Assignment) -> Assignment:
    """The same assignment for another graph of the same model, such as that of eval mode.

    Nodes go where the same call of the same submodule went, parameters stay on their stage, and
    what the reference does not know goes where its inputs are.
    """
    parameter_stage = owners(reference, assignment)
    read: dict[str, list[int]] = {}
    for target, nodes in readers(traced).items():
        for node in nodes:
            if target in parameter_stage:
                read.setdefault(node.name, []).append(parameter_stage[target])
    by_call: dict[tuple[str, str, int], int] = {}
    for key, node in _calls(compute_nodes(reference.graph)):
        by_call[key] = assignment.nodes[node.name]
    by_module: dict[str, int] = {}
    for (module, _, _), stage in by_call.items():
        by_module[module] = max(stage, by_module.get(module, 0))
    placed: dict[str, int] = {}
    for key, node in _calls(compute_nodes(traced.graph)):
        floor = [placed[n.name] for n in node.all_input_nodes if n.name in placed]
        earliest = max([*floor, *read.get(node.name, [])], default=0)
        wish = by_call.get(key, by_module.get(key[0], earliest))
        placed[node.name] = max(wish, earliest)
    _settle(traced, placed)
    return Assignment(assignment.stages, placed)


def owners(traced: Traced, assignment: Assignment) -> dict[str, int]:
    """Parameter or buffer (its name in the model) → the first stage that reads it."""
    return {
        target: min(
            (assignment.nodes[n.name] for n in nodes if n.name in assignment.nodes), default=0
        )
        for target, nodes in readers(traced).items()
    }


def readers(traced: Traced) -> dict[str, list[fx.Node]]:
    """Parameter or buffer (its name in the model) → the nodes that read it."""
    if traced.leaves:
        return leaf_tensors(traced.module)
    targets = {a.name: a.target for a in (*traced.parameters, *traced.buffers)}
    return {
        targets[node.name]: list(node.users) for node in traced.graph.nodes if node.name in targets
    }


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a stage computes: all but placeholders and the output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def in_order(traced: Traced) -> list[fx.Node]:
    """The compute nodes in an order of the program in which cuts cost least.

    What depends on no input of the call, such as a weight's cast to another type, comes right
    before its first use, so that no cut falls between the two.
    """
    waiting: set[fx.Node] = set()
    constant = _constant(traced)
    ordered: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in waiting:
                waiting.discard(source)
                place(source)
        ordered.append(node)

    for node in compute_nodes(traced.graph):
        if node in constant and any(user.op != "output" for user in node.users):
            waiting.add(node)
        else:
            place(node)
    ordered += (node for node in compute_nodes(traced.graph) if node in waiting)
    return ordered


def _constant(traced: Traced) -> set[fx.Node]:
    """The nodes that depend on no input of the call, but on parameters and buffers at most."""
    held = {argument.name for argument in (*traced.parameters, *traced.buffers)}
    found: set[fx.Node] = set()
    for node in compute_nodes(traced.graph):
        sources = node.all_input_nodes
        if node.op == "call_function" and all(n in found or n.name in held for n in sources):
            found.add(node)
    return found


def within(node: fx.Node, module: str) -> bool:
    """Whether a node belongs to a submodule or to one inside it."""
    return any(path == module or path.startswith(module + ".") for path in module_paths(node))


def module_paths(node: fx.Node) -> list[str]:
    """The submodules that a node belongs to, outermost first, without the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values() if path]


def _assigned(nodes: Sequence[fx.Node], cuts: Sequence[int]) -> Assignment:
    return Assignment(
        len(cuts) + 1,
        {node.name: bisect.bisect_right(cuts, place) for place, node in enumerate(nodes)},
    )


def _fits(
    seconds: Sequence[float], places: Sequence[int], start: int, end: int, limit: float
) -> bool:
    return seconds[places[end]] - seconds[places[start]] <= limit


def _best_bottleneck(ends: Sequence[float], stages: int) -> float:
    """The least time of the slowest stage: bisection over it, each guess tried greedily."""
    low, high = ends[-1] / stages, ends[-1]
    for _ in range(60):
        guess = (low + high) / 2
        if _stages_needed(ends, guess) <= stages:
            high = guess
        else:
            low = guess
    return math.nextafter(high, math.inf)


def _stages_needed(ends: Sequence[float], limit: float) -> float:
    count, start = 0, 0
    while start < len(ends) - 1:
        end = bisect.bisect_right(ends, ends[start] + limit) - 1
        if end == start:
            return math.inf
        start, count = end, count + 1
    return count


class _Crossing:
    """Counts the bytes that arrive at a run of nodes from the ones before it."""

    def __init__(
        self, traced: Traced, nodes: Sequence[fx.Node], costs: Mapping[str, NodeCost]
    ) -> None:
        place = {node: index for index, node in enumerate(nodes)}
        parameters = {argument.name for argument in traced.parameters}
        made: dict[fx.Node, int] = dict(place)
        for node in traced.graph.nodes:
            if node.op == "placeholder" and node.name in parameters:
                # a shared parameter is sent on by the first stage that uses it
                made[node] = min((place[u] for u in node.users if u in place), default=0)
        self._reads: list[list[tuple[int, int, int]]] = [[] for _ in nodes]
        for node, birth in made.items():
            uses = sorted(place[user] for user in node.users if user in place)
            for before, use in itertools.pairwise([birth, *uses]):
                self._reads[use].append((birth, before, costs[node.name].bytes))

    def bytes_into(self, start: int, ends: Sequence[int]) -> list[int]:
        """For each end, in ascending order, the bytes of the values from before ``start``."""
        totals: list[int] = []
        total, place = 0, start
        for end in ends:
            for use in range(place, end):
                for birth, before, size in self._reads[use]:
                    if birth < start and before < start:  # its first use in this run
                        total += size
            place = end
            totals.append(total)
        return totals


def _cut_places(traced: Traced, nodes: Sequence[fx.Node]) -> list[int]:
    """The indices before which a stage may begin, 0 and the end among them."""
    blocked: set[int] = set()
    for first, last in _bound_together(traced, nodes):
        blocked.update(range(first + 1, last + 1))
    return [place for place in range(len(nodes) + 1) if place not in blocked] if nodes else [0]


def _bound_together(traced: Traced, nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Runs of nodes that must share a stage, each as its first and last index.

    An operation and the parts of its result; what depends on no input and its first use; all that
    reads or writes a buffer which is written, for the next micro-batch reads what this one wrote;
    all calls of leaf modules that share a parameter or buffer.
    """
    place = {node: index for index, node in enumerate(nodes)}
    constant = {n for n in _constant(traced) if any(user in place for user in n.users)}
    runs: list[tuple[int, int]] = []
    for node in nodes:
        parts = [place[user] for user in node.users if is_part(user)]
        if parts:
            runs.append((place[node], max(parts)))
        elif node in constant:
            runs.append((place[node], min(place[user] for user in node.users if user in place)))
    by_name = {node.name: node for node in traced.graph.nodes}
    read = readers(traced)
    written = {write.target: write.value for write in traced.writes}
    for target, users in read.items():
        group = [place[user] for user in users if user in place]
        if target in written:
            group += [place[n] for n in (by_name.get(written[target]),) if n in place]
        elif not any(user.op == "call_module" for user in users):
            continue
        if len(group) > 1:
            runs.append((min(group), max(group)))
    return runs


def is_part(node: fx.Node) -> bool:
    """Whether a node picks one result out of an operation that has several."""
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(node.args[0], fx.Node)
        and not hasattr(node.args[0].meta.get("val"), "dtype")
        and isinstance(node.args[1], int)
    )


def _why_not(traced: Traced, nodes: Sequence[fx.Node], place: int) -> str:
    for first, last in _bound_together(traced, nodes):
        if first < place <= last:
            return (
                f"{nodes[first].name} and {nodes[last].name} on its two sides share a result or a "
                "buffer that is written, and must be in one stage; cut before or after both"
            )
    return "nothing runs before it; cut further on"


def _calls(nodes: Sequence[fx.Node]) -> list[tuple[tuple[str, str, int], fx.Node]]:
    """Each node with its key: its submodule, its operation and the how-manieth it is there."""
    counts: dict[tuple[str, str], int] = {}
    keyed: list[tuple[tuple[str, str, int], fx.Node]] = []
    for node in nodes:
        paths = module_paths(node)
        where = (paths[-1] if paths else "", str(node.target))
        counts[where] = counts.get(where, -1) + 1
        keyed.append(((*where, counts[where]), node))
    return keyed


def _settle(traced: Traced, placed: dict[str, int]) -> None:
    """Move nodes to later stages until every edge runs forward and what is bound is together."""
    nodes = in_order(traced)
    runs = _bound_together(traced, nodes)
    moved = True
    while moved:
        moved = False
        for node in nodes:
            floor = max(
                (placed[n.name] for n in node.all_input_nodes if n.name in placed), default=0
            )
            if placed[node.name] < floor:
                placed[node.name], moved = floor, True
        for first, last in runs:
            latest = max(placed[node.name] for node in nodes[first : last + 1])
            for node in nodes[first : last + 1]:
                if placed[node.name] < latest:
                    placed[node.name], moved = latest, True
