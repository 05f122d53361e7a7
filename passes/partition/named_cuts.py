"""Cut a graph at submodules that the user names: a new stage begins at each.

before:  ["middle", "last"]
after:   stage 0: all before the first node of ``middle``;  stage 1: from there to ``last``; …
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from torch import fx, nn

from fxpipe.errors import PartitionError, near
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import Assignment, bonds, in_order, kept_together, within


def cut_at(
    traced: Traced,
    stages: int,
    at: Sequence[str],
    model: nn.Module,
    together: Sequence[str] = (),
) -> Assignment:
    """Cut by names of submodules: a new stage begins at each.

    Args:
        traced: the graph.
        stages: how many.
        at: where stages begin.
        model: the model, for the names that there are.
        together: submodules that must not be cut.

    Raises:
        PartitionError: a submodule does not exist, computes nothing, runs earlier than the one
            named before it, or is where no cut can be; or their number does not fit the stages.
    """
    if len(at) != stages - 1:
        raise PartitionError(
            f"partition names {len(at)} cuts, which make {len(at) + 1} stages, for "
            f"{stages} devices; name {stages - 1}"
        )
    nodes = in_order(traced)
    place_of = {node: place for place, node in enumerate(nodes)}
    runs = [
        (min(map(place_of.__getitem__, bond)), max(map(place_of.__getitem__, bond)))
        for bond in (*bonds(traced, nodes), *kept_together(nodes, together))
    ]
    places = _cut_places(runs, len(nodes))
    known = [name for name, _ in model.named_modules() if name]
    cuts: list[int] = []
    for name in at:
        if name not in known:
            raise PartitionError(f"partition names no submodule {name!r}: {near(name, known)}")
        place = next((i for i, node in enumerate(nodes) if within(node, name)), None)
        if place is None:
            raise PartitionError(f"submodule {name!r} computes nothing; cut at another one")
        if cuts and place == cuts[-1]:
            raise PartitionError(
                f"the cuts at {at[len(cuts) - 1]!r} and at {name!r} are one and the same, and "
                "a stage between them would be empty; name another one"
            )
        if cuts and place < cuts[-1]:
            raise PartitionError(
                f"a cut at {name!r} after the one at {at[len(cuts) - 1]!r} would make an edge "
                "run backward, for it runs earlier; name the cuts in the order in which they run"
            )
        if place not in places[1:-1]:
            raise PartitionError(f"no stage can begin at {name!r}: " + _why_not(runs, nodes, place))
        cuts.append(place)
    return _assigned(nodes, cuts)


def _cut_places(runs: Sequence[tuple[int, int]], length: int) -> list[int]:
    """The indices at which a stage may begin, including 0 and the end."""
    blocked: set[int] = set()
    for first, last in runs:
        blocked.update(range(first + 1, last + 1))
    return [place for place in range(length + 1) if place not in blocked] if length else [0]


def _assigned(nodes: Sequence[fx.Node], cuts: Sequence[int]) -> Assignment:
    return Assignment(
        len(cuts) + 1,
        {node.name: bisect.bisect_right(cuts, place) for place, node in enumerate(nodes)},
    )


def _why_not(runs: Sequence[tuple[int, int]], nodes: Sequence[fx.Node], place: int) -> str:
    for first, last in runs:
        if first < place <= last:
            return (
                f"{nodes[first].name} and {nodes[last].name} on its two sides share a result or a "
                "buffer that is written, or are kept together, and must be in one stage; cut "
                "before or after both"
            )
    return "nothing runs before it; cut further on"
