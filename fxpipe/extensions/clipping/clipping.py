"""Clip by the norm of all stages' gradients, and skip batches whose gradients overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fxpipe.errors import CheckpointError

if TYPE_CHECKING:
    from fxpipe.engine import Engine


class Clipping:
    """Clips the gradients of a batch by one norm over all stages.

    Each stage computes the same norm from the norms of all gradients, so no stage has to send a
    result to the others. It equals that of ``torch.nn.utils.clip_grad_norm_`` over all parameters
    after ``GradScaler.unscale_``. With a scaler, no stage updates if the norm is not finite. The
    host decides that, so it waits for the norm once per stage; without a scaler it does not wait.

    Attributes:
        limit: the greatest norm that gradients may have; None for any.
        scaler: scales the losses; its scale changes as in its own ``update``. None if disabled.
        skipped: how many batches the scaler has skipped.
    """

    def __init__(
        self, limit: float | None, scaler: GradScaler | None, model: nn.Module | None = None
    ) -> None:
        """Take the settings. Norms are summed in the order of the model's parameters."""
        named = [] if model is None else [*model.named_parameters(remove_duplicate=False)]
        first: dict[int, int] = {}
        self._order = {
            name: first.setdefault(id(parameter), place)
            for place, (name, parameter) in enumerate(named)
        }
        self.limit = limit
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._norm: Tensor | float | None = None  # of the newest batch that is not in flight
        self._norms: dict[int, Tensor] = {}  # batch in flight → its norm
        self.skipped = 0
        self._scales: dict[int, float] = {}
        self._finite: dict[int, bool] = {}

    def shown(self, engine: Engine) -> float | None:
        """See ``Engine.grad_norm``."""
        engine.backend.end()  # batches may be in flight
        run = engine.in_flight
        # Batch count - 2 has left the last device's forward, so all devices have finished the lists
        # of the step before it.
        return self.norm(math.inf if run is None else run.count - 2 - run.program.depth)

    def norm(self, before: float = math.inf) -> float | None:
        """The norm, before clipping, of the last batch whose number is less than ``before``; None
        if there is none. Waits for all that the calling thread has launched on the device."""
        known = [batch for batch in list(self._norms) if batch < before]
        norm = self._norms[max(known)] if known else self._norm
        return None if norm is None else float(norm)

    def begin(self, batch: int) -> float:
        """Begin a batch. Returns the factor for the gradient of its loss."""
        if self.scaler is None:
            return 1.0
        self._scales[batch] = scale = float(self.scaler.get_scale())
        return scale

    def in_order(self, names: Sequence[str], norms: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Sort norms, whose parameters have these names, to the order of the model's parameters."""
        pairs = zip(names, norms, strict=True)
        return [norm for _, norm in sorted(pairs, key=lambda pair: self._order[pair[0]])]

    def unscale(self, batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Divide a stage's gradients by the scale of a batch, in place."""
        present = [gradient for gradient in gradients if gradient is not None]
        factor = 1 / self._scales.get(batch, 1.0)
        if present and factor != 1:
            torch._foreach_mul_(present, factor)

    def clip(
        self, batch: int, gradients: list[Tensor | None], norms: Sequence[Tensor | None]
    ) -> None:
        """Clip a stage's gradients of a batch in place. With a scaler, replace all by None if the
        norm is not finite.

        Args:
            batch: the number of the batch.
            gradients: the stage's gradients.
            norms: the norms of the gradients of all stages, in the order in which to sum them.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        known = [norm for norm in norms if norm is not None]
        total = torch.linalg.vector_norm(torch.stack(known)) if known else torch.zeros(())
        self._norms[batch] = total
        if self.scaler is not None:
            self._finite[batch] = finite = bool(torch.isfinite(total))
            if not finite:
                gradients[:] = [None] * len(gradients)
                return
        if present and self.limit is not None:
            factor = (self.limit / (total + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(present, factor)

    def settle(self, before: int) -> None:
        """Update the scale for all batches with numbers less than ``before``, in their order. They
        are no longer in flight."""
        for batch in sorted(batch for batch in list(self._norms) if batch < before):
            self._norm = self._norms.pop(batch)
        for batch in sorted(batch for batch in list(self._finite) if batch < before):
            self._update_scale(self._finite.pop(batch))
            self._scales.pop(batch, None)

    def forget(self) -> None:
        """Forget the batches in flight after they were dropped."""
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
        """Raises CheckpointError if a checkpoint's state cannot be loaded."""
        fits = state.keys() == self.state().keys() and (
            all(type(state[key]) is int and state[key] >= 0 for key in ("grown", "skipped"))
            and all(isinstance(state[key], float | None) for key in ("scale", "norm"))
            and (state["scale"] is None or 0 < state["scale"] < math.inf)
        )
        if not fits:
            raise CheckpointError(
                f"the checkpoint's state of clipping is {dict(state)}; restore another one"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's state; if that had no scaler, the scale stays as it is."""
        self.forget()
        self.skipped, norm = state["skipped"], state["norm"]
        self._norm = None if norm is None else torch.tensor(norm, dtype=torch.float64)
        if state["scale"] is not None:
            self._set_scale(state["scale"], state["grown"])

    def _update_scale(self, finite: bool) -> None:
        """Do what ``GradScaler.update`` does after a batch."""
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
