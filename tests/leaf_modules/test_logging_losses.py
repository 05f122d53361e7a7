"""A loss that does something besides computing is called as it is, once for each micro-batch."""

from __future__ import annotations

import copy
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe.compiler.leaf_modules.held import Held
from tests.helpers.losses import IGNORED, assert_whole, net, rows
from tests.oracles import loop

LOG: list[Any] = []
COUNTS: dict[str, Any] = {}
COUNT = 0


def appends(output: Tensor, target: Tensor) -> Tensor:
    loss = cross_entropy(output, target)
    LOG.append(loss.item())
    return loss


def keeps(output: Tensor, target: Tensor) -> Tensor:
    loss = cross_entropy(output, target)
    COUNTS["last"] = loss.detach()
    COUNTS["calls"] = COUNTS.get("calls", 0) + 1
    return loss


def counts(output: Tensor, target: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return cross_entropy(output, target)


def prints(output: Tensor, target: Tensor) -> Tensor:
    loss = cross_entropy(output, target)
    print(f"{loss:.3f}")
    return loss


class Meter:
    """As in a training script: numbers and a small history."""

    def __init__(self) -> None:
        self.total, self.seen, self.last = torch.zeros((), dtype=torch.float64), 0, deque[float]()

    def update(self, loss: Tensor) -> None:
        self.total += loss.detach()
        self.seen += 1
        self.last.append(float(loss.detach()))


class Metered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.meter, self.average = Meter(), 0.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = cross_entropy(output, target)
        self.meter.update(loss)
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        return loss


def closing() -> Callable[..., Tensor]:
    seen: list[Tensor] = []
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        seen.append(output.detach())
        return cross_entropy(output, target)

    return loss


class Trainer:
    """Its method is the loss."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.logs = model, {"loss": [0.0]}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        value = cross_entropy(output, target)
        self.logs["loss"].append(value.item())
        return value


def logged(loss: Any) -> list[Any]:
    """All that these losses log, by now."""
    made: list[Any] = [LOG, COUNTS, COUNT]
    if isinstance(loss, Metered):
        made += [loss.average, loss.meter.total, loss.meter.seen, loss.meter.last]
    elif (own := getattr(loss, "__self__", None)) is not None:
        made.append(own.logs)
    else:
        cells = getattr(loss, "__closure__", None) or ()
        made += [cell.cell_contents for cell in cells]
    return copy.deepcopy(made)


LOSSES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "list": lambda: appends,
    "dict": lambda: keeps,
    "global": lambda: counts,
    "module": Metered,
    "closure": closing,
    "method": lambda: Trainer(net()).loss,
    "partial": lambda: functools.partial(appends),
}


@pytest.fixture(autouse=True)
def _nothing_logged() -> Iterator[None]:
    global COUNT
    yield
    LOG.clear()
    COUNTS.clear()
    COUNT = 0


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_logs_logs_what_the_loop_does(
    name: str, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    alone, data = net(), [rows(8, seed) for seed in range(3)]
    mine, loops = LOSSES[name](), LOSSES[name]()
    before = logged(mine)
    expected = [loop.train(alone, 4, x, loss=loops, target=y).loss for x, y in data]
    wanted = logged(loops)
    _reset(before)
    model = net()
    with fxpipe.compile(model, 2, microbatches=4, schedule=schedule, loss=mine) as pipe:
        pipe.prepare(data[0][0], target=data[0][1])
        assert _equal(logged(mine), before)
        made = [pipe.step(x, target=y) for x, y in data]
        pipe.metrics  # noqa: B018
    assert all(map(torch.equal, made, expected))
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    assert _equal(logged(mine), wanted)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "called as it is, once for each micro-batch" in told[0]


def _reset(before: list[Any]) -> None:
    global COUNT
    LOG[:], COUNT = before[0], before[2]
    COUNTS.clear()
    COUNTS.update(before[1])


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[k], second[k]) for k in first)
    if isinstance(first, list | deque):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)


@pytest.mark.smoke
def test_what_a_loss_prints_are_numbers_of_micro_batches(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    x, y = rows(8)
    with fxpipe.compile(net(), 1, microbatches=4, loss=prints) as pipe:
        pipe.step(x, target=y)
        capsys.readouterr()
        pipe.step(x, target=y)
    printed = [float(line) for line in capsys.readouterr().out.split()]
    alone = net()
    assert printed == pytest.approx(
        [float(prints(alone(x[i : i + 2]), y[i : i + 2]).detach()) for i in range(0, 8, 2)],
        abs=1e-3,
    )
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert f"reads numbers from tensors at {__file__}:" in told and 'print(f"{loss:.3f}")' in told


@pytest.mark.smoke
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 0.5, 2.0, 0.2, 3.0]).double()])
def test_a_loss_that_logs_is_still_a_mean_over_the_targets_that_count(weight: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = cross_entropy(output, target, weight=weight)
        LOG.append(float(value.detach()))
        return value

    x, y = rows(9)
    y[[0, 1, 2, 7]] = IGNORED
    assert_whole(loss, x, y, 3)
    assert not any(isinstance(each, torch.SymFloat) for each in LOG)


@pytest.mark.smoke
def test_a_loss_that_makes_a_table_at_first_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    class Tabled(nn.Module):
        table: Tensor | None = None

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(5, dtype=torch.float64)
            return cross_entropy(output, target) * self.table.mean()

    x, y = rows(8)
    made = []
    with fxpipe.compile(net(), 1, microbatches=4, loss=Tabled()) as pipe:
        for _ in range(2):
            made.append(pipe.step(x, target=y))
            assert not pipe.plan.stages[-1].calls
    assert torch.equal(*made)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.smoke
def test_a_counter_in_a_loss_causes_no_new_trace() -> None:
    class Scaled(nn.Module):
        """Reads an attribute with the name of one that the loss changes."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.average = net(), 2.0

        def forward(self, x: Tensor) -> Any:
            return self.net(x) * self.average

    x, y = rows(8)
    with fxpipe.compile(Scaled(), 1, microbatches=4, loss=Metered()) as pipe:
        pipe.step(x, target=y)
        traced = pipe.traced
        for _ in range(3):
            pipe.step(x, target=y)
            assert pipe.traced is traced


NESTED = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


def change(value: Any, random: Any) -> None:
    """Change some of what is in a nest of lists and dictionaries."""
    if isinstance(value, list):
        for each in value:
            change(each, random)
        if random.random() < 0.5:
            value.append(random.random())
        if value and random.random() < 0.3:
            value.pop(0)
    elif isinstance(value, dict):
        for each in value.values():
            change(each, random)
        if random.random() < 0.5:
            value[random.choice("abc")] = random.random()
        if value and random.random() < 0.3:
            value.popitem()


@pytest.mark.smoke
@given(NESTED, st.randoms(use_true_random=False))
@example({"{": {"}": [1]}}, Random(1))
def test_what_a_function_reaches_is_put_back(state: Any, random: Any) -> None:
    before = copy.deepcopy(state)
    held = Held(lambda: state, "loss")
    assert not held.changed()
    change(state, random)
    assert bool(held.changed()) == (repr(state) != repr(before))  # 0.0 is another than 0
    held.put_back()
    assert state == before


def test_what_other_threads_use_and_a_long_history_are_left_alone() -> None:
    class Shared:
        def __init__(self) -> None:
            self.lock, self.count = threading.Lock(), 0

    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("not now")

    shared, long, proxy = Shared(), [0] * 5000, Proxy()
    with fxpipe.compile(net(), 1) as pipe:
        held = Held(lambda: (proxy, pipe, shared, long), "loss")
        parameter = next(pipe.parameters())
        parameter.data += 1
    assert not held.changed()
    assert float(parameter.detach().sum()) != 0
    shared.count = 3
    assert not held.changed()
    long += [1, 2]
    assert held.changed()
    held.put_back()
    assert shared.count == 3 and long == [0] * 5000
