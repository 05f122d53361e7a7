"""What pipes over ranks predict and profile: bytes that are sent, memory that lacks, and calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.errors import InputError, RankError
from fxpipe.extensions.ranks.channels import RankChannels
from fxpipe.ir.value import Buffer
from tests.extensions.copies.test_copies_on_ranks import both, compiled, equal
from tests.extensions.ranks.test_equal import Devices, images, pipe_of, skips, state
from tests.extensions.ranks.test_equal import Results as Found
from tests.extensions.ranks.test_equal import equal as same_bits
from tests.extensions.ranks.test_replicas import SIZES, Results, uneven
from tests.helpers.failing import Beside, unchanged
from tests.helpers.overlapping import make
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import Snapshot, within

pytestmark = pytest.mark.models


@contextmanager
def counted() -> Iterator[list[int]]:
    """Inside, the bytes of tensors are counted that this rank hands to others."""
    put, sent = RankChannels.put, [0]

    def count(channels: RankChannels, device: int, buffer: Any, value: Any) -> None:
        leaves = pytree.tree_leaves(value) if buffer.kind != "norm" else ()
        sent[0] += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        put(channels, device, buffer, value)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RankChannels, "put", count)
        yield sent


class Scaled(nn.Module):
    """It has a buffer that every forward reads."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def reset_parameters(self) -> None:
        self.scale.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


def bytes_sent(mesh: DeviceMesh) -> tuple[int, int]:
    """What a rank sends in a step, counted and predicted, of a model that is built without data."""
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Scaled()) for _ in range(4)]
    x, hollow = torch.randn(8, 6), nn.Sequential(*blocks).to("meta")
    with compiled(mesh, hollow, extensions=["deferred_batchnorm"]) as pipe:
        pipe.prepare(x, target=x)
        pipe.reset_parameters()
        pipe.step(x, target=x)
        with counted() as sent:
            pipe.step(x, target=x)
        found = pipe.simulate()
        assert found.sizes is not None
        own = [each for each in found.transfers if each.source == mesh.get_local_rank()]
        buffers = [each.buffer for each in own if isinstance(each.buffer, Buffer)]
        return sent[0], sum(map(found.sizes.crossing, buffers))


def test_a_rank_sends_as_many_bytes_as_predicted() -> None:
    for sent, predicted in on_ranks(2, bytes_sent):
        assert sent == predicted > 0


def profiled_copies(mesh: DeviceMesh) -> bool:
    """A profile is a step of the loop, also of stages with copies."""
    _, data = make("mlp", 3, 8)
    pipe, alone = both(mesh, 0.05)
    with pipe:
        for number, (x, y) in enumerate(data):
            if number == 1:
                assert pipe.profile(x, target=y).makespan > 0
                alone.step(x, y)
            else:
                assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
        equal(pipe, alone)
    return True


@pytest.mark.deep
def test_a_profile_of_copies_on_ranks_is_a_step() -> None:
    assert on_ranks(2, profiled_copies) == [True, True]


def profiled(devices: Devices) -> Found:
    """A profile measures the instructions of all devices, and is a step like any other."""
    with pipe_of(devices, skips()) as pipe:
        measured = pipe.profile(images(0), target=images(0))
        count = len(measured.device_times) if hasattr(measured, "device_times") else 0
        return state(pipe) | {
            "devices": count,
            "rows": str(pipe).splitlines().index("stages and their modules"),
        }


def test_a_profile_on_ranks_gives_the_bits_of_one_process() -> None:
    same_bits(on_ranks(2, profiled), profiled(2))


def one_profiles(mesh: DeviceMesh) -> str:
    """The second rank profiles no step where the others step."""
    beside = Beside(mesh)
    beside.step()
    x, y = beside.batch()
    before, pipe = Snapshot.of(beside.pipe), beside.pipe
    with within(2), pytest.raises((RankError, InputError)) as raised:
        if mesh.get_local_rank() == 1:
            pipe.profile(x, target=y, steps=0)
        else:
            pipe.step(x, target=y)
    unchanged(before, pipe, "profile")
    beside.step()
    pipe.close()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.deep
def test_ranks_of_which_one_profiles_are_told_the_difference_and_go_on() -> None:
    texts = on_ranks(3, one_profiles)
    assert all("profile" in text for text in texts)
    assert texts[1].startswith("RankError")


def note_bytes(pipe: fxpipe.Pipeline, found: Results) -> None:
    """Note the bytes of sums that a rank has sent, and those that are predicted."""
    group: Any = pipe._group
    found["sent"] = torch.tensor(group.summed)
    sent = pipe.simulate().summed(group.replica)[group.device]
    found["predicted"] = torch.tensor(sent * len(SIZES))


def uneven_bytes(mesh: DeviceMesh) -> dict[str, Results]:
    return uneven(mesh, look=note_bytes)


@pytest.mark.deep
def test_replicas_with_other_batches_send_as_many_bytes_as_predicted() -> None:
    for rank in on_ranks(4, uneven_bytes, replicas=2):
        for found in rank.values():
            assert found["sent"] == found["predicted"] > 0


def with_communicators(mesh: DeviceMesh) -> list[list[int]]:
    """The predicted peaks of two devices, of two replicas, without and with a constant."""
    found = []
    for each in (0, 1 << 20):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
        partition = fxpipe.Partition(["1"], communicator_bytes=each)
        with fxpipe.compile(
            model, mesh, loss=nn.functional.mse_loss, microbatches=2, partition=partition
        ) as pipe:
            pipe.prepare(x, target=x)
            found.append([memory.peak for memory in pipe.simulate().memory])
    return found


def test_the_memory_of_communicators_is_counted_as_often_as_a_device_has_some() -> None:
    """To the other device, from it, and with the other replica."""
    for without, with_some in on_ranks(4, with_communicators, replicas=2):
        assert with_some == [peak + 3 * (1 << 20) for peak in without]
    with pytest.raises(InputError, match="communicator_bytes of device 0 is -1; give a positive"):
        partition = fxpipe.Partition(communicator_bytes=-1)
        fxpipe.compile(nn.Linear(2, 2), 2, partition=partition)
