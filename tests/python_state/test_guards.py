"""A number, a flag or a submodule that changes after it was traced counts from the next call on."""

from __future__ import annotations

import copy
import cProfile
import gc
import logging
import pstats
import textwrap
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_full_backward_hook,
)

import fxpipe
from tests.helpers.profiles import deep
from tests.oracles import loop

SLOPE = 1.0

pytestmark = pytest.mark.traces


class Net(nn.Module):
    """Reads what it is by attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act: nn.Module = nn.Tanh()
        self.last = nn.Linear(4, 3)
        self.scale = 1.0
        self.config = types.SimpleNamespace(shift=0.0, unread=0)
        self.powers = [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x))) * self.scale + self.config.shift
        for power in self.powers:
            x = x * power
        made: Tensor = self.last(x * SLOPE)
        return made


class Loss(nn.Module):
    """A loss with attributes and a buffer."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3))
        self.smoothing = 0.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, self.weight, label_smoothing=self.smoothing)


TABLE = {"rows": [{"gain": 1.0}]}
OPTIONS = types.ModuleType("options")
OPTIONS.gain = 1.0  # type: ignore[attr-defined]
UNREAD = 0


def helper(x: Tensor, gain: float = 1.0) -> Tensor:
    return x * gain


def other(x: Tensor, gain: float = 2.0) -> Tensor:
    return x * gain * 3


class Space:
    """A class that is a namespace."""

    gain = 1.0
    unread = 0


class Base(nn.Module):
    """What another module inherits."""

    gain = 1.0

    def twice(self, x: Tensor) -> Tensor:
        return x * 2


class Reader(Base):
    """Reads state that is deep inside of what it has, or that is nobody's own."""

    unread = 0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.nested = {"rows": [{"gain": 1.0}]}
        self.pair = ([1.0], 0)
        self.objects = [types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.0))]
        self.first.register_forward_hook(self.objects_hook)

    def objects_hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        made: Tensor = output * self.objects[0].inner.gain
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.nested["rows"][0]["gain"] * self.pair[0][0]
        x = self.twice(x * self.gain) * TABLE["rows"][0]["gain"] * Space.gain * OPTIONS.gain
        made: Tensor = self.last(helper(x))
        return made


def _set_slope(model: Any, loss: Any) -> None:
    global SLOPE
    SLOPE = 3.0


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a number": lambda model, loss: setattr(model, "scale", 2.0),
    "an option of a module of torch.nn": lambda model, loss: setattr(model.norm, "momentum", 0.5),
    "a field of a configuration": lambda model, loss: setattr(model.config, "shift", 0.5),
    "an entry of a list": lambda model, loss: model.powers.__setitem__(0, 3.0),
    "one more entry of a list": lambda model, loss: model.powers.append(3.0),
    "a submodule": lambda model, loss: setattr(model, "act", nn.ReLU()),
    "a hook": lambda model, loss: model.first.register_forward_hook(lambda m, args, out: out * 2),
    "a global number": _set_slope,
    "an attribute of the loss": lambda model, loss: setattr(loss, "smoothing", 0.3),
    "a buffer of the loss": lambda model, loss: setattr(loss, "weight", torch.arange(1.0, 4.0)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("changes", [*deep(*([what] for what in CHANGES)), [*CHANGES]])
def test_what_changes_between_steps_counts_from_the_next_step_on(
    changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SLOPE", 1.0)
    torch.manual_seed(0)
    model, loss = Net(), Loss()
    alone, loss_alone = copy.deepcopy(model), copy.deepcopy(loss)
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=loss) as pipe:
        for step in ("first", *changes, "again"):
            if step in CHANGES:
                CHANGES[step](model, loss)
                CHANGES[step](alone, loss_alone)
            made = pipe.step(x, target=target)
            classes = loss_alone.weight.double()
            expected = loop.train(
                alone,
                2,
                x,
                loss=loss_alone,
                target=target,
                weight=lambda y, classes=classes: classes[y].sum(),
            )
            assert torch.equal(made, expected.loss), step
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(model.state_dict(), alone.state_dict())


def _halved(self: Any, x: Tensor) -> Tensor:
    made: Tensor = self.last(self.first(x)) / 2
    return made


def _hook_all(patch: pytest.MonkeyPatch) -> Any:
    return register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, nn.Linear) else output
    )


SHARED: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "an attribute of its class": lambda patch: patch.setattr(Reader, "gain", 2.0, raising=False),
    "an attribute of its base": lambda patch: patch.setattr(Base, "gain", 2.0),
    "a method": lambda patch: patch.setattr(Base, "twice", lambda self, x: x * 5),
    "forward": lambda patch: patch.setattr(Reader, "forward", _halved),
    "an entry inside of a global": lambda patch: patch.setitem(TABLE["rows"][0], "gain", 2.0),
    "a global function": lambda patch: patch.setitem(globals(), "helper", other),
    "an attribute of a global class": lambda patch: patch.setattr(Space, "gain", 2.0),
    "an attribute of an imported module": lambda patch: patch.setattr(OPTIONS, "gain", 2.0),
    "a hook of all modules": _hook_all,
}
INSIDE: dict[str, Callable[[Any], Any]] = {
    "an entry of a list in a dict": lambda model: model.nested["rows"][0].update(gain=2.0),
    "a list in a dict": lambda model: model.nested.update(rows=[{"gain": 3.0}]),
    "an entry of a list in a tuple": lambda model: model.pair[0].__setitem__(0, 2.0),
    "an object in an object in a list": lambda model: setattr(model.objects[0].inner, "gain", 2.0),
}


@pytest.mark.smoke
@pytest.mark.parametrize(
    "changes", [*deep(*([what] for what in SHARED | INSIDE)), [*SHARED], [*INSIDE]]
)
def test_what_is_deep_inside_or_shared_counts_from_the_next_step_on(changes: list[str]) -> None:
    """What is shared is put back, and all is as before."""
    torch.manual_seed(0)
    model = Reader()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        for what in changes:
            before = pipe.step(x, target=target)
            with pytest.MonkeyPatch.context() as patch, ExitStack() as ended:
                handle = SHARED[what](patch) if what in SHARED else INSIDE[what](model)
                if handle is not None:
                    ended.callback(handle.remove)
                loop.clear(model)
                made = pipe.step(x, target=target)
                gradients = loop.gradients(model)
                loop.clear(model)
                expected = loop.train(model, 2, x, loss=F.cross_entropy, target=target)
            assert torch.equal(made, expected.loss), what
            assert not torch.equal(made, before), what
            loop.assert_same(gradients, loop.gradients(model))
            loop.clear(model)


def test_a_backward_hook_of_all_modules_is_refused() -> None:
    handle = register_module_full_backward_hook(lambda module, given, made: None)
    try:
        with (
            fxpipe.compile(Net(), ["cpu"], microbatches=2, loss=F.mse_loss) as pipe,
            pytest.raises(fxpipe.TraceError, match="backward hook for all modules"),
        ):
            pipe.step(torch.randn(8, 4), target=torch.randn(8, 3))
    finally:
        handle.remove()


@pytest.mark.smoke
def test_what_no_code_reads_is_no_reason_to_trace(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe,
    ):
        pipe.step(x, target=target)
        model.norm.epoch = 1  # type: ignore[assignment]
        model.config.unread = 1
        model.act = nn.Tanh()
        pipe.step(x, target=target)
    assert "anew" not in caplog.text


@pytest.mark.smoke
def test_counters_that_no_code_reads_are_no_reason_to_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Reader()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe,
    ):
        for count in range(3):
            pipe.step(x, target=target)
            monkeypatch.setattr(Reader, "unread", count)
            monkeypatch.setattr(Space, "unread", count)
            monkeypatch.setattr(OPTIONS, "unread", count, raising=False)
            monkeypatch.setitem(globals(), "UNREAD", count)
            model.objects[0].unread = count
            model.objects[0].inner.unread = count
    assert "anew" not in caplog.text


@pytest.mark.smoke
def test_each_state_is_traced_once_and_the_last_ones_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    acts = [nn.Tanh(), nn.ReLU(), nn.GELU()]
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe,
    ):
        for step in range(9):
            model.act = acts[step % 3]
            made = pipe.step(x, target=target)
            alone = loop.train(copy.deepcopy(model), 2, x, loss=F.cross_entropy, target=target)
            assert torch.equal(made, alone.loss)
    # the first state once more, as more names are known to be read by then
    assert sum("compiled Net" in r.getMessage() for r in caplog.records) <= 4
    told = [r.getMessage() for r in caplog.records if "is traced anew" in r.getMessage()]
    assert "as model.act" in told[0]


COLLECTED = 0


def _collected(phase: str, info: dict[str, int]) -> None:
    global COLLECTED
    COLLECTED += 1


def test_what_the_garbage_collector_calls_is_none_of_the_models(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Collects(Net):
        def forward(self, x: Tensor) -> Tensor:
            gc.collect()
            return super().forward(x)

    x, y = torch.randn(8, 4), torch.randn(8, 3)
    gc.callbacks.append(_collected)
    try:
        with (
            caplog.at_level(logging.INFO, "fxpipe"),
            fxpipe.compile(Collects(), ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe,
        ):
            for _ in range(2):
                pipe.step(x, target=y.argmax(1))
    finally:
        gc.callbacks.remove(_collected)
    assert COLLECTED
    assert not [r for r in caplog.records if "COLLECTED" in r.getMessage()]


def test_a_profiler_written_in_c_is_on_again_after_a_trace() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with fxpipe.compile(Net(), ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
            pipe.step(x, target=y)
            textwrap.dedent("seen")
    finally:
        profiler.disable()
    assert "dedent" in {name for _, _, name in pstats.Stats(profiler).stats}  # type: ignore[attr-defined]
