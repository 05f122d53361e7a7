"""A kernel whose computations are captured into CUDA graphs once and then replayed.

A CUDA graph has fixed addresses: a replay reads its inputs and writes its results at the addresses
of the capture. So each micro-batch in flight at a stage uses a slot of fixed memory.

    forward    take a slot; copy the inputs into it; replay; copy the outputs out
    backward   copy the output gradients in; replay; copy the input gradients out; add the parameter
               gradients to their sums; free the slot

What forward saves stays in the slot; in the store a ``SlotLease`` stands for it. Everything in a
slot runs on one stream, so its memory is reused only after earlier work on it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.extensions.cuda_graphs.slot_graphs import SlotGraphs
from fxpipe.kernels.graph import GraphKernel, layout
from fxpipe.kernels.kernel import BackwardResult, ForwardResult, InputGradResult, Totals, Wrapping

Key = tuple[Any, ...]
"""What a capture is valid for: the addresses of the parameters, and the values on the host."""

WARM_UP = 3
"""Runs before the first capture, in which libraries choose kernels and allocate their own memory,
as torch's notes on CUDA graphs require."""


class Fixed:
    """Tensors at fixed addresses, which are filled with new values.

    Attributes:
        values: the tensors, and in place of values that are no tensors the latest ones.
    """

    def __init__(self, like: Sequence[Any], strides: Sequence[tuple[int, ...] | None]) -> None:
        """Allocate memory for values like these; where a stride is None, keep the value's own."""
        self.values = [
            torch.empty_strided(
                x.shape, layout(x, wanted or x.stride()), dtype=x.dtype, device=x.device
            )
            if isinstance(x, Tensor)
            else x
            for x, wanted in zip(like, strides, strict=True)
        ]

    def fill(self, values: Sequence[Any]) -> None:
        """Copy new values into the tensors; replace values that are no tensors."""
        pairs = list(zip(self.values, values, strict=True))
        _copy_into([pair for pair in pairs if isinstance(pair[0], Tensor)])
        self.values = [fixed if isinstance(fixed, Tensor) else value for fixed, value in pairs]


class TaskGraph(NamedTuple):
    """One captured call: its result, whose tensors every replay overwrites, and the replay."""

    result: Any
    replay: Callable[[], None]


@dataclass
class Slot:
    """Fixed memory for one micro-batch of a stage, and the graphs captured on it.

    Attributes:
        graphs: captures on this slot, and replays on one stream.
        inputs: the inputs of forward: the stage's inputs, then the buffers that change.
        gradients: the gradients of the stage's outputs.
        captures: key → name of a task → its capture; the most recently used key comes last.
    """

    graphs: SlotGraphs = field(default_factory=SlotGraphs)
    inputs: Fixed | None = None
    gradients: Fixed | None = None
    captures: dict[Key, dict[str, TaskGraph]] = field(default_factory=dict)

    def parts(self, key: Key, most: int) -> dict[str, TaskGraph]:
        """Return task → capture for a key. Drops the captures of the least recently used keys, so
        that those of at most ``most`` keys are kept."""
        parts = self.captures.pop(key, {})
        while len(self.captures) >= most:
            del self.captures[next(iter(self.captures))]
        self.captures[key] = parts
        return parts


class SlotLease:
    """A slot in use, until ``release`` is called or this object is garbage-collected.

    It takes the place of what a forward saved. A run that fails drops the values of all devices,
    and with them its leases, so no slot stays in use.
    """

    def __init__(self, slot: Slot, free: list[Slot]) -> None:
        """Take a slot, which returns to ``free``. Any thread may do that: appending is atomic."""
        self.slot = slot
        self.parts: dict[str, TaskGraph] = {}
        self._free: list[Slot] | None = free

    @property
    def saved(self) -> list[Any]:
        return list(self.parts["forward"].result.saved)

    def release(self) -> None:
        """Give the slot back; further calls do nothing."""
        free, self._free = self._free, None
        if free is not None:
            free.append(self.slot)

    __del__ = release


class Captured(Wrapping):
    """Runs a stage with captured graphs; the results equal the wrapped kernel's to the bit.

    A capture is valid for parameters at the same addresses; each slot keeps captures for as many
    sets of addresses as there are versions of the weights. Where no slot is free, which can happen
    with several differentiable calls at once, the wrapped kernel runs instead.

    Attributes:
        slots: the maximum number of slots; they are made when needed.
        versions: for how many sets of addresses a slot keeps captures.
        captures: how many graphs were captured so far.
        overflows: how many forwards found no free slot.
    """

    kernel: GraphKernel

    def __init__(self, kernel: GraphKernel, stage: int, changing: Sequence[bool]) -> None:
        """Wrap a kernel; nothing is captured yet.

        Args:
            stage: the stage's number, for messages.
            changing: for each buffer whether micro-batches write it. Such a buffer has another
                address every time, so it is copied into the slot.
        """
        super().__init__(kernel)
        self.slots = 0
        self.versions = 1
        self.captures = 0
        self.overflows = 0
        self._stage = stage
        self._changing = changing
        self._free: list[Slot] = []
        self._made = 0
        self._warm: set[str] = set()
        self._fresh: list[Tensor] = []

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> ForwardResult:
        """See Kernel.forward. ``saved`` is a SlotLease."""
        changing = self._changing
        moving = [buffer for buffer, moves in zip(buffers, changing, strict=True) if moves]
        staying = [buffer for buffer, moves in zip(buffers, changing, strict=True) if not moves]
        key = (*map(_address, [*parameters, *staying]), *map(_constant, inputs))
        lease = self._take(key)
        if lease is None:
            return self.kernel.forward(parameters, buffers, inputs)
        try:
            count = len(inputs)
            values = self._inputs(lease.slot, inputs, moving)

            def run() -> ForwardResult:
                copies = iter(values[count:])
                return self.kernel.forward(
                    [parameter.detach() for parameter in parameters],
                    [next(copies) if c else b for b, c in zip(buffers, changing, strict=True)],
                    values[:count],
                )

            result: ForwardResult = self._replayed(lease, "forward", run)
            copied = ForwardResult(_copies(result.outputs), _copies(result.writes), [lease])
        except BaseException:
            lease.release()
            raise
        if self.backward_graph is not None:
            return copied
        lease.release()
        return copied._replace(saved=[])

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        """See Kernel.backward. The slot is free after it."""
        lease = _held(saved)
        if lease is None:
            return self.kernel.backward(saved, gradients, totals)
        try:
            fixed = self._gradients(lease, gradients)

            def run() -> list[Tensor]:
                result = self.kernel.backward(lease.saved, list(fixed.values))
                self._keep(result.parameters)
                return result.inputs

            inputs: list[Tensor] = self._replayed(lease, "backward", run)
            return BackwardResult(_copies(inputs), self._added(totals))
        finally:
            lease.release()

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGradResult:
        """See Kernel.input_grad. ``deferred`` is the SlotLease."""
        lease = _held(saved)
        if lease is None:
            return self.kernel.input_grad(saved, gradients)
        try:
            fixed = self._gradients(lease, gradients)
            result: InputGradResult = self._replayed(
                lease, "input_grad", lambda: self.kernel.input_grad(lease.saved, list(fixed.values))
            )
            inputs = _copies(result.inputs)
        except BaseException:
            lease.release()
            raise
        if not any(self.kernel.parameter_gradients):
            lease.release()
            return InputGradResult(inputs, [])
        return InputGradResult(inputs, [lease])

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        """See Kernel.weight_grad. The slot is free after it."""
        lease = _held(deferred)
        if lease is None:
            return self.kernel.weight_grad(deferred, totals)
        try:
            left = lease.parts["input_grad"].result.deferred
            self._replayed(
                lease, "weight_grad", lambda: self._keep(self.kernel.weight_grad(list(left)))
            )
            return self._added(totals)
        finally:
            lease.release()

    def _take(self, key: Key) -> SlotLease | None:
        """Take a free slot, preferably one with captures for this key; None to run uncaptured."""
        at = next((at for at, slot in enumerate(self._free) if key in slot.captures), -1)
        if self._free:
            slot = self._free.pop(at)
        elif self._made < self.slots:
            slot = Slot()
            self._made += 1
        else:
            self.overflows += 1
            return None
        lease = SlotLease(slot, self._free)
        lease.parts = slot.parts(key, self.versions)
        return lease

    def _inputs(self, slot: Slot, inputs: list[Any], moving: list[Tensor]) -> list[Any]:
        """Copy inputs, and buffers whose address changes, into a slot; empties ``inputs``."""
        values = [*inputs, *moving]
        inputs.clear()
        strides = [*self.kernel.input_strides, *[None] * len(moving)]
        slot.inputs = slot.inputs or Fixed(values, strides)
        slot.inputs.fill(values)
        return slot.inputs.values

    def _gradients(self, lease: SlotLease, gradients: list[Tensor]) -> Fixed:
        """Copy gradients of outputs into a slot; empties the list."""
        slot = lease.slot
        slot.gradients = slot.gradients or Fixed(gradients, self.kernel.gradient_strides)
        slot.gradients.fill(gradients)
        gradients.clear()
        return slot.gradients

    def _replayed(self, lease: SlotLease, task: str, run: Callable[[], Any]) -> Any:
        """Replay a task, which the first time is captured. Its results are in the slot's memory."""
        part = lease.parts.get(task)
        if part is None:
            if task not in self._warm:
                for _ in range(WARM_UP):
                    run()
                self._warm.add(task)
            what = f"{task.replace('_', ' ')} of stage {self._stage}"
            lease.parts[task] = part = TaskGraph(*lease.slot.graphs.capture(run, what))
            self.captures += 1
        part.replay()
        return part.result

    def _keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy a backward's parameter gradients to ``_fresh``, which all slots share."""
        present = [gradient for gradient in gradients if gradient is not None]
        if not self._fresh:
            self._fresh = [torch.empty_like(gradient) for gradient in present]
        _copy_into([*zip(self._fresh, present, strict=True)])

    def _added(self, totals: Totals) -> list[Tensor | None]:
        """The sums with the latest gradients added; None for parameters without a gradient."""
        has = self.kernel.parameter_gradients
        fresh = iter(self._fresh)
        sums: list[Tensor | None] = []
        begun: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for total, has_gradient in zip(totals or [None] * len(has), has, strict=True):
            if has_gradient:
                gradient = next(fresh)
                if total is None:
                    total = torch.empty_like(gradient)
                    begun.append((total, gradient))
                else:
                    more.append((total, gradient))
            sums.append(total)
        _copy_into(begun)
        if more:
            torch._foreach_add_([total for total, _ in more], [g for _, g in more])
        return sums


def _copy_into(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, all at once."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.stride()


def _constant(value: Any) -> Any:
    """What a capture fixes of an input: a value on the host. None for tensors on the device."""
    if not isinstance(value, Tensor):
        return type(value), value
    if value.is_cpu and value.dim() == 0 and not value.is_floating_point():
        return value.dtype, value.item()  # on the host by ``Lanes.bring``
    return None


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies in other memory than the slot's, which no replay overwrites."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _held(saved: list[Any]) -> SlotLease | None:
    """Take the SlotLease out of ``saved``; None where the list has the values themselves."""
    if len(saved) == 1 and isinstance(saved[0], SlotLease):
        lease: SlotLease = saved[0]
        saved.clear()
        return lease
    return None
