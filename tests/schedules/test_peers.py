"""What other pipelines get wrong about schedules and programs; each is refused here by name.

The behaviours are those of torch.distributed.pipelining in PyTorch 2.13, whose lists of actions
can be given as text; each fault is tried before anything runs.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import ExecutionError, ParseError, VerificationError
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import one_f_one_b
from fxpipe.verify.program import verify_program
from tests.helpers.plans import chain
from tests.oracles import loop

pytestmark = pytest.mark.models

ROWS = ("0: F0 F1 B0 B1 U", "1: F0 B0 F1 B1 U")


def text(*rows: str) -> str:
    return "\n".join(["schedule own stages=2 microbatches=2 delay=0", "place 0 | 1", *rows])


def refused(schedule: str) -> str:
    """What a step under it raises; no weight gets a gradient."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with (
        pytest.raises((ParseError, VerificationError)) as caught,
        fxpipe.compile(model, ["cpu"] * 2, schedule=schedule, loss=mse_loss) as pipe,
    ):
        pipe.step(x, target=x)
    assert all(gradient is None for gradient in loop.gradients(model).values())
    return str(caught.value)


def test_the_schedule_that_the_faults_are_made_of_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 4, 4).unbind()
    with fxpipe.compile(model, ["cpu"] * 2, schedule=text(*ROWS), loss=mse_loss) as pipe:
        pipe.step(x, target=y)
    loop.train(alone, 2, x, loss=mse_loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_duplicated_forward_is_refused_with_both_places() -> None:
    said = refused(text("0: F0 F1 F1 B0 B1 U", ROWS[1]))
    assert "device 0" in said and "position 2" in said and "position 1" in said


def test_an_unknown_stage_is_named_with_the_stages_that_there_are() -> None:
    said = refused(text("0: F0 F1@7 B0 B1 U", ROWS[1]))
    assert "line 3" in said and "stage 7" in said


@pytest.mark.parametrize(
    ("word", "column"),
    [("0F0xyz", 7), ("2FISH", 7), ("F0xyz", 9), ("F0@0x", 11), ("F", 8), ("F-1", 8)],
)
def test_a_word_that_only_begins_as_a_task_is_refused_at_its_place(word: str, column: int) -> None:
    said = refused(text(f"0: F0 {word} B0 B1 U", ROWS[1]))
    assert said.startswith(f"line 3, column {column}: ")


def test_a_missing_task_is_named() -> None:
    said = refused(text("0: F0 F1 B0 U", ROWS[1]))
    assert "stage 0 has no backward of micro-batch 1" in said


def test_a_deadlock_names_each_device_that_waits_and_for_what() -> None:
    said = refused(text("0: F0 B0 F1 B1 U", "1: F0 F1 B0 B1 U"))
    assert "deadlock" in said
    for device in (0, 1):
        assert f"device {device}, position" in said and f"until device {device}" in said


def communicated() -> Program:
    return communicate(Lower(chain(3))(one_f_one_b(3, 3)))


def edited(program: Program, device: int, own: list[ins.Instruction]) -> Program:
    lists = (*program.lists[:device], tuple(own), *program.lists[device + 1 :])
    return replace(program, lists=lists)


def test_a_missing_send_is_refused_and_does_not_hang() -> None:
    program = communicated()
    sends = [x for x in program.lists[1] if isinstance(x, ins.Send)]
    assert len(sends) == 6
    for send in sends:
        own = [x for x in program.lists[1] if x is not send]
        with pytest.raises(
            VerificationError, match=r"device [02], .* recv .*: device 1 never sends it"
        ):
            verify_program(edited(program, 1, own))


def test_swapped_receives_are_refused_and_never_give_wrong_gradients() -> None:
    program = communicated()
    own = list(program.lists[1])
    channels: dict[int, list[int]] = {}
    for at, x in enumerate(own):
        if isinstance(x, ins.Receive):
            channels.setdefault(x.buffer.source, []).append(at)
    for places in channels.values():
        for one, two in pairwise(places):
            swapped = list(own)
            swapped[one], swapped[two] = own[two], own[one]
            with pytest.raises(VerificationError):
                verify_program(edited(program, 1, swapped))


class Fails(nn.Module):
    """Raises in one micro-batch, and counts those that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if (x > 100).any():
            raise ZeroDivisionError("as the test says")
        return x


def test_an_exception_stops_every_stage_early_and_the_next_step_works() -> None:
    """As torchgpipe promises: no further micro-batch is begun once one has failed."""
    torch.manual_seed(0)
    fails = Fails()
    model = nn.Sequential(nn.Linear(4, 4), fails, nn.Linear(4, 4))
    x = torch.randn(16, 4)
    bad = x.clone()
    bad[2] = 1e4
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        schedule="gpipe",
        microbatches=16,
        loss=mse_loss,
        extensions=[fxpipe.LeafModules(Fails)],
        partition=["2"],
    ) as pipe:
        pipe.step(x, target=x)
        loop.clear(model)
        fails.seen = 0
        with pytest.raises(ExecutionError, match="as the test says"):
            pipe.step(bad, target=x)
        assert fails.seen == 3
        assert all(gradient is None for gradient in loop.gradients(model).values())
        pipe.step(x, target=x)
