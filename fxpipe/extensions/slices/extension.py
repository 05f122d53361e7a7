"""The extension that runs the sequences of micro-batches in slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import Extension
from fxpipe.extensions.slices.placing import Placing
from fxpipe.extensions.slices.unroll import Cache, in_slices
from fxpipe.passes.runner import Pass


@dataclass(frozen=True)
class Slices(Extension):
    """Run each micro-batch's sequence in slices, as Seq1F1B does (Sun et al., arXiv 2406.03488),
    for a schedule with slices, such as ``seq1f1b(4)``: the devices begin with a part of a sequence,
    and keep parts of fewer.

    The model must attend causally, by ``F.scaled_dot_product_attention(..., is_causal=True)`` or
    with a cache of its own, as those of transformers do, and otherwise treat each place of a
    sequence by itself. Without a cache, it takes positions as an input, not from the length of what
    it is given. The compiled plan is compared with the model, so that one that does not is refused.
    So is one that draws random numbers, such as for dropout. Losses and gradients equal those of
    whole sequences to rounding. A slice keeps the keys and values of all slices before it, and each
    but the first hands a gradient of its stage's parameters back to the slice before it. In eval
    mode sequences are not cut.

    Attributes:
        dim: the dimension of the sequence. Every tensor that the model takes is cut along it if its
            size there is that of the first; every tensor that it returns is joined along it.
        cache: for a model with a cache, what makes one, such as ``transformers.DynamicCache``; it
            is given as ``past_key_values=``, with ``use_cache=True``.
    """

    dim: int = 1
    cache: Cache | None = None
    slices = True

    def check(self, options: Options) -> None:
        """Raise InputError if the schedule has no slices, or memory is limited."""
        if not isinstance(self.dim, int) or self.dim < 0:
            raise InputError(f"Slices has dim={self.dim!r}; count dimensions from 0, as in dim=1")
        if options.recipe.slices == 1:
            raise InputError(
                f"Slices needs a schedule with slices, and {options.recipe.name!r} has none; give "
                "schedule=fxpipe.schedules.one_f_one_b.seq1f1b(4)"
            )
        if options.partition.limits(len(options.devices)):
            raise InputError("memory_limits= and Slices exclude each other; leave one of them out")

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """Passes that unroll the model, and place each slice like the first."""
        placing = Placing(options.recipe.slices, self.dim)

        def unroll_slices(model: nn.Module) -> nn.Module:
            return in_slices(model, placing.slices, self.dim, self.cache)

        placed, machine = "traced, assignment", "stages, machine"
        fold = Pass(placing.fold_costs, "traced, costs", "costs", when="not named")
        divide = Pass(placing.divide_one_slice, machine, f"{machine}, whole_machine")
        spread = Pass(placing.spread_slices, f"{placed}, whole_machine", "assignment, machine")
        return {
            "capture": [
                ("", Pass(unroll_slices, "model", "model")),
                ("seed_randomness", Pass(placing.refuse_draws, "traced", "")),
            ],
            "partition": [("", fold), ("", divide), ("cut_at", spread)],
            "follow": [("place_like", Pass(placing.follow_slices, placed, "assignment"))],
            "plan": [("cut", Pass(placing.name_stages, f"{placed}, plan", "plan"))],
        }
