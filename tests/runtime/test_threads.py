"""Several threads: one at a time is inside of a pipe, none runs one while a model is traced."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.helpers.overlapping import SGD, compiled, make
from tests.helpers.tiny import batch, pipe_of, soon, within
from tests.oracles import loop
from tests.oracles.delayed_loop import MSE, DelayedLoop

CROSS_ENTROPY = nn.functional.cross_entropy


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What calls return that begin at once, each in a thread of its own."""
    start = threading.Barrier(len(calls))
    made: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        start.wait()
        made[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 6).double(), torch.randint(3, (8,))) for _ in range(count)]


class Meeting(nn.Module):
    """Once it is armed it waits until another one is inside, too."""

    def __init__(self, armed: threading.Event, meeting: threading.Barrier) -> None:
        super().__init__()
        self.armed, self.meeting = armed, meeting

    def forward(self, x: Tensor) -> Tensor:
        if self.armed.is_set():
            self.meeting.wait(60)
        return x.clone()


class Telling(nn.Module):
    """Says that it is traced, and lingers there for others to come."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        self.traced, self.disturbed = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            self.traced.set()
            self.disturbed.wait(0.3)  # in vain, unless others run while this is traced
        y: Tensor = self.layers(x)
        return y


@pytest.mark.parametrize("prepared", [True, False])
def test_steps_from_several_threads_add_up_to_the_gradients_of_all_their_batches(
    prepared: bool,
) -> None:
    model = normed()
    alone, data = copy.deepcopy(model), batches(24)
    with fxpipe.compile(model, 2, microbatches=4, loss=CROSS_ENTROPY) as pipe:
        if prepared:
            pipe.prepare(data[0][0], target=data[0][1])

        def steps(own: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
            return [pipe.step(x, target=y) for x, y in own]

        made = together(*(lambda k=k: steps(data[k::4]) for k in range(4)))
        assert pipe.batches == len(data)
    losses = [loop.train(alone, 4, x, loss=CROSS_ENTROPY, target=y).loss for x, y in data]
    for k in range(4):
        for ours, theirs in zip(made[k], losses[k::4], strict=True):
            torch.testing.assert_close(ours, theirs)
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    counted, expected = dict(model.named_buffers()), dict(alone.named_buffers())
    assert torch.equal(counted["1.num_batches_tracked"], expected["1.num_batches_tracked"])


@pytest.mark.traces
def test_models_compiled_in_several_threads_at_once_are_each_as_if_alone() -> None:
    x, y = batches(1)[0]

    def train(seed: int) -> nn.Module:
        model = models[seed]
        with fxpipe.compile(model, 2, microbatches=4, loss=CROSS_ENTROPY) as pipe:
            pipe.step(x, target=y)
        return model

    models = [normed(seed) for seed in range(4)]
    alone = copy.deepcopy(models)
    for ours, own in zip(together(*(lambda s=s: train(s) for s in range(4))), alone, strict=True):
        loop.train(own, 4, x, loss=CROSS_ENTROPY, target=y)
        loop.assert_same(loop.gradients(ours), loop.gradients(own))


def test_one_model_compiled_in_several_threads_at_once_has_one_pipe() -> None:
    model = normed()

    def compiled_() -> fxpipe.Pipeline | None:
        try:
            return fxpipe.compile(model, 2)
        except fxpipe.InputError as error:
            assert "the model is compiled already" in str(error)
            return None

    made = [pipe for pipe in together(*(compiled_ for _ in range(4))) if pipe is not None]
    assert len(made) == 1
    made[0].close()


def test_pipes_run_side_by_side_once_they_are_compiled() -> None:
    armed, meeting = threading.Event(), threading.Barrier(2)
    pipes = [
        fxpipe.compile(
            nn.Sequential(nn.Linear(4, 4), Meeting(armed, meeting), nn.Linear(4, 4)),
            2,
            microbatches=1,
            loss=MSE,
            extensions=[fxpipe.LeafModules(Meeting)],
        )
        for _ in range(2)
    ]
    x = torch.randn(4, 4)
    for pipe in pipes:
        pipe.prepare(x, target=x)
    armed.set()
    together(*(lambda pipe=pipe: pipe.step(x, target=x) for pipe in pipes))
    for pipe in pipes:
        pipe.close()


def _tried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether these are not a model's parameters, but small ones on which its class is tried."""
    return all(p.shape == (4, 4) for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_nothing_runs_in_any_pipe_while_a_model_is_traced(schedule: str) -> None:
    """Torch says of all threads that they are compiled, and optimizers then round otherwise."""
    compiling: list[bool] = []

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if lingers.is_set():
                other.traced.wait(0.3)  # in vain, unless that is traced before this is through
            if other.traced.is_set():
                other.disturbed.set()
            if not _tried(self):
                compiling.append(torch.compiler.is_compiling())
            return super().step(closure)

    model, data = make("mlp", 6, 4)
    other, lingers = Telling(), threading.Event()
    options: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "loss": MSE}
    with fxpipe.compile(model, 2, optimizer=Watched, **options) as pipe:
        for step, (x, y) in enumerate(data[:3]):
            if step == 2:
                lingers.set()
            pipe.step(x, target=y)  # with 2bw some of it goes on behind the caller's back

        def later() -> None:
            other.traced.wait(60)
            lingers.clear()
            for x, y in data[3:]:
                pipe.step(x, target=y)
            pipe.flush()

        with fxpipe.compile(other, 2, microbatches=2, loss=MSE) as traced:
            together(later, lambda: traced.step(data[0][0], target=data[0][0]))
    assert not any(compiling)
    assert len(compiling) == 2 * len(data)


def test_backwards_and_steps_of_two_threads_that_take_turns_add_up() -> None:
    model, turn = normed(), threading.Lock()
    alone, data = copy.deepcopy(model), batches(12)
    with fxpipe.compile(model, 2, microbatches=4, loss=CROSS_ENTROPY) as pipe:
        outputs = [pipe(x) for x, _ in data[::2]]

        def backward(made: list[Tensor]) -> None:
            for out in made:
                with turn:
                    out.sum().backward()

        def step() -> None:
            for x, y in data[1::2]:
                with turn:
                    pipe.step(x, target=y)

        together(lambda: backward(outputs), step)
    for x, _ in data[::2]:
        for part in x.tensor_split(4):
            alone(part).sum().backward()
    for x, y in data[1::2]:
        loop.train(alone, 4, x, loss=CROSS_ENTROPY, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


def test_a_loss_may_be_read_in_another_thread_than_the_one_that_steps() -> None:
    model, data = make("mlp", 12, 4)
    expected = DelayedLoop.beside(model, SGD, 4)
    with compiled(model, 3, 4) as pipe:
        losses: list[Tensor] = []
        stepped = threading.Semaphore(0)

        def step() -> None:
            for x, y in data:
                losses.append(pipe.step(x, target=y))
                stepped.release()

        def read() -> list[float]:
            found = []
            for index in range(len(data)):
                stepped.acquire()
                found.append(float(losses[index]))
            return found

        _, found = together(step, read)
        pipe.flush()
    assert found == [float(loss) for loss in expected.run(data)]
    expected.assert_same(model)


def test_what_runs_in_a_pipes_own_threads_may_ask_the_pipe() -> None:
    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if not _tried(self):
                states.append(pipe.state_dict())
            return super().step(closure)

    states: list[Any] = []
    x, y = batch()
    with pipe_of(2, optimizer=lambda parameters: Asking(parameters, lr=0.1)) as pipe:
        pipe.step(x, target=y)
    assert len(states) == 2


def waits(thread: int | None) -> bool:
    """Whether a thread is where threads wait for others."""
    frame = sys._current_frames().get(thread or 0)
    return frame is not None and frame.f_code.co_name in ("call", "exclusive")


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")
@pytest.mark.parametrize("tracing", [False, True])
def test_an_interrupt_comes_while_one_waits_for_another_thread(tracing: bool) -> None:
    """Either for the pipe, or for a pipe to be quiet that would be disturbed by a trace."""
    armed, inside, leave = threading.Event(), threading.Event(), threading.Event()

    class Lingering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if armed.is_set():
                inside.set()
                leave.wait(60)
            return x.clone()

    x = torch.randn(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), Lingering(), nn.Linear(4, 4))
    other = fxpipe.compile(nn.Linear(4, 4), 1, loss=MSE)
    with fxpipe.compile(
        model, 2, loss=MSE, extensions=[fxpipe.LeafModules(Lingering)], microbatches=2
    ) as pipe:
        first = pipe.step(x, target=x)
        armed.set()
        running = threading.Thread(target=lambda: pipe.step(x, target=x))
        running.start()
        inside.wait(60)
        me = threading.get_ident()

        def interrupt() -> None:
            assert soon(lambda: waits(me))
            os.kill(os.getpid(), signal.SIGINT)

        sender = threading.Thread(target=interrupt)
        with within(20), pytest.raises(KeyboardInterrupt):
            sender.start()
            (other if tracing else pipe).step(x, target=x)
        sender.join()
        armed.clear()
        leave.set()
        running.join()
        assert torch.equal(pipe.step(x, target=x), first)
        other.step(x, target=x)
    other.close()
