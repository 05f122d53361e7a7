"""A stage's kernel whose graphs are captured once and replayed: one launch for all operations.

A capture is of addresses: it reads its inputs where they were, and writes its results where they
were. So each micro-batch that is in flight at a stage has a slot of fixed memory.

    forward    a slot is taken   inputs → copied into it → replay → outputs copied out of it
    backward                     gradients → copied in → replay → input gradients copied out,
                                 those of parameters added to their sums; the slot is free

What forward saves stays in the slot: a ``Hold`` stands for it. All that runs on a slot is given to
one stream, so that memory is used again only after what came before is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.kernels.graph import GraphKernel
from fxpipe.kernels.kernel import Backwarded, Forwarded, InputGraded, Totals, Wrapping
from fxpipe.kernels.slot import Fixed, Graphs, Hold, Key, Part, Slot
from fxpipe.log import LOGGER

WARM_UP = 3
"""Runs of a graph before it is captured for the first time: libraries choose their kernels and
take their own memory then, as torch's notes on CUDA graphs ask for."""

PATIENCE = 8
"""How often each slot may be captured anew at least, before its stage can be given up."""

SELDOM = 100
"""Forwards that a capture has to last, on average: an optimizer that puts its parameters elsewhere
in every step would have every step captured."""


class Captured(Wrapping):
    """Runs as the kernel does, to the bit, by captured graphs.

    A capture is valid for parameters at the same addresses; each slot keeps as many as there are
    versions of the weights. Where there is no slot, as several differentiable calls at once may
    need more than a schedule tells, the kernel itself runs.

    Attributes:
        kernel: the stage's own.
        slots: how many slots there may be; they are made when they are needed.
        captures: how many graphs were captured so far.
        overflows: how many forwards found no slot.
        given_up: whether it captures no more, as parameters are elsewhere again and again.
    """

    kernel: GraphKernel

    def __init__(
        self,
        kernel: GraphKernel,
        stage: int,
        graphs: Callable[[], Graphs],
        *,
        slots: int,
        versions: int = 1,
        changing: Sequence[bool] = (),
    ) -> None:
        """Nothing is captured yet.

        Args:
            kernel: the stage's own.
            stage: its number, for messages.
            graphs: makes what captures for a slot.
            slots: how many slots there may be.
            versions: for how many sets of addresses a slot keeps captures.
            changing: for each buffer whether micro-batches write it: it is then at another
                address every time, and copied. By default none.
        """
        super().__init__(kernel)
        self.slots = slots
        self.versions = versions
        self.captures = 0
        self.overflows = 0
        self.given_up = False
        self._stage = stage
        self._graphs = graphs
        self._changing = tuple(changing)
        self._free: list[Slot] = []
        self._made = 0
        self._forwards = 0
        self._dropped = 0
        self._warm: set[str] = set()
        self._fresh: list[Tensor] = []
        """Gradients of the parameters, of the newest backward: added up before the next one."""

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> Forwarded:
        """See Kernel.forward. ``saved`` is a Hold."""
        changing = self._changing or (False,) * len(buffers)
        moving = [buffer for buffer, moves in zip(buffers, changing, strict=True) if moves]
        hold = self._take(
            (
                *map(_address, parameters),
                *[_address(b) for b, moves in zip(buffers, changing, strict=True) if not moves],
                *[(type(x), x) for x in inputs if not isinstance(x, Tensor)],
            )
        )
        if hold is None:
            return self.kernel.forward(parameters, buffers, inputs)
        try:
            count = len(inputs)
            given = self._inputs(hold.slot, inputs, moving)

            def run() -> Forwarded:
                copies = iter(given[count:])
                return self.kernel.forward(
                    [parameter.detach() for parameter in parameters],
                    [next(copies) if c else b for b, c in zip(buffers, changing, strict=True)],
                    given[:count],
                )

            made: Forwarded = self._replayed(hold, "forward", run)
            copied = Forwarded(_copies(made.outputs), _copies(made.writes), [hold])
        except BaseException:
            hold.release()
            raise
        if self.backward_graph is None:
            hold.release()
            return copied._replace(saved=[])
        return copied

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> Backwarded:
        """See Kernel.backward. The slot is free after it."""
        hold = _held(saved)
        if hold is None:
            return self.kernel.backward(saved, gradients, totals)
        try:
            slot = self._given(hold, gradients)

            def run() -> list[Tensor]:
                made = self.kernel.backward(_saved(hold), list(slot.values))
                self._keep(made.parameters)
                return made.inputs

            inputs: list[Tensor] = self._replayed(hold, "backward", run)
            return Backwarded(_copies(inputs), self._added(totals))
        finally:
            hold.release()

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGraded:
        """See Kernel.input_grad. ``deferred`` is the Hold."""
        hold = _held(saved)
        if hold is None:
            return self.kernel.input_grad(saved, gradients)
        try:
            slot = self._given(hold, gradients)
            made: InputGraded = self._replayed(
                hold,
                "input_grad",
                lambda: self.kernel.input_grad(_saved(hold), list(slot.values)),
            )
            inputs = _copies(made.inputs)
        except BaseException:
            hold.release()
            raise
        if not any(self.kernel.parameter_gradients):
            hold.release()
            return InputGraded(inputs, [])
        return InputGraded(inputs, [hold])

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        """See Kernel.weight_grad. The slot is free after it."""
        hold = _held(deferred)
        if hold is None:
            return self.kernel.weight_grad(deferred, totals)
        try:
            left = hold.parts["input_grad"].made.deferred
            self._replayed(
                hold, "weight_grad", lambda: self._keep(self.kernel.weight_grad(list(left)))
            )
            return self._added(totals)
        finally:
            hold.release()

    # slots

    def _take(self, key: Key) -> Hold | None:
        """A free slot, best one that has captures for these addresses."""
        if self.given_up:
            return None
        self._forwards += 1
        at = next((at for at, slot in enumerate(self._free) if key in slot.takes), -1)
        if self._free:
            slot = self._free.pop(at)
        elif self._made < self.slots:
            slot = Slot(self._graphs())
            self._made += 1
        else:
            self.overflows += 1
            return None
        hold = Hold(slot, self._free)
        self._dropped += key not in slot.takes and len(slot.takes) >= self.versions
        if self._dropped > max(PATIENCE * self.slots, self._forwards / SELDOM):
            self._give_up()
            return None
        hold.parts = slot.parts(key, self.versions)
        return hold

    def _give_up(self) -> None:
        LOGGER.warning(
            "stage %d runs uncaptured from now on: its parameters are at other addresses again and "
            "again; take an optimizer that changes them in place, or leave cuda_graphs out",
            self._stage,
        )
        self.given_up = True
        self._free = []

    def _inputs(self, slot: Slot, inputs: list[Any], moving: list[Tensor]) -> list[Any]:
        """Copy inputs, and buffers that move, into a slot; the inputs are emptied."""
        values = [*inputs, *moving]
        inputs.clear()
        if slot.inputs is None:
            slot.inputs = Fixed(values, [*self.kernel.input_strides, *[None] * len(moving)])
        slot.inputs.fill(values)
        return slot.inputs.values

    def _given(self, hold: Hold, gradients: list[Tensor]) -> Fixed:
        """Copy gradients of outputs into a slot; the list is emptied."""
        slot = hold.slot
        if slot.gradients is None:
            slot.gradients = Fixed(gradients, self.kernel.gradient_strides)
        slot.gradients.fill(gradients)
        gradients.clear()
        return slot.gradients

    # captures

    def _replayed(self, hold: Hold, task: str, run: Callable[[], Any]) -> Any:
        """What a task makes, in the slot; the first time it is captured."""
        part = hold.parts.get(task)
        if part is None:
            if task not in self._warm:
                for _ in range(WARM_UP):
                    run()
                self._warm.add(task)
            what = f"{task.replace('_', ' ')} of stage {self._stage}"
            part = hold.parts[task] = Part(*hold.slot.graphs.capture(run, what))
            self.captures += 1
        part.replay()
        return part.made

    def _keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy gradients of parameters to where they are added up from.

        All slots share that: else each would hold gradients of all parameters for good.
        """
        found = [gradient for gradient in gradients if gradient is not None]
        if not self._fresh:
            self._fresh = [torch.empty_like(gradient) for gradient in found]
        if found:
            torch._foreach_copy_(self._fresh, found)

    def _added(self, totals: Totals) -> list[Tensor | None]:
        """The sums with the newest gradients added, where there are any."""
        has = self.kernel.parameter_gradients
        every = list(totals) or [None] * len(has)
        fresh = iter(self._fresh)
        pairs = [(total, next(fresh)) for total, own in zip(every, has, strict=True) if own]
        begun = [torch.empty_like(g) for total, g in pairs if total is None]
        if begun:
            torch._foreach_copy_(begun, [g for total, g in pairs if total is None])
        if len(begun) < len(pairs):
            torch._foreach_add_(
                [total for total, _ in pairs if total is not None],
                [g for total, g in pairs if total is not None],
            )
        new = iter(begun)
        return [
            next(new) if own and total is None else total
            for total, own in zip(every, has, strict=True)
        ]


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.stride()


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies in memory of their own, which no replay writes over."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _saved(hold: Hold) -> list[Any]:
    saved: list[Any] = list(hold.parts["forward"].made.saved)
    return saved


def _held(saved: list[Any]) -> Hold | None:
    """The slot in which the values are that a task needs; the list is emptied. None for values."""
    if len(saved) == 1 and isinstance(saved[0], Hold):
        hold: Hold = saved[0]
        saved.clear()
        return hold
    return None
