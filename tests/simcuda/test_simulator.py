"""The simulated CUDA itself: what it lets run late, what it reports, and what it counts."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tests.simcuda.process import on_devices, simulated

pytestmark = simulated


def modes() -> list[Any]:
    from tests.simcuda.cuda import Mode

    return list(Mode)


def test_the_process_of_the_tests_has_no_simulated_devices() -> None:
    assert "tests.simcuda.cuda" not in sys.modules  # as its dispatcher would have their operators


def unordered(waits: bool) -> tuple[list[str], list[float]]:
    """Two streams of which one fills what the other reads, in each mode."""
    from tests.simcuda import cuda

    told: list[str] = []
    sums: list[float] = []
    for mode in modes():
        cuda.configure(mode, seed=3)
        x = torch.zeros(4, device="cuda:0")
        torch.cuda.synchronize(0)
        side = torch.cuda.Stream(0)
        with torch.cuda.stream(side), torch.cuda.nvtx.range("fill"):
            x.fill_(1)
        if waits:
            torch.cuda.current_stream(0).wait_stream(side)
        with torch.cuda.nvtx.range("read"):
            total = x.sum()
        sums.append(total.item())
        told += cuda.take().races
    return told, sums


def test_accesses_that_nothing_orders_are_told_by_name_in_every_mode() -> None:
    told, sums = on_devices(unordered, False)
    assert len(told) == len(sums)
    assert all("read / aten::sum" in race and "fill / aten::fill_" in race for race in told)
    assert min(sums) == 0  # as late as possible is too late


def test_accesses_in_order_are_no_races() -> None:
    told, sums = on_devices(unordered, True)
    assert not told
    assert set(sums) == {4}


def reused(records: bool) -> list[str]:
    """Memory that a side stream still reads is freed, and filled anew on its own stream."""
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.LAZY)
    x = torch.ones(1000, device="cuda:0")
    torch.cuda.synchronize(0)
    side = torch.cuda.Stream(0)
    with torch.cuda.stream(side):
        y = x.clone()
    if records:
        x.record_stream(side)
    del x
    z = torch.zeros(1000, device="cuda:0")
    torch.cuda.synchronize(0)
    told = list(cuda.take().races)
    assert records == bool((y == 1).all().item() and z.sum().item() == 0 and not told)
    return told


def test_memory_that_is_reused_too_early_is_a_race() -> None:
    assert "aten::zero_" in on_devices(reused, False)[0]
    assert not on_devices(reused, True)


def late() -> list[str]:
    """What calls report of an index that is outside of its table."""
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.LAZY)
    told = []
    table = torch.zeros(3, 2, device="cuda:0")
    found = nn.functional.embedding(torch.full((1,), 7, device="cuda:0"), table)
    told.append("")
    for look in (lambda: found.sum().item(), lambda: torch.zeros(1, device="cuda:0")):
        try:
            look()
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_a_kernel_that_fails_is_reported_later_and_from_then_on() -> None:
    launched, first, then = on_devices(late)
    assert not launched
    assert first.startswith("CUDA error: in aten::") and then.startswith("CUDA error: in aten::")


def full() -> dict[str, Any]:
    """Allocations up to a limit, and beyond."""
    from tests.simcuda import cuda

    found: dict[str, Any] = {}
    with cuda.within(0, 10 * 512):
        kept = [torch.empty(100, device="cuda:0") for _ in range(10)]
        found["allocated"] = torch.cuda.memory_allocated(0)
        try:
            torch.empty(1, device="cuda:0")
        except torch.OutOfMemoryError as error:
            found["error"] = str(error)
        del kept[0]
        torch.empty(1, device="cuda:0")
        torch.empty(100, device="cuda:1")  # has a limit of its own
    found["peak"] = torch.cuda.max_memory_allocated(0)
    del kept
    found["left"] = torch.cuda.memory_allocated(0)
    return found


def test_a_device_has_as_much_memory_as_its_limit_says() -> None:
    found = on_devices(full)
    assert found["allocated"] == found["peak"] == 10 * 512
    assert "CUDA out of memory" in found["error"] and "GPU 0" in found["error"]
    assert found["left"] == 0


def freed_while_used() -> list[tuple[int, int]]:
    """Bytes allocated and free: of a tensor that another stream reads, without it, and when that
    stream is done."""
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.LAZY)
    side, told = torch.cuda.Stream(0), []

    def look() -> None:
        told.append((torch.cuda.memory_allocated(0), torch.cuda.mem_get_info(0)[0]))

    with cuda.within(0, 4 * 512):
        x = torch.zeros(100, device="cuda:0")
        side.wait_stream(torch.cuda.current_stream(0))
        with torch.cuda.stream(side):
            x.add_(1)
        x.record_stream(side)
        look()
        del x
        look()
        torch.cuda.synchronize(0)
        torch.empty(0, device="cuda:0")  # an allocation looks at what is done
        look()
    return told


def test_what_is_freed_while_a_stream_uses_it_is_not_allocated_but_not_free() -> None:
    whole = 4 * 512
    assert on_devices(freed_while_used) == [(512, whole - 512), (0, whole - 512), (0, whole)]


def from_host(pinned: bool) -> tuple[float, int]:
    """The sum of a copy whose source is overwritten at once, and the waits of the copy."""
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.LAZY)
    source = torch.ones(100)
    if pinned:
        source = source.pin_memory()
    made = source.to("cuda:0", non_blocking=True)
    source.zero_()
    waits = sum(cuda.take().waits.values())
    return made.sum().item(), waits


def test_pinned_memory_is_read_later_and_other_memory_at_once() -> None:
    assert on_devices(from_host, True) == (0, 0)
    assert on_devices(from_host, False) == (100, 0)


def layers() -> dict[str, float]:
    """How far layers on a device are from those on the CPU, in training and evaluation."""
    from tests.simcuda import cuda

    cuda.configure(cuda.Mode.RANDOM, seed=1)
    torch.manual_seed(0)
    far: dict[str, float] = {}
    made: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "lstm": (nn.LSTM(4, 5, 2, batch_first=True), torch.randn(3, 6, 4)),
        "lstm without biases": (nn.LSTM(4, 5, bias=False), torch.randn(3, 6, 4)),
        "batchnorm": (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)),
        "layernorm": (nn.LayerNorm(8), torch.randn(4, 8)),
        "convolution": (nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 6, 6)),
    }
    for name, (layer, x) in made.items():
        for trains in (True, False):
            results = []
            for device in ("cpu", "cuda:0"):
                layer.to(device).train(trains)
                given = x.detach().to(device).requires_grad_()
                out = layer(given)
                (out[0] if isinstance(out, tuple) else out).square().sum().backward()
                gradients = [p.grad for p in layer.parameters()]
                results.append([g.cpu() for g in (*gradients, given.grad) if g is not None])
                layer.zero_grad()
            layer.cpu()
            pairs = zip(*results, strict=True)
            far[f"{name} {trains}"] = max((a - b).abs().max().item() for a, b in pairs)
    assert not cuda.take().races
    return far


def test_layers_with_kernels_of_their_own_compute_as_on_the_cpu() -> None:
    assert max(on_devices(layers).values()) < 1e-5


def drawn() -> list[bool]:
    """Whether the host's generator is as it was, and a device draws other numbers each time."""
    before = torch.get_rng_state()
    first, second = (torch.rand(8, device="cuda:0").tolist() for _ in range(2))
    torch.nn.functional.dropout(torch.ones(8, device="cuda:0")).tolist()
    return [torch.equal(before, torch.get_rng_state()), first != second]


def test_what_a_device_draws_leaves_the_generator_of_the_host_as_it_is() -> None:
    assert on_devices(drawn) == [True, True]
