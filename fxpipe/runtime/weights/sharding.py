"""A replica's parts of the parameters, which its optimizers train in place of the whole ones: the
first stage of ZeRO (arXiv 1910.02054).

A parameter is cut where its gradient is cut to be summed: flat, into as many parts as there are
replicas. So they differ by one element a parameter at most, and each doubling of the replicas
halves what an optimizer keeps; whole parameters could not be dealt out as evenly. An optimizer
that treats each element by itself gives the same bits on a part as on the whole. Any other is
refused; a trial step tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import InputError, told
from fxpipe.ir.value import part_of
from fxpipe.runtime.weights.live import copied, fill
from fxpipe.runtime.weights.optimizer_state import (
    OptimizerState,
    ParameterState,
    Parts,
    trial,
)
from fxpipe.runtime.weights.stage_weights import StageWeights, memory_like, retire
from fxpipe.torchtools.meta import become


class Shards:
    """One replica's parts of the parameters of a stage.

    Attributes:
        of: parameter → this replica's part of it, which the optimizer trains.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Any],
        replica: int,
        replicas: int,
    ) -> None:
        """Let a new optimizer train a replica's parts of a stage's parameters, all of which it was
        made with; its groups and their settings stay."""
        self._replica, self._replicas = replica, replicas
        self.of: dict[nn.Parameter, nn.Parameter]
        self.of = {p: nn.Parameter(self._cut(p.data), p.requires_grad) for p in parameters}
        for group in optimizer.param_groups:
            group["params"] = [self.of[p] for p in group["params"]]
        for parameter, part in self.of.items():  # some make it in their constructor
            if parameter in optimizer.state:
                made = optimizer.state.pop(parameter)
                optimizer.state[part] = self._state(parameter, made)

    def follow(self) -> None:
        """Let the parts be those of the parameters as they are, in their memory where they can."""
        for parameter, part in self.of.items():
            if part.is_meta != parameter.is_meta:
                become(part, self._cut(parameter.data))
            part.data = self._cut(parameter.data)
            part.requires_grad_(parameter.requires_grad)

    def hold(self) -> None:
        """Give the parts that are trained memory of their own; what they had stays as it is."""
        for part in self.of.values():
            if part.requires_grad:
                part.data = part.data.clone()

    def parts_of(self, parameters: Sequence[Tensor]) -> list[nn.Parameter]:
        """This replica's part of each of these parameters."""
        return [self.of[p] for p in parameters]  # type: ignore[index]

    def trained(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parts of those parameters that are trained, for the other replicas."""
        pairs = zip(parameters, self.parts_of(parameters), strict=True)
        return [part.data for parameter, part in pairs if parameter.requires_grad]

    def named(self, names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """Each part under the name of its parameter."""
        return {part: names[p] for p, part in self.of.items() if p in names}

    def cut_out(self, saved: OptimizerState, names: Mapping[nn.Parameter, str]) -> OptimizerState:
        """The state of whole parameters with that of these parts in their place."""
        own = dict(saved.parameters)
        for parameter in self.of:
            if (each := own.get(names[parameter])) is not None:
                own[names[parameter]] = replace(each, state=self._state(parameter, each.state))
        return OptimizerState(saved.groups, own)

    def told(self, state: OptimizerState, names: Mapping[nn.Parameter, str]) -> OptimizerState:
        """The state of these parts, each tensor with its place in that of the whole parameter."""
        own: dict[str, ParameterState] = dict(state.parameters)
        for parameter, part in self.of.items():
            if (each := own.get(names[parameter])) is not None:
                told = {
                    key: self._part(parameter, value) if _is_like(value, part, key) else value
                    for key, value in each.state.items()
                }
                own[names[parameter]] = replace(each, state=told)
        return OptimizerState(state.groups, own)

    def _part(self, parameter: Tensor, value: Tensor) -> Parts:
        start = self._span(parameter).start
        return Parts(tuple(parameter.shape), {start: value} if value.numel() else {})

    def _span(self, parameter: Tensor) -> range:
        return part_of(parameter.numel(), self._replica, self._replicas)

    def _cut(self, tensor: Tensor) -> Tensor:
        span = self._span(tensor)
        return tensor.reshape(-1)[span.start : span.stop]

    def _state(self, parameter: Tensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            key: self._cut(value).clone() if _is_like(value, parameter, key) else value
            for key, value in state.items()
        }


def _is_like(value: Any, parameter: Tensor, key: Any) -> bool:
    """Whether what an optimizer keeps has an element for each of the parameter's."""
    counts = key in ("step", "eta", "mu", "mu_product")  # torch's, also of parameters of no shape
    return isinstance(value, Tensor) and value.shape == parameter.shape and not counts


class ShardedStage(StageWeights):
    """The versions of a stage of whose weights each replica updates a part.

    A version is there once the parts of all are gathered; the own part may be ahead.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        delay: int,
        shards: Shards,
    ) -> None:
        self._shards = shards
        self._made = 0  # the newest version whose part the optimizer has made
        super().__init__(parameters, optimizer, delay, predicts=False)

    sharded = True

    def restart(self, version: int) -> None:
        super().restart(version)
        self._made = version
        self._shards.follow()
        self._shards.hold()

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        groups: Sequence[dict[str, Any]],
        slowest: int,
    ) -> list[dict[str, Any]]:
        """Make the own part of the next version; the gradients are parts, too."""
        self.refuse_changed()
        parts = {name: self._shards.of[p] for name, p in self.parameters.items()}
        memory = {n: p.data.clone() if p.requires_grad else p.data for n, p in parts.items()}
        changed = self._step(self._made + 1, parts, memory, gradients, groups)
        self._made += 1
        return changed

    def parts(self) -> list[Tensor]:
        return self._shards.trained(list(self.parameters.values()))

    def gather(self, version: int, parts: Sequence[Sequence[Tensor]], slowest: int) -> None:
        self.refuse_changed()
        spare = retire(self.live, min(version - self.delay, slowest))
        tensors = memory_like(self.live[self.newest], spare)
        pieces = zip(*parts, strict=True)
        with torch.no_grad():
            for tensor in tensors.values():
                if tensor.requires_grad:
                    fill(tensor.detach(), next(pieces))
        self._show(tensors)
        self._append(tensors)


def refuse_others(optimizer: Optimizer) -> None:
    """Check that an optimizer computes the same on the parts of a parameter as on the whole.

    A copy of it makes two steps over a small random parameter, or a copy of one that it already
    has state for, and over two parts of the same.

    Raises:
        InputError: it does not.
    """
    kind = type(optimizer).__name__
    cure = (
        "leave shard_optimizer out, or give an optimizer that treats each element of dense "
        "parameters by itself, such as torch.optim.AdamW"
    )
    if any(p.layout is not torch.strided for g in optimizer.param_groups for p in g["params"]):
        raise InputError(f"a parameter of {kind} is sparse, and cannot be cut into parts; {cure}")
    for index, group in enumerate(optimizer.param_groups):
        own = max(group["params"], key=lambda p: (p.ndim, -p.numel()), default=None)
        state = {} if own is None else optimizer.state.get(own, {})
        if own is None or (own.is_meta and state):
            continue
        shape, dtype = (own.shape, own.dtype) if state else ((5, 6)[-own.ndim :], torch.float64)
        generator = torch.Generator().manual_seed(0)
        start, *gradients = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
        try:
            with torch.random.fork_rng([]):
                whole = _stepped(optimizer, index, [start], [[g] for g in gradients], [state])
                middle = start.numel() // 3
                sizes = [middle, start.numel() - middle]
                parts = _stepped(
                    optimizer,
                    index,
                    start.view(-1).split(sizes),
                    [g.view(-1).split(sizes) for g in gradients],
                    [
                        {
                            k: x[at] if (x := _split(v, own, k, sizes)) else v
                            for k, v in state.items()
                        }
                        for at in range(2)
                    ],
                )
        except Exception as error:
            raise InputError(
                f"{kind} cannot train parts of parameters ({told(error).splitlines()[0]}); {cure}"
            ) from error
        close = 1e-9 if dtype is torch.float64 else 100 * torch.finfo(dtype).eps
        if not torch.allclose(whole[0].view(-1), torch.cat(parts), rtol=close, atol=close):
            raise InputError(
                f"{kind} computes something else on parts of a parameter than on the whole; {cure}"
            )


def _split(value: Any, own: Tensor, key: Any, sizes: list[int]) -> Sequence[Tensor] | None:
    return value.reshape(-1).split(sizes) if _is_like(value, own, key) else None


def _stepped(
    optimizer: Optimizer,
    index: int,
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    states: Sequence[Mapping[Any, Any]],
) -> list[Tensor]:
    """Parameters with these values after steps of a copy of the optimizer, in one of its groups."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    kept = {p: copied(s) for p, s in zip(parameters, states, strict=True)}
    stepped = trial(optimizer, index, kept)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(stepped)
    return [parameter.detach() for parameter in parameters]
