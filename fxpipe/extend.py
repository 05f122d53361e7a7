"""The doors: what the core finds by a name, and the module that has it.

An extension is a folder of ``fxpipe/extensions``. The core imports none. It asks for a name here,
which is imported when it is first used. docs/extensions.md shows each door in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    overload,
)

from fxpipe.errors import InputError, near

if TYPE_CHECKING:
    from fxpipe.compiler.compiler import Compiler
    from fxpipe.compiler.options import Options
    from fxpipe.ir.plan import Plan
    from fxpipe.ir.program import Program
    from fxpipe.ir.recipe import Recipe
    from fxpipe.ir.schedule import Schedule
    from fxpipe.kernels.kernel import Kernel
    from fxpipe.passes.partition.solve import Partitioner
    from fxpipe.passes.runner import Pass
    from fxpipe.runtime.choice import ThreadChoice

Door = Literal[
    "public",
    "extension",
    "instruction",
    "schedule",
    "recipe",
    "view",
    "command",
    "part",
]
"""What a name is for:

- public: an attribute of ``fxpipe``.
- extension: a name for ``compile(..., extensions=[...])``; what it means is called without
  arguments, and returns an ``Extension``.
- instruction: an opcode of programs, whose class derives from ``ins.Move``, ``ins.Compute`` or
  ``ins.OncePerStep`` of ``fxpipe.ir.instruction``.
- schedule: a name for ``compile(..., schedule=)`` whose schedule is chosen at the first step: a
  ``LateSchedule``.
- recipe: the name of a schedule of the library, and its ``Recipe``.
- view: a method of a class of the core, such as ``Schedule.draw``.
- part: what the core, or another extension, asks for where an option or a method needs it, such as
  "table" for what ``print(pipe)`` shows: an attribute of ``fxpipe.parts.Parts``.
- command: what adds a command to the command line, and "main", which runs it.
"""

_HERE = "fxpipe.extensions"

_REGISTRY: dict[Door, dict[str, str | Callable[..., Any]]] = {
    "extension": {
        "cuda_graphs": f"{_HERE}.cuda_graphs.capturing:CudaGraphs",
        "deferred_batchnorm": f"{_HERE}.deferred_batchnorm.defer_batchnorm:DeferredBatchNorm",
        "inductor": f"{_HERE}.inductor.compile_stages:Inductor",
        "offload": f"{_HERE}.offload.add_offload:Offload",
    },
    "instruction": {
        "offload": f"{_HERE}.offload.opcodes:Offload",
        "prefetch": f"{_HERE}.offload.opcodes:Prefetch",
        "await": f"{_HERE}.offload.opcodes:Await",
        "norm": f"{_HERE}.clipping.opcodes:Norm",
        "clip": f"{_HERE}.clipping.opcodes:Clip",
        "partial_backward": f"{_HERE}.replicas.opcodes:PartialBackward",
        "rest_backward": f"{_HERE}.replicas.opcodes:RestOfBackward",
        "rest_weight_grad": f"{_HERE}.replicas.opcodes:RestOfWeightGrad",
        "reduce_scatter": f"{_HERE}.replicas.opcodes:ReduceScatter",
        "all_gather": f"{_HERE}.replicas.opcodes:AllGather",
        "gather_weights": f"{_HERE}.replicas.opcodes:GatherWeights",
        "gather_shards": f"{_HERE}.sharding.opcodes:GatherShards",
        "await_shards": f"{_HERE}.sharding.opcodes:AwaitShards",
        "drop_shards": f"{_HERE}.sharding.opcodes:DropShards",
        "partial_to_owners": f"{_HERE}.sharding.opcodes:PartialToOwners",
        "reduce_to_owners": f"{_HERE}.sharding.opcodes:ReduceToOwners",
        "await_sums": f"{_HERE}.sharding.opcodes:AwaitSums",
        "share_norms": f"{_HERE}.sharding.opcodes:ShareNorms",
        "update_shards": f"{_HERE}.sharding.opcodes:UpdateShards",
        "column_norm": f"{_HERE}.tensor_parallel.norms:ColumnNorm",
        "run": f"{_HERE}.own_tasks.opcodes:Run",
        "run_each": f"{_HERE}.own_tasks.opcodes:RunEach",
        "share": f"{_HERE}.copies.opcodes:Share",
        "give": f"{_HERE}.copies.opcodes:Give",
        "add": f"{_HERE}.copies.opcodes:Add",
    },
    "public": {
        "Comparison": f"{_HERE}.comparison.comparison:Comparison",
        "CudaGraphs": f"{_HERE}.cuda_graphs.capturing:CudaGraphs",
        "Cluster": f"{_HERE}.paper.cluster:Cluster",
        "DeferredBatchNorm": f"{_HERE}.deferred_batchnorm.defer_batchnorm:DeferredBatchNorm",
        "Device": f"{_HERE}.paper.device:Device",
        "Dispatch": f"{_HERE}.dispatch.extension:Dispatch",
        "Inductor": f"{_HERE}.inductor.compile_stages:Inductor",
        "Link": f"{_HERE}.simulator:Link",
        "LossWeight": f"{_HERE}.loss_weight.weight:LossWeight",
        "Offload": f"{_HERE}.offload.add_offload:Offload",
        "Replicas": f"{_HERE}.replicas.extension:Replicas",
        "Sizes": f"{_HERE}.simulator:Sizes",
        "TaskContext": f"{_HERE}.own_tasks.opcodes:TaskContext",
        "Sharding": f"{_HERE}.sharding.extension:Sharding",
        "Slices": f"{_HERE}.slices.extension:Slices",
        "Time": f"{_HERE}.simulator:Time",
        "compare": f"{_HERE}.comparison.comparison:compare",
        "define_task": f"{_HERE}.own_tasks.define:define_task",
        "list_schedule": f"{_HERE}.list_schedules.listed:list_schedule",
        "plan": f"{_HERE}.paper.plan:plan",
        "rejoin": f"{_HERE}.ranks.rejoin:rejoin",
        "search_schedule": f"{_HERE}.search.search:search_schedule",
        "watch": f"{_HERE}.watch.watch:Watched",
    },
    "schedule": {
        "auto": f"{_HERE}.planner.auto:auto_schedule",
        "auto-2bw": f"{_HERE}.planner.auto:auto_two_bw",
    },
    "recipe": {
        "1f1b-async": f"{_HERE}.overlapping.one_f_one_b_async:one_f_one_b_async",
        "2bw": f"{_HERE}.overlapping.one_f_one_b_async:two_bw",
        "chimera": f"{_HERE}.copies.chimera:chimera",
        "dualpipe-v": f"{_HERE}.more_schedules.dualpipe_v:dualpipe_v",
        "hanayo": f"{_HERE}.list_schedules.planned:hanayo",
        "interleaved-zb": f"{_HERE}.list_schedules.planned:interleaved_zb",
        "pipedream": f"{_HERE}.overlapping.one_f_one_b_async:pipedream",
        "v-half": f"{_HERE}.more_schedules.controllable_memory:v_half",
        "v-min": f"{_HERE}.more_schedules.controllable_memory:v_min",
    },
    "view": {},  # by ``fxpipe.views``
    "part": {},  # by ``fxpipe.parts``
    "command": {
        "main": f"{_HERE}.cli:main",
        "explore": f"{_HERE}.explore.command:add_explore",
        "plan": f"{_HERE}.paper.command:add_plan",
    },
}
"""Door → name → "module:attribute", or the function itself."""

Kernels = Callable[["Sequence[Kernel]", "Plan", "Schedule", "Program"], "Sequence[Kernel]"]
"""The kernels of a plan's stages, with the plan, the schedule and the program that runs them → the
kernels that run in their place."""

LateSchedule = Callable[[], "tuple[Recipe, Callable[[Options, ThreadChoice], Compiler]]"]
"""Is called for each pipe, and gives the recipe for whatever is compiled before the first step, and
what makes the compiler, which decides when it sees a batch."""

_T = TypeVar("_T", bound=Callable[..., Any])
_S = TypeVar("_S")
_R = TypeVar("_R")
_P = ParamSpec("_P")


def register(door: Door, name: str, target: str | Callable[..., Any]) -> None:
    """Give a name to something of your own.

    Args:
        door: what the name is for.
        name: a new name, or one whose meaning changes from now on.
        target: a function or class, or "package.module:attribute", which is imported when the name
            is first used.

    Raises:
        InputError: there is no such door, or the target is neither.
    """
    if door not in _REGISTRY:
        raise InputError(f"there is no door {door!r}: {near(str(door), get_args(Door))}")
    if not callable(target) and not (isinstance(target, str) and target.count(":") == 1):
        raise InputError(
            f'the target of {name!r} is {target!r}; give a function, or "package.module:attribute"'
        )
    _REGISTRY[door][name] = target


def names(door: Door) -> tuple[str, ...]:
    """The names that a door knows, whether their extensions are there or not."""
    return tuple(_REGISTRY[door])


def there(door: Door, name: str) -> bool:
    """Whether a door knows a name, and the extension that has it is there. Imports nothing of the
    extension but the packages around it."""
    target = _REGISTRY[door].get(name)
    if not isinstance(target, str):
        return target is not None
    try:
        return find_spec(_package(target)) is not None
    except ModuleNotFoundError:
        return False


class MissingExtension(InputError, ImportError):
    """The extension of a name that was asked for is not there."""


def find(door: Door, name: str, what: str = "") -> Any:
    """Import what a name means.

    Args:
        what: the text in the error before "needs the extension"; by default the name.

    Raises:
        InputError: the door does not know the name.
        MissingExtension: the extension that has it is not there.
    """
    try:
        target = _REGISTRY[door][name]
    except KeyError:
        raise InputError(f"there is no {door} {name!r}: {near(name, _REGISTRY[door])}") from None
    if not isinstance(target, str):
        return target
    module, attribute = target.split(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        package, lost = _package(target), f"{error.name}."
        if not (lost.startswith((f"{package}.", f"{_HERE}.")) or f"{package}.".startswith(lost)):
            raise
        missing = _package(lost[:-1]) if lost.startswith(f"{_HERE}.") else package
        raise MissingExtension(
            f"{what or name} needs the extension {missing}, which is not there; install fxpipe "
            "with it"
        ) from error


class Part(Generic[_R]):
    """What an extension has for the core, or for another extension, under a name: in the body of
    ``Parts``, ``table = Part("extension.module:function", …)``.

    Args:
        target: what it is: a module in ``fxpipe/extensions``, and its attribute.
        of: returns it; never called, but type checkers read its type.
    """

    def __init__(self, target: str, of: Callable[[], _R]) -> None:
        self._target, self._name = f"{_HERE}.{target}", ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        register("part", name, self._target)

    @property
    def there(self) -> bool:
        """Whether the extension that has it is there. Imports nothing of it."""
        return there("part", self._name)

    def find(self, what: str = "") -> _R:
        """Import it. Raises MissingExtension, which says that ``what`` needs it, where its
        extension is not there."""
        found: _R = find("part", self._name, what)
        return found

    def get(self) -> _R | None:
        """Import it; None where its extension is not there."""
        return self.find() if self.there else None


def _package(target: str) -> str:
    """The extension that has a target: a folder of ``fxpipe/extensions``, or somebody's package."""
    parts = target.partition(":")[0].split(".")
    return ".".join(parts[:3] if target.startswith(f"{_HERE}.") else parts[:1])


class MissingView(InputError, AttributeError):
    """A view whose extension is not there, so that ``hasattr`` is False."""


class View(Generic[_S, _P, _R]):
    """A method of a class that an extension has: what the door "view" knows as "Schedule.draw" is
    the ``draw`` of ``Schedule``, imported when it is first read. Reading it raises MissingView
    where the extension is not there.

    Args:
        name: the class and the method.
        target: the function, or a module in ``fxpipe/extensions`` and its attribute.
        of: returns it; never called, but type checkers read its arguments.
    """

    def __init__(
        self,
        name: str,
        target: str | Callable[Concatenate[_S, _P], _R],
        of: Callable[[], Callable[Concatenate[_S, _P], _R]] | None = None,
    ) -> None:
        self._name = name
        register("view", name, f"{_HERE}.{target}" if isinstance(target, str) else target)

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[_S, _P], _R]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Callable[_P, _R]: ...

    def __get__(self, instance: object | None, owner: type) -> Callable[..., _R]:
        try:
            function: Callable[..., _R] = find("view", self._name, f"{self._name}()")
        except InputError as error:
            raise MissingView(*error.args) from error
        return function if instance is None else MethodType(function, instance)


def view(cls: type, name: str) -> Callable[[_T], _T]:
    """Make a function a method of a class of the core: ``@view(Schedule, "idle")``.

    Raises:
        InputError: the class has another attribute of this name.
    """

    def put(function: _T) -> _T:
        taken = hasattr(cls, name) or name in getattr(cls, "__dataclass_fields__", ())
        if taken and not isinstance(vars(cls).get(name), View):
            raise InputError(
                f"{cls.__name__} has an attribute {name!r} already; give the view another name"
            )
        setattr(cls, name, View(f"{cls.__name__}.{name}", function))
        return function

    return put


class Extension:
    """What ``compile(..., extensions=[...])`` takes. All that a subclass leaves out does nothing.

    Its ``repr`` has to be the same on all ranks, as that of a dataclass is. One object may serve
    several pipes.

    Attributes:
        holds_saved: whether stages keep what their backwards read in memory of the extension's own,
            so that nothing of it can be offloaded.
        given: whether it is asked for; ``compile`` has some by itself.
        slices: whether it runs sequences in slices, for a schedule that has some.
    """

    holds_saved: bool = False
    given: bool = True
    slices: bool = False

    def options(self, options: Options) -> Options:
        """The options of a pipe, with those that this sets. Called before any ``check``.

        Raises:
            InputError: it cannot work with these options.
        """
        return options

    def check(self, options: Options) -> None:
        """Raise InputError if this cannot work with these options."""

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """Passes of its own: name of a list in ``fxpipe.compiler.passes.LISTS`` → passes, each with
        the name of the pass that it comes right after, or "" if it comes first."""
        return {}

    def kernels(self) -> Kernels | None:
        """What puts kernels of its own around those of a pipe, or None. Called once for a pipe."""
        return None

    def partitioner(self) -> Partitioner | None:
        """What divides a model's operations among the stages, or None."""
        return None

    def transport(self) -> Callable[..., Any] | None:
        """A ``MakeTransport`` of ``fxpipe/extensions/ranks/transport.py``: what carries values from
        rank to rank in place of fxpipe's transport. Or None. Not asked where one process runs all
        devices, which hands them over by reference."""
        return None
