"""CUDA graphs on simulated devices: what captures do, replays may touch, and torch refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.simcuda.process import on_devices, simulated

pytestmark = simulated


def captured(
    run: Callable[[], Any], pool: Any = None, stream: Any = None
) -> tuple[Any, Callable[[], None]]:
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(0) if stream is None else stream
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        made = run()
    return made, graph.replay


def replayed() -> dict[str, Any]:
    """Values before any replay, and after replays of other inputs."""
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.LAZY)
    x = torch.ones(3, device="cuda:0")
    y, replay = captured(lambda: x * 2 + 1)
    found = {"captured": y.tolist()}
    for value in (1, 4):
        x.fill_(value)
        replay()
        found[f"of {value}"] = y.tolist()
    kept = [torch.empty(3, device="cuda:0") for _ in range(4)]
    found["apart"] = y.data_ptr() not in {x.data_ptr() for x in kept}
    found["races"] = list(cuda.take().races)
    return found


def test_a_capture_computes_nothing_and_each_replay_does() -> None:
    found = on_devices(replayed)
    assert all(value != value for value in found["captured"])  # NaN
    assert (found["of 1"], found["of 4"]) == ([3.0] * 3, [9.0] * 3)
    assert found["apart"]
    assert not found["races"]


def overwritten() -> dict[str, bool]:
    """Which results of captures of one pool are still there after other replays."""
    x = torch.ones(3, device="cuda:0")
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(0)
    first, replay_first = captured(lambda: x + 1, pool, stream)
    second, replay_second = captured(lambda: first * 3, pool, stream)
    other, replay_other = captured(lambda: x + 5, None, stream)

    def holds(value: Tensor, wanted: float) -> bool:
        return value.tolist() == [wanted] * 3

    for replay in (replay_first, replay_second, replay_other):
        replay()
    found = {"in order": holds(first, 2) and holds(second, 6) and holds(other, 6)}
    replay_second()
    found["earlier ones"] = holds(first, 2)
    replay_first()
    found["later ones"] = holds(second, 6)
    found["other pools"] = holds(other, 6)
    return found


def test_a_replay_leaves_what_others_hold_but_not_the_results_of_later_captures() -> None:
    found = on_devices(overwritten)
    assert found == {
        "in order": True,
        "earlier ones": True,
        "later ones": False,
        "other pools": True,
    }


def unordered() -> list[str]:
    """A graph is replayed on another stream than the one that has filled its input."""
    from tests.simcuda import cuda

    x = torch.ones(3, device="cuda:0")
    _, replay = captured(lambda: x * 2)
    torch.cuda.synchronize(0)
    x.fill_(2)
    with torch.cuda.stream(torch.cuda.Stream(0)):
        replay()
    return list(cuda.take().races)


def test_a_replay_that_nothing_orders_after_its_inputs_is_a_race() -> None:
    assert "replay of aten::mul" in on_devices(unordered)[0]


def refused() -> dict[str, list[str]]:
    """What captures raise, and what ending them raises."""
    x = torch.ones(3, device="cuda:0")
    side, event = torch.cuda.Stream(0), torch.cuda.Event()
    event.record(side)

    def joins() -> None:
        side.wait_stream(torch.cuda.current_stream(0))

    calls: dict[str, Callable[[], Any]] = {
        "a number": lambda: x.sum().item(),
        "a size": lambda: x.nonzero(),
        "a copy from the host": lambda: torch.ones(3).to("cuda:0"),
        "a wait of the host": lambda: torch.cuda.synchronize(0),
        "an event from outside": lambda: event.wait(),
        "another stream": joins,
        "another capture": lambda: captured(lambda: x + 1),
    }
    told: dict[str, list[str]] = {}
    for name, call in calls.items():
        errors = told[name] = []

        def noted(call: Callable[[], Any] = call, errors: list[str] = errors) -> None:
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error).splitlines()[0])

        try:
            captured(noted)
        except torch.AcceleratorError as error:
            errors.append(str(error))
    try:
        captured(lambda: x + 1, None, torch.cuda.default_stream(0))
    except RuntimeError as error:
        told["the default stream"] = [str(error)]
    pool = torch.cuda.graph_pool_handle()
    captured(lambda: x + 1, pool)
    try:
        captured(lambda: x + 1, pool)
    except RuntimeError as error:
        told["a pool without graphs"] = [str(error)]
    y, replay = captured(lambda: x + 1)  # all is as before
    replay()
    assert y.tolist() == [2.0] * 3
    return told


def test_what_cannot_be_captured_is_refused_as_by_torch() -> None:
    told = on_devices(refused)
    ended = "operation failed due to a previous error during capture"
    for name in ("a number", "a size", "a copy from the host", "a wait of the host"):
        first, last = told[name]
        assert "operation not permitted when stream is capturing" in first, name
        assert ended in last
    assert "uncaptured work in another stream" in told["an event from outside"][0]
    assert "another stream would join" in told["another stream"][0]
    assert "not permitted when stream is capturing" in told["another capture"][0]
    assert "non-default stream" in told["the default stream"][0]
    assert "use_count > 0" in told["a pool without graphs"][0]
