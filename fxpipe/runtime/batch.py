"""A call's inputs split into micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError, near
from fxpipe.torchtools.pytrees import flatten

BatchDims = Mapping[str, int | None]
"""Input → its batch dimension, or None for an input that every micro-batch gets whole.

A name covers everything nested in it: ``"mask"`` covers ``mask['left']``. A target is called
``target``; several are called ``target[0]``, ``target[1]`` …
"""


@dataclass(frozen=True)
class Batch:
    """The inputs and targets of one call, flattened.

    Attributes:
        leaves: all tensors and other values in order: positional, keyword (by name), targets, then
            the numbers that are in no argument.
        spec: how they nest: ``(args, kwargs, targets)``.
        dims: for each leaf the dimension that is split; None if each micro-batch gets it whole.
        size: the batch size: the size of that dimension in every tensor that is split.
        inputs: how many of the leaves are inputs of the model; targets follow.
        signature: the signature of the model's forward, which gives the leaves their names.
        numbers: the leaves that are numbers, which the graph takes as inputs: index → the number;
            the leaf itself is a tensor of type float64 without dimensions. See ``with_numbers``.
        others: the names of those that are in no argument.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    dims: tuple[int | None, ...]
    size: int
    inputs: int
    signature: inspect.Signature
    numbers: Mapping[int, float] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @staticmethod
    def of(
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Sequence[Any] = (),
        batch_dims: BatchDims | None = None,
        hint: str = "",
    ) -> Batch:
        """Flatten a call.

        A tensor that ``batch_dims`` does not name is split along dimension 0. A tensor without
        dimensions, or of size 1 in a larger batch, goes whole to every micro-batch. ``hint`` is
        appended to the error for arguments that do not fit.

        Raises:
            InputError: the arguments do not fit the model, no tensor has a batch dimension, or
                batch sizes disagree.
        """
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(
                f"the inputs do not fit {type(model).__name__}.forward: {error}{hint}"
            ) from None
        ordered = {name: kwargs[name] for name in sorted(kwargs)}
        nested = (tuple(args), ordered, tuple(targets))
        leaves, spec = pytree.tree_flatten(nested)
        if any(hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor) for leaf in leaves):
            leaves, spec = flatten(nested)
        leaves = [ordinary(leaf) for leaf in leaves]
        named = partial(_named, nested, signature)
        wanted = _wanted(batch_dims, leaves, named(), signature) if batch_dims else {}
        size = _batch_size(leaves, wanted, named)
        dims = tuple(
            wanted.get(index, 0 if isinstance(leaf, Tensor) and leaf.shape[:1] == (size,) else None)
            for index, leaf in enumerate(leaves)
        )
        count = spec.child(0).num_leaves + spec.child(1).num_leaves
        return Batch(tuple(leaves), spec, dims, size, count, signature)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each leaf in messages: ``x``, ``mask['left']``, ``target[0]``."""
        return (*(name for _, name in self._named), *self.others)

    @property
    def arguments(self) -> tuple[str, ...]:
        """For each leaf the name of the argument that it belongs to."""
        return (*(argument for argument, _ in self._named), *self.others)

    @property
    def _named(self) -> Sequence[tuple[str, str]]:
        return _named(self.unflatten(self.leaves), self.signature)

    @cached_property
    def plain(self) -> list[int]:
        """The leaves that are no tensors."""
        return [i for i, leaf in enumerate(self.leaves) if not isinstance(leaf, Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """How the arguments nest, and the types of their leaves."""
        leaves = enumerate(self.leaves[: self.spec.num_leaves])
        return self.spec, self.inputs, tuple(type(self.numbers.get(i, leaf)) for i, leaf in leaves)

    def key(self, read: Collection[int]) -> tuple[Any, ...]:
        """Everything that a trace depends on besides the batch size; see ``like``."""
        sizes = tuple(
            (tuple(x.shape) if dim is None else (*x.shape[:dim], *x.shape[dim + 1 :]))
            if isinstance(x, Tensor)
            else ()
            for x, dim in zip(self.leaves, self.dims, strict=True)
        )
        return *self.like(read), sizes

    def like(self, read: Collection[int]) -> tuple[Any, ...]:
        """Everything that a trace depends on besides all sizes.

        Args:
            read: which of the leaves that are no tensors some code reads.
        """
        leaves = tuple(
            (type(leaf), repr(leaf) if index in read else None)
            if not isinstance(leaf, Tensor)
            else (dim, leaf.dtype, leaf.device, leaf.dim(), type(self.numbers.get(index)))
            for index, (leaf, dim) in enumerate(zip(self.leaves, self.dims, strict=True))
        )
        return self.spec, self.inputs, self.others, leaves

    def with_numbers(self, indices: Iterable[int], others: Mapping[str, float]) -> Batch:
        """The same batch, with numbers as inputs of the graph: those leaves, and ``others``, which
        the model or its loss reads elsewhere, by their names."""
        numbers = {index: self.leaves[index] for index in indices}
        leaves = [*self.leaves, *others.values()]
        numbers |= dict(enumerate(others.values(), len(self.leaves)))
        for index, number in numbers.items():
            leaves[index] = torch.tensor(number, dtype=torch.float64)
        dims = (*self.dims, *[None] * len(others))
        return replace(self, leaves=tuple(leaves), dims=dims, numbers=numbers, others=tuple(others))

    def without_numbers(self) -> Batch:
        """The batch of which ``with_numbers`` made this one."""
        count = self.spec.num_leaves
        leaves = [self.numbers.get(i, leaf) for i, leaf in enumerate(self.leaves[:count])]
        return replace(self, leaves=tuple(leaves), dims=self.dims[:count], numbers={}, others=())

    def wants(self, purpose: str) -> tuple[bool, ...]:
        """For each leaf: whether a call for this purpose returns a gradient for it.

        Raises:
            InputError: a leaf requires a gradient in a step.
        """
        trains = [isinstance(x, Tensor) and x.requires_grad for x in self.leaves]
        if not any(trains):
            return (False,) * len(trains)
        if purpose == "step":
            name = self.names[trains.index(True)]
            raise InputError(
                f"{name} requires a gradient, and a step gives gradients to parameters alone; give "
                f"{name}.detach(), or call the pipe itself, and backward of a loss of its output"
            )
        return tuple(purpose == "call" and wants for wants in trains)

    def check_devices(self, *kinds: str) -> None:
        """Check that all tensors are dense and on these kinds of devices. Raises InputError."""
        for index, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.device.type not in kinds:
                name = self.names[index]
                raise InputError(f"{name} is on {leaf.device}; move it to the CPU ({name}.cpu())")
            if leaf.layout is not torch.strided:
                name = self.names[index]
                cure = (
                    f"make it dense ({name}.to_dense()), or give its indices and values, and make "
                    "the sparse tensor of them in the forward of a leaf module, see docs/tracing.md"
                )
                if leaf.is_nested:
                    cure = f"pad its rows ({name}.to_padded_tensor(0.0)), and give their lengths"
                raise InputError(f"{name} is {leaf.layout}, and stages take dense tensors; {cure}")

    def split(self, microbatches: int) -> list[list[Any]]:
        """Split the leaves: micro-batch → its leaves. Sizes differ by at most one, larger first.

        Raises:
            InputError: there are more micro-batches than samples.
        """
        if microbatches > self.size:
            raise InputError(
                f"microbatches is {microbatches} and the batch has {self.size} samples; give at "
                f"most {self.size} micro-batches or a larger batch"
            )
        parts = [
            [leaf.detach() if isinstance(leaf, Tensor) else leaf] * microbatches
            if dim is None
            else _split(leaf.detach(), microbatches, dim)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return [list(microbatch) for microbatch in zip(*parts, strict=True)]

    def sizes(self, microbatches: int) -> list[int]:
        """The number of samples in each micro-batch."""
        base, more = divmod(self.size, microbatches)
        return [base + (i < more) for i in range(microbatches)]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with ``change`` applied to every tensor."""
        return replace(self, leaves=pytree.tree_map_only(Tensor, change, self.leaves))

    def in_parts(self, microbatches: int, replica: int = 0) -> MicroBatches:
        """Split into micro-batches, weighted by their samples. Raises like ``split``."""
        leaves, sizes = self.split(microbatches), self.sizes(microbatches)
        return MicroBatches(self, leaves, [size / self.size for size in sizes], replica)

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """``(args, kwargs, targets)`` of a micro-batch's leaves; numbers as they were given."""
        given = [self.numbers.get(i, x) for i, x in enumerate(leaves[: self.spec.num_leaves])]
        args, kwargs, targets = pytree.tree_unflatten(given, self.spec)
        return args, kwargs, targets


@dataclass(frozen=True)
class MicroBatches:
    """A batch split into micro-batches.

    Attributes:
        batch: the whole batch.
        leaves: micro-batch → its leaves.
        weights: micro-batch → the weight of its loss in the loss of the batch: its share of the
            samples, unless ``LossWeight`` or ignored targets change it. With several replicas, the
            weight in the loss over the batches of all replicas. A tensor if it was computed on a
            device, whose values the host does not know.
        replica: the replica whose batch this is.
        all_weights: in a step with several replicas, replica → the weights of its micro-batches.
    """

    batch: Batch
    leaves: list[list[Any]]
    weights: Sequence[float] | Tensor
    replica: int = 0
    all_weights: Sequence[Sequence[float]] = ()

    def __len__(self) -> int:
        return len(self.leaves)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of samples in each micro-batch."""
        return self.batch.sizes(len(self.leaves))


def _split(leaf: Tensor, microbatches: int, dim: int) -> Sequence[Tensor]:
    parts = leaf.tensor_split(microbatches, dim)
    # A slice of rows has the strides of the whole. The strides of other slices depend on the size
    # of the batch, so those are copied.
    return parts if dim == 0 else [part.contiguous() for part in parts]


def ordinary(leaf: Any) -> Any:
    """Clone a tensor made under ``torch.inference_mode``, so that autograd takes it."""
    if not isinstance(leaf, Tensor) or not leaf.is_inference() or torch.is_inference_mode_enabled():
        return leaf
    return leaf.clone()


def _named(nested: Sequence[Any], signature: inspect.Signature) -> list[tuple[str, str]]:
    """For each leaf of ``(args, kwargs, targets)``: the name of its argument, and its own name."""
    positional = [
        p.name
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    named = []
    for path, _ in pytree.tree_flatten_with_path(nested)[0]:
        part: Any = path[0].idx  # type: ignore[attr-defined]
        key: Any = path[1]
        inner = path[2:]
        if part == 0:
            has_name = key.idx < len(positional)
            argument = positional[key.idx] if has_name else f"argument {key.idx}"
        elif part == 1:
            argument = str(key.key)
        else:
            argument, inner = "target", inner if len(nested[2]) == 1 else path[1:]
        named.append((argument, argument + pytree.keystr(inner)))
    return named


def _wanted(
    batch_dims: BatchDims,
    leaves: Sequence[Any],
    named: Sequence[tuple[str, str]],
    signature: inspect.Signature,
) -> dict[int, int | None]:
    """Leaf → the batch dimension that the user asks for, counted from the front.

    Raises:
        InputError: a leaf does not have that dimension, or no leaf has that name. Optional inputs
            of the model may be missing in the call, and so may the targets.
    """
    wanted: dict[int, int | None] = {}
    known = {name for names in named for name in names}
    absent = {*signature.parameters, "target"} - known
    absent |= {name for (_, name), leaf in zip(named, leaves, strict=True) if leaf is None}
    for name in batch_dims:
        if name not in known and name.partition("[")[0].partition(".")[0] not in absent:
            raise InputError(
                f"batch_dims names {name!r}, and the call has no such input (where it is "
                f"optional, give it as None): {near(name, known)}"
            )
    for index, ((argument, name), leaf) in enumerate(zip(named, leaves, strict=True)):
        key = next((key for key in (name, argument) if key in batch_dims), None)
        if key is None or not isinstance(leaf, Tensor):
            continue
        dim = batch_dims[key]
        if dim is None or (leaf.dim() == 0 and key != name):
            wanted[index] = None
        elif -leaf.dim() <= dim < leaf.dim():
            wanted[index] = dim % leaf.dim()
        else:
            raise InputError(
                f"batch_dims says {dim} for {key!r} and {name} has {leaf.dim()} dimensions; "
                "give one that it has, or None where every micro-batch gets all of it"
            )
    return wanted


def _batch_size(
    leaves: Sequence[Any],
    wanted: Mapping[int, int | None],
    named: Callable[[], Sequence[tuple[str, str]]],
) -> int:
    """The batch size that all tensors agree on; the leaves in ``wanted`` must have it exactly.

    Raises:
        InputError: they disagree, or there is none.
    """
    sizes = {
        index: leaf.shape[dim]
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dim() and (dim := wanted.get(index, 0)) is not None
    }
    if not sizes:
        raise InputError("no input is a tensor with a batch dimension; give at least one")
    for index, size in sizes.items():
        if size == 0:
            raise InputError(
                f"{named()[index][1]} has no samples (dimension {wanted.get(index, 0)} is 0); give "
                "a batch that has some"
            )
    # a single row is shared by all samples, unless the user has said that it is the batch
    distinct = {size for index, size in sizes.items() if size != 1 or index in wanted}
    if len(distinct) > 1:
        names = named()
        shown, lists = _disagreement({names[index][1]: size for index, size in sizes.items()})
        which = "dimension 0, or as batch_dims says" if wanted else "dimension 0"
        raise InputError(
            f"the inputs disagree about the batch size ({which}): {shown}; give tensors of one "
            "batch size, or of size 1 where every sample shares them, or say which dimension is "
            f"the batch, as with batch_dims={{'x': 1, 'table': None}}{lists}"
        )
    return distinct.pop() if distinct else 1


def _disagreement(sizes: Mapping[str, int]) -> tuple[str, str]:
    """Which inputs have which size; of many one each, and what to do about lists."""
    if len(sizes) <= 8:
        return ", ".join(f"{name} has {size}" for name, size in sizes.items()), ""
    first = {size: name for name, size in reversed([*sizes.items()])}
    few = [f"{name} has {size}" for name, size in sizes.items() if first[size] == name]
    return f"{', '.join(few)}, …", (
        "; instead of a list with an entry for each sample, give tensors: pad the entries, stack "
        "them, and give their lengths, too"
    )


def check_surroundings(*, step: bool) -> None:
    """Check that new tensors would have data, and that a step has gradients. Raises InputError."""
    if torch.get_default_device().type == "meta":
        raise InputError(
            'torch\'s default device is "meta" here, so that what is computed would have no data; '
            'leave the block of torch.device("meta") once the model is built'
        )
    if step and torch.is_inference_mode_enabled():
        raise InputError(
            "a step computes gradients, which torch.inference_mode() forbids; leave that block, or "
            "call pipe(x) there"
        )


def check_gradients() -> None:
    """Check that a step may compute gradients. Raises InputError."""
    if not torch.is_grad_enabled():
        raise InputError(
            "a step computes gradients, which torch.no_grad() turns off here; leave that block, or "
            "call pipe(x) there"
        )
