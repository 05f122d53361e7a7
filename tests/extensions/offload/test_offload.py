"""What stages store elsewhere comes back to the bit, in time, or the step fails as any other."""

from __future__ import annotations

import copy
import errno
import io
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from examples.unet import UNet
from fxpipe.errors import ExecutionError, InputError
from fxpipe.extensions.offload import opcodes, storing
from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.extensions.offload.storing import FileMemory
from fxpipe.ir.schedule import Schedule
from fxpipe.runtime import interpreter
from fxpipe.schedules import gpipe
from tests.extensions.streams.eager_lanes import launched
from tests.helpers.overlapping import ADAMW, compiled, make
from tests.helpers.profiles import LEVELS, deep
from tests.helpers.tiny import Snapshot, Tiny, batch
from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop

ONE_THREAD = [fxpipe.Dispatch("thread")]

SOME = """
schedule some stages=2 microbatches=4 delay=0
place 0 | 1
0: F0 F1 O1 F2 P1 F3 B0 B1 B2 B3 U
1: F0 O0 F1 F2 P0 B0 F3 B1 B2 B3 U
"""


def unet() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = UNet(channels=1, base=4, depth=LEVELS)
    return model, torch.randn(9, 1, 16, 16), torch.randn(9, 1, 16, 16)


def stored(pipe: fxpipe.Pipeline) -> int:
    """How often a step stores something."""
    return sum(isinstance(x, opcodes.Offload) for own in pipe.program.lists for x in own)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("schedule", "devices", "options"),
    [
        *deep(("gpipe", 2, {})),
        (
            "gpipe",
            2,
            {"modes": {1: "except_last"}, "recompute": {0: "always"}},
        ),
        *deep(
            ("gpipe", 3, {"recompute": "always"}),
            ("1f1b", 4, {"recompute": "except_last"}),
            ("looped-bfs", 2, {"recompute": {1: "always", 2: "except_last"}}),
            ("1f1b", 4, {}),
            ("zb-h1", 3, {}),
        ),
        ("zb-h1", 4, {"recompute": "always"}),
        ("interleaved-1f1b", 2, {"extensions": ONE_THREAD}),
        (Schedule.parse(SOME), 2, {}),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_loop(schedule: Any, devices: int, options: Any) -> None:
    model, x, y = unet()
    alone = copy.deepcopy(model)
    own = fxpipe.Offload(options.get("modes", "always")), *options.get("extensions", ())
    options = {"recompute": options.get("recompute", "never"), "extensions": own}
    expected = loop.train(alone, 4, x, loss=nn.functional.mse_loss, target=y)
    with fxpipe.compile(
        model,
        devices,
        schedule=schedule,
        microbatches=4,
        loss=nn.functional.mse_loss,
        **options,
    ) as pipe:
        assert torch.equal(pipe.step(x, target=y), expected.loss)
        assert stored(pipe)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))


@pytest.mark.smoke
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_others_hold_stays_where_it_is(
    recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, buffers, what forwards have written to them, and the caller's batch are kept for
    backward, too; storing frees nothing."""

    class Scaled(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 2))
            self.register_buffer("scale", torch.randn(8))
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().mean(0)
            y = torch.tanh(self.layer(x) * self.scale) * self.weight.flatten() * x
            return y * self.seen

    model, x, y = nn.Sequential(Scaled(), Scaled()), torch.randn(8, 8), torch.randn(8, 8)
    held = [*model.parameters(), *model.buffers(), x, y]
    count = 0
    begin = storing.memory_of

    def watched(machine: Any, memories: list[Tensor]) -> Any:
        nonlocal count
        count += len(memories)
        those = *held, *machine.store.state.values()
        theirs = {tensor.untyped_storage().data_ptr() for tensor in those}
        assert theirs.isdisjoint(memory.data_ptr() for memory in memories)
        return begin(machine, memories)

    monkeypatch.setattr(storing, "memory_of", watched)
    options: dict[str, Any] = {"schedule": "gpipe", "microbatches": 4, "extensions": ["offload"]}
    options |= {"recompute": recompute, "loss": nn.functional.mse_loss}
    with fxpipe.compile(model, 2, **options) as pipe:
        pipe.step(x, target=y)
    assert count


@pytest.mark.smoke
def test_steps_that_overlap_are_those_of_the_delayed_loop() -> None:
    model, data = make("mlp", 8, 5)
    expected = DelayedLoop.beside(model, ADAMW, 4)
    with compiled(model, 3, 4, ADAMW, extensions=["offload"]) as pipe:
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        pipe.flush()
        assert stored(pipe)
    expected.assert_same(model)


def test_a_call_that_is_differentiated_stores_too_and_draws_the_same_masks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4)])
    found = []
    x = torch.randn(8, 6)
    for extensions in ([], ["offload"]):
        loop.clear(model)
        with fxpipe.compile(model, 2, microbatches=4, extensions=extensions) as pipe:
            pipe.prepare(x)
            torch.manual_seed(7)
            out = pipe(x)
            out.square().sum().backward()
        found.append({"out": out.detach(), **loop.gradients(model)})
    loop.assert_same(found[0], found[1])


@pytest.mark.smoke
def test_streams_store_and_fetch_in_their_order() -> None:
    torch.manual_seed(0)
    model = Tiny()
    alone = copy.deepcopy(model)
    x, y = batch(8)
    expected = loop.train(alone, 4, x, loss=nn.functional.cross_entropy, target=y)
    pipe, backend = launched(model, 2, schedule="gpipe", extensions=["offload"])
    with pipe:
        assert torch.equal(pipe.step(x, target=y), expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    for lanes in backend.lanes:
        streams = {name.split()[0]: stream for stream, name in lanes.log if " off" in name}
        assert streams["offload"] == "offload"
        assert any(stream == "prefetch" for stream, _ in lanes.log)


@pytest.mark.smoke
@pytest.mark.parametrize(("recompute", "freed"), [("never", "saved"), ("always", "state")])
def test_a_failure_to_store_leaves_all_as_it_was(
    recompute: Any, freed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, y = batch(8)
    with fxpipe.compile(
        Tiny(),
        2,
        schedule="gpipe",
        microbatches=4,
        loss=nn.functional.cross_entropy,
        optimizer=ADAMW,
        extensions=["offload"],
        recompute=recompute,
    ) as pipe:
        pipe.step(x, target=y)
        before = Snapshot.of(pipe)

        class Full(io.BytesIO):
            def write(self, part: object) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "TemporaryFile", Full)
            with pytest.raises(ExecutionError, match=rf"(?s)free {freed}:.*No space left"):
                pipe.step(x, target=y)
        assert before == Snapshot.of(pipe)
        pipe.step(x, target=y)


@pytest.mark.smoke
def test_a_backward_waits_until_what_it_needs_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = unet()
    alone = copy.deepcopy(model)
    expected = loop.train(alone, 4, x, loss=nn.functional.mse_loss, target=y)
    waiting = threading.Semaphore(0)
    read = FileMemory._read

    def late(self: FileMemory, memories: list[Tensor]) -> None:
        waiting.acquire()  # until a device waits for it
        read(self, memories)

    def waits(machine: Any, instruction: opcodes.Await) -> None:
        waiting.release()
        instruction.run(machine)

    monkeypatch.setattr(FileMemory, "_read", late)
    monkeypatch.setitem(interpreter.HANDLERS, opcodes.Await, waits)
    options: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "schedule": "gpipe",
        "extensions": [fxpipe.Offload({0: "always"})],
    }
    with fxpipe.compile(model, 2, microbatches=4, **options) as pipe:
        assert torch.equal(pipe.step(x, target=y), expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_the_file_is_in_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory = torch.arange(40, dtype=torch.uint8)
    away = FileMemory(0, [memory, memory[:0], memory * 2])
    away.wait()
    assert not list(tmp_path.iterdir())
    fetched = away.fetch()
    away.wait()
    assert [each.tolist() for each in fetched] == [memory.tolist(), [], (memory * 2).tolist()]


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made


def test_what_autograd_alone_knows_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Leaf())
    x = torch.randn(8, 4)
    options: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "extensions": ["offload", fxpipe.LeafModules(Leaf)],
        "partition": ["1"],
    }
    with (
        fxpipe.compile(model, 2, microbatches=4, schedule="gpipe", **options) as pipe,
        pytest.raises(
            InputError, match="offloads what stage 1 keeps, and with modules called as they"
        ),
    ):
        pipe.step(x, target=x)


def test_inputs_of_leaf_modules_that_recompute_are_stored() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Leaf(), Leaf()), torch.randn(8, 4)
    alone = copy.deepcopy(model)
    expected = loop.train(alone, 4, x, loss=nn.functional.mse_loss, target=x)
    options: dict[str, Any] = {
        "recompute": "always",
        "extensions": ["offload", fxpipe.LeafModules(Leaf)],
    }
    options |= {"loss": nn.functional.mse_loss, "partition": ["2"], "schedule": "gpipe"}
    with fxpipe.compile(model, 2, microbatches=4, **options) as pipe:
        assert torch.equal(pipe.step(x, target=x), expected.loss)
        assert stored(pipe)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.smoke
def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="no mode 'sometimes' of Offload"):
        fxpipe.compile(Tiny(), 2, extensions=[fxpipe.Offload("sometimes")])  # type: ignore[arg-type]


def test_nothing_is_stored_where_there_is_nothing_to_gain() -> None:
    assert add_offload(gpipe(2, 2), "always") == gpipe(2, 2)
