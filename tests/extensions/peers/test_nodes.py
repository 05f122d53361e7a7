"""Schedules of zero-bubble: its lists of nodes, read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from fxpipe import InputError, Schedule
from fxpipe.ir.recipe import find_recipe


class FuncType(Enum):
    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    SEND_FORWARD = "SEND_FORWARD"
    POST_VALIDATION = "POST_VALIDATION"
    S = "S"

    def __repr__(self) -> str:
        return self.value


class Direction(Enum):
    NEXT = 0


@dataclass
class Node:
    type: FuncType
    stage: int
    microbatch: int
    chunk: int = 0
    seq_split_idx: int = 0
    layer_group_idx: int | None = None
    start_time: float | None = None
    comm_direction: Direction | None = None


def nodes_of(schedule: Schedule, grouped: bool) -> list[list[Node]]:
    """A schedule as zero-bubble's lists, with a send and a validation in each."""
    table: list[list[Node]] = []
    for device, row in enumerate(schedule.rows):
        send = Node(FuncType.SEND_FORWARD, device, 0, comm_direction=Direction.NEXT)
        table.append([Node(FuncType.POST_VALIDATION, device, 0), send])
        for t in row:
            if t.kind == "U":
                continue
            assert t.stage is not None
            assert t.microbatch is not None
            kind = FuncType({"I": "B", "B": "BW"}.get(t.kind, t.kind))
            chunk = t.stage // schedule.devices
            group = t.stage if grouped else None
            table[-1].append(Node(kind, device, t.microbatch, chunk, layer_group_idx=group))
    return table


@pytest.mark.parametrize(
    ("name", "grouped"),
    [
        ("interleaved-1f1b", True),
        *((name, grouped) for name in ("1f1b", "zb-h1", "zb-v") for grouped in (True, False)),
    ],
)
def test_lists_of_nodes_are_read_as_objects_and_as_mappings(name: str, grouped: bool) -> None:
    schedule = find_recipe(name)(3, 6)
    table = nodes_of(schedule, grouped)
    plain = [
        [
            {
                "type": n.type.value,
                "stage": n.stage,
                "minibatch": n.microbatch,
                "chunk": n.chunk,
                "layer_group_idx": n.layer_group_idx,
            }
            for n in own
        ]
        for own in table
    ]
    for given in (table, plain, json.loads(json.dumps(plain))):
        assert Schedule.from_nodes(given, name=name) == schedule


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (Node(FuncType.S, 0, 0), "row 1, node 1: type S has no task here"),
        (Node(FuncType.F, 1, 0), "row 1, node 1: it is of stage 1; move it to row 2"),
        (Node(FuncType.F, 0, -1), "row 1, node 1: its microbatch is -1"),
        (Node(FuncType.F, 0, 0, seq_split_idx=1), "it is a part of a sequence"),
        (Node(FuncType.F, 0, 0, layer_group_idx=3), "no task of stage 0; count the stages from 0"),
    ],
)
def test_a_node_that_has_no_task_is_refused_by_row(node: Node, told: str) -> None:
    with pytest.raises(InputError) as caught:
        Schedule.from_nodes([[node]])
    assert told in str(caught.value)


@pytest.mark.parametrize("nodes", [5, [5], None, {"type": "F"}, "[[]]"])
def test_what_is_no_list_of_lists_is_refused(nodes: Any) -> None:
    with pytest.raises(InputError, match="give lists of nodes, one a stage"):
        Schedule.from_nodes(nodes)
