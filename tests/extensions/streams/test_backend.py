"""What the backend of devices with streams asks of simulated ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import InputError
from fxpipe.devices import read_devices
from fxpipe.extensions.streams.lanes import ALONE, TRIES, Lanes
from fxpipe.extensions.streams.launching import StreamBackend
from fxpipe.ir.launch import COMPUTE
from fxpipe.passes.partition.measure import Stopwatch
from fxpipe.runtime.choice import Dispatches
from fxpipe.runtime.host import BatchHost
from fxpipe.text.program import print_instruction
from tests.helpers.profiles import deep
from tests.helpers.tiny import Tiny, batch
from tests.oracles import loop
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.training import Setting, compare, train

pytestmark = simulated

both = pytest.mark.parametrize("dispatch", ["device", "thread"])

LAZY = 1
PLACES = ["cuda:0", "cuda:1"]

HOST = cast(BatchHost, SimpleNamespace(sources=set()))
"""A caller whose batch is in host memory."""


def pipe_of(model: nn.Module, devices: Sequence[Any], **options: Any) -> fxpipe.Pipeline:
    options = {"loss": nn.functional.cross_entropy, "microbatches": 4, **options}
    return fxpipe.compile(model, devices, **options)


def spans(dispatch: Dispatches) -> None:
    named: set[str] = set()
    spanned = torch.cuda.nvtx.range

    def noted(name: str) -> Any:
        named.add(name)
        return spanned(name)

    vars(torch.cuda.nvtx)["range"] = noted
    streams = [torch.cuda.Stream(0), torch.cuda.Stream(0)]
    with pipe_of(Tiny(), streams, extensions=[fxpipe.Dispatch(dispatch)]) as pipe:
        x, y = batch(8)
        pipe.step(x, target=y)
        told = {print_instruction(x) for own in pipe.program.lists for x in own}
    assert named == told


@both
def test_profilers_show_what_is_launched_by_the_names_of_instructions(dispatch: Dispatches) -> None:
    on_devices(spans, dispatch)


@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
def test_streams_of_one_device_train_as_cpu_devices(schedule: str) -> None:
    setting = Setting("dropout", {"schedule": schedule, "extensions": [fxpipe.Dispatch("thread")]})
    assert not on_devices(compare, setting, ["stream:0", "stream:0"], [(LAZY, 0)])


def pinned(schedule: str) -> Mapping[str, int]:
    """What the host waits for in a warm step whose batch is in pinned memory of the caller's."""
    from tests.simcuda import cuda

    setting = Setting("dropout", {"schedule": schedule}, inputs="pinned")
    return train(setting, PLACES, cuda.take)[0].waits[-1]


def test_a_step_returns_when_pinned_memory_of_the_callers_is_read() -> None:
    """Where batches overlap the pipe reads copies, so that a step need not wait for them."""
    assert {*on_devices(pinned, "1f1b")} == {"event.synchronize"}
    assert not on_devices(pinned, "2bw")


def test_what_stages_offload_lies_in_pinned_memory_and_nobody_waits() -> None:
    setting = Setting("dropout", {"schedule": "gpipe", "extensions": ["offload"]})
    assert not on_devices(compare, setting, PLACES, [(LAZY, 0)])


def repeated() -> None:
    torch.manual_seed(0)
    model = Tiny()
    plain = copy.deepcopy(model)
    rows = torch.randn(1, 4).expand(8, 4), torch.randn(8, 4), torch.randn(1, 4).expand(8, 4)
    y = batch(8)[1]
    with pipe_of(model, PLACES) as pipe:
        for x in rows:  # a copy in the device's memory repeats nothing
            made = pipe.step(x, target=y)
            ran = loop.train(plain, 4, x, loss=nn.functional.cross_entropy, target=y)
            assert torch.equal(made.cpu(), ran.loss)
        found = gradients(model)
    loop.assert_same(found, gradients(plain))


def gradients(model: nn.Module) -> dict[str, Any]:
    """Gradients on the CPU."""
    return {n: None if x is None else x.cpu() for n, x in loop.gradients(model).items()}


def test_a_batch_of_one_repeated_row_and_a_dense_one_after_it_train_as_the_loop() -> None:
    on_devices(repeated)


def measured() -> None:
    from tests.simcuda import cuda

    watch = Stopwatch(torch.device("cuda:0"))
    x = torch.ones(64, 64, device="cuda:0")
    marks = [watch.mark()]
    for _ in range(2):
        x @ x
        marks.append(watch.mark())
    cuda.take()
    one, two = watch.seconds([(marks[0], marks[1]), (marks[0], marks[2])])
    assert 0 < one < two
    assert sum(cuda.take().waits.values()) == 1


def test_costs_on_a_device_are_the_times_between_its_events_and_the_host_waits_once() -> None:
    on_devices(measured)


def beside_a_capture() -> None:
    backend = StreamBackend([Lanes(torch.device("cuda:0"))])

    def run() -> None:
        backend.begin(HOST)
        backend.end()

    thread = threading.Thread(target=run)
    with ALONE:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()


def test_no_stream_is_made_to_wait_while_something_is_captured() -> None:
    on_devices(beside_a_capture)


def made_meanwhile() -> None:
    lanes = Lanes(torch.device("cuda:0"))
    lanes.stream("in")
    ordered = lanes._after_caller

    def first(stream: torch.Stream) -> torch.Stream:
        vars(lanes)["_after_caller"] = ordered
        lanes.stream("out")
        return ordered(stream)

    vars(lanes)["_after_caller"] = first
    StreamBackend([lanes]).begin(HOST)
    assert set(lanes._streams) == {"compute", "in", "out"}


def test_a_device_may_make_a_stream_while_the_caller_begins_a_run() -> None:
    on_devices(made_meanwhile)


def computing() -> None:
    place = torch.device("cuda:0")
    lanes = [Lanes(place) for _ in range(3)]
    own = [each.stream("compute") for each in lanes]
    assert len(set(own)) == 3
    copying = {each.stream(f"in{k}") for each in lanes for k in range(15)}
    assert not copying & set(own)
    assert len(copying) == 29  # there are 32 in all: copies share theirs
    del lanes[0]
    assert Lanes(place).stream("compute") not in own[1:]
    given = [torch.Stream(place) for _ in range(2)]
    assert [Lanes(stream).stream("compute") for stream in given] == given


def test_a_stream_that_computes_is_nobody_elses() -> None:
    on_devices(computing)


def named() -> None:
    torch.cuda.set_device(1)
    given = [torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cuda", 1)]
    assert read_devices(["cuda", "cuda:0", "cuda:1"]) == given
    stream = torch.Stream("cuda:0")
    with pytest.raises(InputError, match="name devices of one kind"):
        read_devices([stream, "cpu"])


def test_a_device_without_an_index_is_the_current_one_and_streams_go_with_their_kind() -> None:
    on_devices(named)


def many_pipes() -> None:
    kept = []  # as a user's variables or a traceback may
    for _ in range(TRIES + 1):
        with pipe_of(Tiny(), [torch.device("cuda:0")]) as pipe:
            kept.append(pipe)
    first, second = Lanes(torch.device("cuda:0")), Lanes(torch.device("cuda:0"))
    assert first.stream(COMPUTE) != second.stream(COMPUTE)


def test_closed_pipes_leave_their_streams_to_others() -> None:
    on_devices(many_pipes)
