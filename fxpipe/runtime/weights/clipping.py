"""Clips by the norm of all stages' gradients, and skips batches whose gradients overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fxpipe.errors import CheckpointError
from fxpipe.ir import instruction as ins
from fxpipe.ir.value import norm_buffer
from fxpipe.runtime.ranks.summing import between

if TYPE_CHECKING:
    from fxpipe.runtime.interpreter import Machine


def share_norms(machine: Machine, instruction: ins.Norm) -> None:
    """See ins.Norm."""
    stage, batch = instruction.stage, instruction.batch
    gradients = machine.store.gradients.get((stage, batch), [])
    absolute = machine.step + batch
    how = machine.jobs[absolute].clipping
    if stage in machine.program.sharded:  # replicas send norms of gradients that are scaled yet
        found = between(machine).all_norms(stage, absolute, norms_of(gradients))
        norms = [None if norm is None else norm.clone() for norm in found]
        if how is not None:
            how.unscale(absolute, norms)
            how.unscale(absolute, gradients)
    else:
        if how is not None:
            how.unscale(absolute, gradients)
        norms = norms_of(gradients)
    for other in range(machine.program.stages):
        machine.store.values[norm_buffer(stage, other, batch)] = norms


def clip(machine: Machine, instruction: ins.Clip) -> None:
    """See ins.Clip."""
    stage, batch, store = instruction.stage, instruction.batch, machine.store
    names: list[str] = []
    norms: list[Tensor | None] = []
    for other in range(machine.program.stages):
        names += [argument.target for argument in machine.stages[other].parameters]
        norms += store.values[norm_buffer(other, stage, batch)]
    absolute = machine.step + batch
    how = machine.jobs[absolute].clipping
    if how is not None:
        if not machine.program.sharded:  # else they are those of parts
            norms = how.in_order(names, norms)
        how.clip(absolute, store.gradients.get((stage, batch), []), norms)


class Clipping:
    """Clips the gradients of a batch by one norm over all stages.

    Each stage computes the same norm from the norms of all gradients, so no stage has to send a
    result to the others. It equals ``torch.nn.utils.clip_grad_norm_`` over all parameters after
    ``GradScaler.unscale_``, or over their parts where each replica has some. With a scaler, no
    stage updates where the norm is not finite: that is decided on the host, which waits for the
    norm once a stage. Without one it waits for nothing.

    Attributes:
        limit: the greatest norm that gradients may have, or None for any.
        scaler: scales the losses; its scale changes as in its own ``update``. None where it is
            disabled.
        skipped: how many batches the scaler has skipped.
    """

    def __init__(
        self, limit: float | None, scaler: GradScaler | None, model: nn.Module | None = None
    ) -> None:
        """Nothing was clipped yet. The gradients' norms are added in the order of the model's
        parameters."""
        named = [] if model is None else [*model.named_parameters(remove_duplicate=False)]
        first: dict[int, int] = {}
        self._order = {
            name: first.setdefault(id(parameter), place)
            for place, (name, parameter) in enumerate(named)
        }
        self.limit = limit
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._norm: Tensor | float | None = None  # of the latest batch before those in flight
        self._norms: dict[int, Tensor] = {}  # of batches in flight
        self.skipped = 0
        self._scales: dict[int, float] = {}
        self._finite: dict[int, bool] = {}

    def norm(self, before: float = math.inf) -> float | None:
        """The norm before clipping of the latest batch that comes before this one; None where there
        is none. It waits for the device, behind what the calling thread has launched there."""
        known = [batch for batch in list(self._norms) if batch < before]
        found = self._norms[max(known)] if known else self._norm
        return None if found is None else float(found)

    def begin(self, batch: int) -> float:
        """Begin a batch. Returns the factor for the gradient of its loss."""
        if self.scaler is None:
            return 1.0
        self._scales[batch] = scale = float(self.scaler.get_scale())
        return scale

    def in_order(self, names: Sequence[str], norms: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The norms of gradients of parameters with these names, in the order of the model's."""
        pairs = zip(names, norms, strict=True)
        return [norm for _, norm in sorted(pairs, key=lambda pair: self._order[pair[0]])]

    def unscale(self, batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Take the scale of a batch out of a stage's gradients, in place."""
        own = [gradient for gradient in gradients if gradient is not None]
        factor = 1 / self._scales.get(batch, 1.0)
        if own and factor != 1:
            torch._foreach_mul_(own, factor)

    def clip(
        self, batch: int, gradients: list[Tensor | None], norms: Sequence[Tensor | None]
    ) -> None:
        """Clip a stage's gradients of a batch in place by the norms of all gradients of all stages,
        in their order; with a scaler, drop them where not finite."""
        own = [gradient for gradient in gradients if gradient is not None]
        found = [norm for norm in norms if norm is not None]
        total = torch.linalg.vector_norm(torch.stack(found)) if found else torch.zeros(())
        self._norms[batch] = total
        if self.scaler is not None:
            self._finite[batch] = finite = bool(torch.isfinite(total))
            if not finite:
                gradients[:] = [None] * len(gradients)
                return
        if own and self.limit is not None:
            factor = (self.limit / (total + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(own, factor)

    def settle(self, before: int) -> None:
        """Update the scale by the results of all batches before this one, in their order; they are
        in flight no more."""
        for batch in sorted(batch for batch in list(self._norms) if batch < before):
            self._norm = self._norms.pop(batch)
        for batch in sorted(self._finite):
            if batch < before:
                self._settle(self._finite.pop(batch))
                self._scales.pop(batch, None)

    def forget(self) -> None:
        """Forget the batches in flight, which were dropped."""
        self._norms.clear()
        self._finite.clear()
        self._scales.clear()

    def state(self) -> dict[str, float | None]:
        """The state for a checkpoint, while no batch is in flight."""
        scale = None if self.scaler is None else float(self.scaler.get_scale())
        return {
            "scale": scale,
            "grown": 0 if self.scaler is None else self.scaler.state_dict()["_growth_tracker"],
            "norm": self.norm(),
            "skipped": self.skipped,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where a checkpoint's state cannot be loaded."""
        fits = state.keys() == self.state().keys() and (
            all(type(state[key]) is int and state[key] >= 0 for key in ("grown", "skipped"))
            and all(isinstance(state[key], float | None) for key in ("scale", "norm"))
            and (state["scale"] is None or 0 < state["scale"] < math.inf)
        )
        if not fits:
            raise CheckpointError(
                f"what the checkpoint keeps of clipping is {dict(state)}; restore another one"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's state; if it had no scaler, the scale stays as it is."""
        self.forget()
        self.skipped, norm = state["skipped"], state["norm"]
        self._norm = None if norm is None else torch.tensor(norm, dtype=torch.float64)
        if state["scale"] is not None:
            self._set_scale(state["scale"], state["grown"])

    def _settle(self, finite: bool) -> None:
        self.skipped += not finite
        if self.scaler is None:
            return
        now = self.scaler.state_dict()
        scale, grown = now["scale"], now["_growth_tracker"] + 1
        if not finite:
            scale, grown = scale * now["backoff_factor"], 0
        elif grown == now["growth_interval"]:
            larger, grown = scale * now["growth_factor"], 0
            scale = larger if larger <= torch.finfo(torch.float32).max else scale
        self._set_scale(scale, grown)

    def _set_scale(self, scale: float, grown: int) -> None:
        if self.scaler is not None:
            now = self.scaler.state_dict()
            self.scaler.load_state_dict({**now, "scale": scale, "_growth_tracker": grown})


def norms_of(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The 2-norm of each gradient; computed in float32 for half precision."""
    own = [gradient for gradient in gradients if gradient is not None]
    found = {}
    for dtype in {gradient.dtype for gradient in own}:
        alike = [gradient for gradient in own if gradient.dtype == dtype]
        computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        found[dtype] = iter(torch._foreach_norm(alike, 2, computed))
    return [None if each is None else next(found[each.dtype]) for each in gradients]
