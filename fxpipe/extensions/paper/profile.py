"""A model's parts, in the order in which they run, with what each takes of a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError, near
from fxpipe.extensions.paper.counting import Counted, Half, count
from fxpipe.extensions.paper.device import Device
from fxpipe.extensions.paper.operations import warn_of

STYLES = ("columns", "rows", "columns/rows", "sequence")
"""How the devices of a tensor-parallel group divide a submodule: its parameters by columns, whose
results stay divided; by rows, whose results are summed; both, one after the other; or no parameters
but the sequence."""

Tensors = Mapping[str, str]
"""Name of submodules, with ``*`` for a part of it → one of STYLES."""


@dataclass
class ModelPart:
    """What a part of a model takes for a micro-batch on one device.

    Attributes:
        name: the submodule at which it begins.
        seconds: half of a step → seconds of computing.
        flops: of a forward and a backward.
        sums: half → the bytes that tensor parallelism sums, and how often.
        saved: bytes that its forward keeps.
        deferred: bytes that the products of weight gradients read.
        tensors: of each parameter the elements, the bytes of one, and whether it has a gradient.
    """

    name: str
    seconds: dict[Half, float] = field(default_factory=lambda: dict.fromkeys(("F", "I", "W"), 0.0))
    flops: float = 0.0
    sums: dict[Half, tuple[float, int]] = field(default_factory=dict)
    saved: float = 0.0
    deferred: float = 0.0
    tensors: list[tuple[float, int, bool]] = field(default_factory=list)

    @property
    def elements(self) -> float:
        """Of all parameters."""
        return sum(elements for elements, _, _ in self.tensors)

    @property
    def parameters(self) -> float:
        """Their bytes."""
        return sum(elements * size for elements, size, _ in self.tensors)

    @property
    def trained(self) -> float:
        """The bytes of those with gradients."""
        return sum(elements * size for elements, size, trained in self.tensors if trained)

    @property
    def work(self) -> float:
        """The seconds of a forward and a backward."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Crossing:
    """Memory that one part makes and later ones read.

    Attributes:
        source: the part.
        targets: those that read it, in order.
        bytes: of the whole.
    """

    source: int
    targets: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class ModelParts:
    """A model's parts for one size of micro-batch and of tensor-parallel group.

    Attributes:
        parts: in the order in which they run.
        crossings: what goes from part to part.
    """

    parts: Sequence[ModelPart]
    crossings: Sequence[Crossing]

    def cut(self, stages: int) -> tuple[int, ...]:
        """The first part of each stage, so that the longest stage takes as little as can be. Raises
        InputError if there are more stages than parts."""
        if stages > len(self.parts):
            raise InputError(f"the model has {len(self.parts)} parts, too few for {stages} stages")
        ends = [0.0, *accumulate(part.work for part in self.parts)]
        low, high = max(part.work for part in self.parts), ends[-1]
        cuts = _cuts(ends, stages, high)
        for _ in range(50):
            middle = (low + high) / 2
            if (found := _cuts(ends, stages, middle)) is None:
                low = middle
            else:
                cuts, high = found, middle
        assert cuts is not None
        return cuts


def _cuts(ends: Sequence[float], stages: int, most: float) -> tuple[int, ...] | None:
    """The first part of each stage, where none takes more than ``most``; None if there is no such
    cut. Each stage has a part at least."""
    count, at, begins = len(ends) - 1, 0, []
    for stage in range(stages):
        begins.append(at)
        left = stages - stage - 1
        limit = ends[at] + most * (1 + 1e-9)
        stop = at + 1
        while stop < count - left and ends[stop + 1] <= limit:
            stop += 1
        if ends[stop] > limit:
            return None
        at = stop
    return tuple(begins) if at == count else None


class Profile:
    """A model, counted for several sizes of micro-batches and tensor-parallel groups.

    Args:
        model: the model; its parameters may be on the meta device.
        args: inputs of some samples.
        kwargs: keyword inputs.
        loss: output → loss; see ``count``.
        tensors: how submodules are divided by tensor parallelism.
        least: how many parts there are to be at least, if the model has as many.
        sums: see ``count``.

    Raises:
        InputError: the inputs have no samples, or ``tensors`` is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss: Callable[..., Any] | None,
        targets: Sequence[Any],
        tensors: Tensors,
        least: int,
        *,
        sums: int | None = None,
    ) -> None:
        self._sums = sums
        self._model, self._loss, self._tensors, self._least = model, loss, tensors, least
        self._given = tuple(args), dict(kwargs), tuple(targets)
        leaves = [x for x in pytree.tree_leaves(self._given) if isinstance(x, Tensor) and x.dim()]
        if not leaves:
            raise InputError("example has no tensor with samples; give a tuple of inputs")
        self.samples = leaves[0].shape[0]
        check_tensors(model, tensors)
        self._counted: dict[int, Counted] = {}
        self._told: frozenset[str] = frozenset()
        self._parts: dict[tuple[int, int, Device], ModelParts] = {}

    def counted(self, samples: int) -> Counted:
        """The operations of a micro-batch of so many samples. Raises InputError as ``count``."""
        if samples not in self._counted:

            def sized(x: Tensor) -> Tensor:
                whole = x.dim() and x.shape[0] == self.samples
                shape = (samples, *x.shape[1:]) if whole else x.shape
                return torch.empty(shape, dtype=x.dtype, device="meta")

            with _on_meta(self._model):
                given = pytree.tree_map_only(Tensor, sized, self._given)
                args, kwargs, targets = given
                loss = self._loss
                ends = None if loss is None else (lambda out: loss(out, *targets))
                found = count(self._model, args, kwargs, ends, samples, sums=self._sums)
            warn_of(found.uncounted - self._told)
            self._told |= found.uncounted
            self._counted[samples] = found
        return self._counted[samples]

    def parts(self, samples: int, group: int, device: Device) -> ModelParts:
        """The parts for micro-batches of so many samples, and ``group`` devices that divide them by
        tensor parallelism."""
        key = samples, group, device
        if key not in self._parts:
            self._parts[key] = self._made(self.counted(samples), group, device)
        return self._parts[key]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The submodules at which parts begin, in the order in which they run."""
        counted = self.counted(self.samples)
        depth, names = 1, _names(counted, 1)
        while len(names) < self._least:
            depth += 1
            more = _names(counted, depth)
            if len(more) == len(names):
                break
            names = more
        self._depth = depth
        return tuple(names)

    @cached_property
    def flops(self) -> float:
        """The FLOPs of the products of a sample's forward and backward."""
        return sum(ran.operation.flops for ran in self.counted(self.samples).ran) / self.samples

    def _made(self, counted: Counted, group: int, device: Device) -> ModelParts:
        place = {name: at for at, name in enumerate(self.names)}
        home = _Homes(counted, place, self._depth)
        parts = [ModelPart(name) for name in self.names]
        divided = cache(lambda path: group if _style(path, self._tensors) else 1)
        seconds = cache(lambda operation, by: device.seconds(operation.divided(by)))
        for path, half, operation in counted.ran:
            part = parts[home(path)]
            part.seconds[half] += seconds(operation, divided(path))
            part.flops += operation.flops / divided(path)
            if half == "W" and operation.shape is not None:
                pairs, rows, columns, length = operation.shape
                read = pairs * (rows + columns) * length * operation.itemsize
                part.deferred += read / divided(path)
        for name, (elements, itemsize, trained) in counted.parameters.items():
            part = parts[home(name.rpartition(".")[0])]
            by = divided(name.rpartition(".")[0])
            part.tensors.append((elements / by, itemsize, trained))
        made = {kept.storage: kept for kept in counted.made}
        for path, storage, size in counted.saved:
            maker = made[storage].path if storage in made else path
            if storage not in made or home(maker) == home(path):
                parts[home(path)].saved += size / divided(maker)
        if group > 1:
            self._sum(counted, group, parts, home)
        readers: defaultdict[int, set[int]] = defaultdict(set)
        for path, storage in counted.read:
            if storage in made:
                readers[storage].add(home(path))
        crossings = []
        for storage, at in readers.items():
            kept = made[storage]
            source = home(kept.path)
            if later := tuple(sorted(target for target in at if target > source)):
                crossings.append(Crossing(source, later, kept.bytes / divided(kept.path)))
        return ModelParts(parts, crossings)

    def _sum(
        self, counted: Counted, group: int, parts: Sequence[ModelPart], home: Callable[[str], int]
    ) -> None:
        """Note the sums of tensor parallelism, which go round a ring."""
        share = 2 * (group - 1) / group
        for path in counted.outputs:
            style = _own_style(path, self._tensors)
            ways: tuple[tuple[Half, Mapping[str, int], str], ...] = (
                ("F", counted.outputs, "rows"),
                ("I", counted.inputs, "columns"),
            )
            for half, sized, which in ways:
                if style is not None and which in style and sized.get(path):
                    part = parts[home(path)]
                    size, times = part.sums.get(half, (0.0, 0))
                    part.sums[half] = size + share * sized[path], times + 2 * (group - 1)


def check_tensors(model: nn.Module, tensors: Tensors) -> None:
    """Raise InputError if tensor parallelism names a submodule that is not there, or a style that
    is none."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in tensors.items():
        if style not in STYLES:
            raise InputError(f"tensors[{pattern!r}] is {style!r}: {near(str(style), STYLES)}")
        if not any(_matches(name, pattern) for name in names):
            raise InputError(f"tensors names no submodule {pattern!r}: {near(pattern, names)}")


def _matches(name: str, pattern: str) -> bool:
    own, asked = name.split("."), pattern.split(".")
    return len(own) == len(asked) and all(map(fnmatchcase, own, asked))


def _own_style(path: str, tensors: Tensors) -> str | None:
    return next((style for name, style in tensors.items() if _matches(path, name)), None)


def _style(path: str, tensors: Tensors) -> str | None:
    """The style of the innermost submodule around a path that has one."""
    names = path.split(".")
    around = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return next(filter(None, (_own_style(name, tensors) for name in around)), None)


def _begin(path: str, containers: frozenset[str], depth: int) -> str:
    """The part of a path: up to the ``depth``-th submodule that a container holds, or as many as
    there are; without one all of it."""
    names, met, found = path.split("."), 0, path
    for end in range(1, len(names) + 1):
        if ".".join(names[: end - 1]) in containers:
            met += 1
            found = ".".join(names[:end])
            if met == depth:
                break
    return found


def _names(counted: Counted, depth: int) -> list[str]:
    """The parts, in the order in which they run. What runs in a submodule around parts belongs to
    the part before it."""
    ran = dict.fromkeys(ran.path for ran in counted.ran if ran.half == "F" and ran.path)
    begun = dict.fromkeys(_begin(path, counted.containers, depth) for path in ran)
    return [name for name in begun if not any(n.startswith(f"{name}.") for n in begun)]


class _Homes:
    """Finds the part of a path."""

    def __init__(self, counted: Counted, place: Mapping[str, int], depth: int) -> None:
        self._counted, self._place, self._depth = counted, place, depth
        self._known: dict[str, int] = {}
        last = 0
        for path in (ran.path for ran in counted.ran if ran.half == "F"):
            name = _begin(path, counted.containers, depth)
            last = place.get(name, last)
            self._known.setdefault(path, last)

    def __call__(self, path: str) -> int:
        if path not in self._known:
            name = _begin(path, self._counted.containers, self._depth)
            around = [at for known, at in self._place.items() if known.startswith(f"{name}.")]
            self._known[path] = self._place.get(name, min(around, default=0))
        return self._known[path]


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, the parameters and buffers of a model are on the meta device."""
    tables: list[dict[str, Tensor | None]] = []
    for module in model.modules():
        tables += [module._parameters, module._buffers]  # type: ignore[list-item]
    before = [(table, dict(table)) for table in tables]
    known: dict[int, Tensor] = {}
    for table, tensors in before:
        for name, x in tensors.items():
            if x is not None and not x.is_meta:
                if id(x) not in known:
                    made: Tensor = torch.empty_like(x, device="meta").requires_grad_(
                        x.requires_grad
                    )
                    known[id(x)] = nn.Parameter(made, x.requires_grad) if _is_parameter(x) else made
                table[name] = known[id(x)]
    try:
        yield
    finally:
        for table, tensors in before:
            table.update(tensors)


def _is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter)
