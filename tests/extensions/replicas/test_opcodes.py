"""Texts of the instructions that sum over replicas, and what becomes of programs without these."""

from __future__ import annotations

import pytest

from fxpipe.errors import InputError, ParseError
from fxpipe.extensions.replicas.lowering import gather_weights
from fxpipe.extensions.replicas.opcodes import (
    AllGather,
    GatherWeights,
    PartialBackward,
    ReduceScatter,
)
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from tests.helpers.opcodes import assert_read_back, take_away
from tests.helpers.plans import chain_program

LINES = {
    "partial_backward": (
        PartialBackward(1, 2, 3, -1, "W", 4),
        "partial_backward W s1[2'] v3 bucket 4",
    ),
    "reduce_scatter": (ReduceScatter(2), "reduce_scatter s2"),
    "all_gather": (AllGather(2, -1), "all_gather s2'"),
    "gather_weights": (GatherWeights(2, -2), "gather_weights s2''"),
}


@pytest.mark.parametrize("word", LINES)
def test_every_instruction_is_read_back(word: str) -> None:
    assert_read_back(word, *LINES[word])


@pytest.mark.parametrize("shards", [False, True])
def test_the_program_of_replicas_is_read_back_and_verified(shards: bool) -> None:
    schedule = find_recipe("1f1b")(2, 2)
    buckets = {0: [(0,), (1,)]}
    program = chain_program(schedule, replicas=2, buckets=buckets)
    program = gather_weights(program) if shards else program
    assert {*LINES} - program.opcodes == ({"gather_weights"} if not shards else set())
    assert program.buckets == {0: 2}
    assert Program.parse(str(program.verify())) == program


def test_without_the_extension_replicas_and_opcodes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = find_recipe("1f1b")(2, 2)
    text = str(chain_program(schedule, replicas=2))
    take_away(monkeypatch, "sum_replicas", "all_gather")
    with pytest.raises(InputError, match="schedule '1f1b' needs the extension"):
        chain_program(schedule, replicas=2)
    with pytest.raises(ParseError, match="there is no instruction 'all_gather'"):
        Program.parse(text)
