"""A user's own task: its function gets what the task declares, and may change no more."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.task import TaskContext, TaskKind


def run_task(
    kind: TaskKind,
    stage: int,
    microbatch: int | None,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> None:
    """Call a task's function.

    Args:
        kind: the task, which says what it reads and writes.
        stage: the stage that it runs on.
        microbatch: the micro-batch that it runs for; None for a task once a step.
        parameters: name in the model → each of the stage's parameters.
        gradients: name in the model → the sum of its gradients, where there is one yet.

    Raises:
        InputError: the function changed a tensor in place that it does not declare to write.
    """
    assert kind.run is not None
    read = {name: parameter.detach() for name, parameter in parameters.items()}
    context = TaskContext(
        stage,
        microbatch,
        parameters=read if "parameters" in kind.reads else {},
        gradients=gradients if "gradients" in kind.reads else {},
    )
    before = _versions(read, gradients)
    kind.run(context)
    after = _versions(read, {} if "gradients" in kind.writes else gradients)
    if changed := [name for name, version in after.items() if version != before[name]]:
        raise InputError(
            f"task {kind.name!r} changed {', '.join(changed)} in place and does not say so; let it "
            'leave them, or define it with writes=("gradients",)'
        )


def _versions(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, int]:
    """How often each tensor has been changed in place."""
    told = {f"the parameter {name!r}": tensor for name, tensor in parameters.items()}
    told |= {f"the gradient of {name!r}": tensor for name, tensor in gradients.items()}
    return {name: tensor._version for name, tensor in told.items()}
