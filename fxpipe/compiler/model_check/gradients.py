"""Compare the gradients of a plan with the model's, a stage at a time.

The plan's backward of a stage runs inside the model's, as soon as that has come to an earlier
stage. So there are never more gradients than those of one stage, of either. Where the device has
memory for one stage only, the model's gradients go to the host's memory instead, and the plan runs
after the model, so that the device holds nothing of the one beside the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.compiler.model_check.fixed_draws import pattern
from fxpipe.compiler.model_check.serial import SerialBackward
from fxpipe.errors import TraceError
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.value import HOST
from fxpipe.torchtools import source

Compare = Callable[[str, Tensor, Tensor], None]
"""Gets what is compared, what the plan computes and what the model computes."""


def compare_gradients(
    plan: Plan,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    of_plan: Mapping[str, Tensor],
    roots: Mapping[str, Tensor],
    compare: Compare,
    *,
    apart: bool,
) -> None:
    """Run the model's own backward and the plan's, from the same gradients, and let the gradients
    of all parameters be compared. Split backwards run in halves and whole.

    Args:
        plan: the plan.
        values: the values that cross between its stages, by name.
        state: name in the model → parameter or buffer, as the model has them.
        of_plan: the same, with the buffers as they were before the model's run.
        roots: the model's loss, or all of its outputs, by name.
        compare: gets each gradient.
        apart: whether the device has memory for one stage only. Gradients of the model wait in the
            host's memory.

    Raises:
        TraceError: the model's backward fails, or gives a sparse gradient.
    """
    back = {edge.value for edge in plan.gradients if edge.source == HOST}
    seeds = {name: pattern(value).to(value) + 0.5 for name, value in roots.items() if name in back}
    # in the model's run, a value that depends on inputs alone needs no gradient
    reaching = [name for name in seeds if roots[name].requires_grad]
    parameters = {a.target: stage for stage in plan.stages for a in stage.parameters}
    trained = {name: stage for name, stage in parameters.items() if state[name].requires_grad}
    if not seeds or not trained:
        return
    runs = {
        kind: SerialBackward(plan, values, of_plan, seeds, halves=bool(kind))
        for kind in (" in halves", "")
        if not kind or any(stage.input_grad is not None for stage in plan.stages)
    }
    both = _Both(plan, runs, trained, compare, inside=not apart)
    failed: list[BaseException] = []

    def arrives(name: str, gradient: Tensor) -> Tensor:
        try:
            if gradient.layout is not torch.strided:
                raise TraceError(
                    f"the gradient of {name!r} is {gradient.layout}, which cannot be added up over "
                    "micro-batches here; make it dense, as with nn.Embedding(..., sparse=False)"
                )
            both.arrives(name, gradient.cpu() if apart else gradient)
        except BaseException as error:
            failed.append(error)
            raise
        return _nothing(gradient)  # or autograd would hold the gradients of all stages

    hooks = [state[name].register_hook(partial(arrives, name)) for name in trained]
    try:
        # a thread of autograd's own would hold the gradients until its next backward
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(
                [roots[name] for name in reaching],
                [state[name] for name in trained],
                [seeds[name] for name in reaching],
                allow_unused=True,
            )
    except RuntimeError as error:
        if error in failed or source.lacks_memory(error):
            raise
        line = str(error).splitlines()[0]
        raise TraceError(
            f"the model's own backward fails without any pipeline ({line}); mend the model first"
        ) from error
    finally:
        failed.clear()  # an error keeps this frame, which would keep the error
        for hook in hooks:
            hook.remove()
    both.finish(state)


class _Both:
    """The gradients of the model and of the plan, each of which goes when both are there.

    Args:
        plan: the plan.
        runs: what its run is called in messages → its backward pass.
        trained: parameter → its stage.
        compare: gets each pair.
        inside: whether the plan's backward runs inside the model's.
    """

    def __init__(
        self,
        plan: Plan,
        runs: Mapping[str, SerialBackward],
        trained: Mapping[str, Stage],
        compare: Compare,
        inside: bool,
    ) -> None:
        self._runs, self._trained, self._compare, self._inside = runs, trained, compare, inside
        self._to_run = [*plan.stages]  # the last one is next
        self._to_arrive = {*trained}
        self._of_model: dict[str, Tensor] = {}
        self._of_plan: dict[str, dict[str, Tensor | None]] = {}  # only what is there first

    def arrives(self, name: str, there: Tensor) -> None:
        """Take a gradient of the model."""
        if self._inside:
            self._run_after(self._trained[name].index)
        self._to_arrive.remove(name)
        if name in self._of_plan:
            for kind, here in self._of_plan.pop(name).items():
                self._meet(name, kind, here, there)
        else:
            self._of_model[name] = there

    def finish(self, state: Mapping[str, Tensor]) -> None:
        """Take zeros for what has not arrived, and run the stages that are left."""
        for name in [name for name in self._trained if name in self._to_arrive]:
            self.arrives(name, _nothing(state[name].detach()))
        self._run_after(-1)

    def _run_after(self, index: int) -> None:
        """Run the backward of each later stage of the plan that has not run."""
        while self._to_run and self._to_run[-1].index > index:
            stage = self._to_run.pop()
            for kind in self._runs:
                self._run(kind, stage)

    def _run(self, kind: str, stage: Stage) -> None:
        with torch.no_grad():
            gradients = self._runs[kind].run(stage)
        for name in (a.target for a in stage.parameters if a.target in self._trained):
            here = gradients.pop(name, None)
            if name in self._to_arrive:
                self._of_plan.setdefault(name, {})[kind] = here
            else:
                there = self._of_model[name] if kind else self._of_model.pop(name)
                self._meet(name, kind, here, there)

    def _meet(self, name: str, kind: str, here: Tensor | None, there: Tensor) -> None:
        here = _nothing(there) if here is None else here
        self._compare(f"the gradient of {name!r}{kind}", here, there)


def _nothing(like: Tensor) -> Tensor:
    """Zeros, as a view of a single one."""
    return like.new_zeros(()).expand_as(like)
