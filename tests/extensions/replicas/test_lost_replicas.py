"""A process of one replica is killed: all others are told, and nothing waits for ever."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.extensions.replicas import opcodes
from fxpipe.ir import instruction as ins
from tests.extensions.ranks.test_lost_ranks import survivors, told_of
from tests.extensions.ranks.test_replicas import batch, pipe_of
from tests.helpers.failing import at, die
from tests.helpers.ranks import DeviceMesh
from tests.helpers.tiny import within

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are killed as POSIX does")

CASES: list[tuple[list[list[int]], type[ins.Instruction], dict[str, Any]]] = [
    ([[0, 1], [2, 3]], opcodes.GatherWeights, {"schedule": "2bw", "shards": True}),
    ([[0], [1], [2]], opcodes.ReduceScatter, {"schedule": "zb-h1", "clip_norm": 0.1}),
    ([[0], [1]], opcodes.AllGather, {"shards": True}),
]
"""Replica → its ranks; what the last of all has run when it is killed; and the pipe's options."""


def killed_in_turn(mesh: DeviceMesh, folder: str) -> list[str]:
    """In each case the last rank of those that are left is killed."""
    here = torch.distributed.get_rank()
    made = [DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "pp")) for ranks, _, _ in CASES]
    told: list[str] = []
    for own, (ranks, kind, options) in zip(made, CASES, strict=True):
        lost = ranks[-1][-1]
        pipe = pipe_of(own, **options)
        x, y = batch(0, own.get_local_rank("dp"))
        for _ in range(4):
            pipe.step(x, target=y)
        if here == lost:
            kinds = [*map(type, pipe.program.lists[own.get_local_rank("pp")])]
            with at(kinds.index(kind), die):
                train(pipe, x, y)
            raise AssertionError("was not killed")
        with told_of(lost):
            train(pipe, x, y)
        with told_of(lost, 1):
            pipe.step(x, target=y)
        with within(2):
            pipe.close()
        told.append(kind.__name__)
    return told


def train(pipe: fxpipe.Pipeline, x: torch.Tensor, y: torch.Tensor) -> None:
    """Several steps, as where batches overlap some more begin before one is told of a failure."""
    for _ in range(5):
        pipe.step(x, target=y)
    pipe.flush()


def test_all_replicas_are_told_of_a_killed_process_of_one() -> None:
    told = survivors(4, {1, 2, 3}, killed_in_turn)
    assert told == [[kind.__name__ for _, kind, _ in CASES]]
