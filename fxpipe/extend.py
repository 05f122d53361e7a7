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
    from fxpipe.passes.partition.work import Partitioner
    from fxpipe.passes.runner import Pass
    from fxpipe.passes.tracing.tracer import Fallback
    from fxpipe.runtime.choice import ThreadChoice
    from fxpipe.runtime.transport import MakeTransport

Door = Literal[
    "public",
    "extension",
    "instruction",
    "schedule",
    "recipe",
    "view",
    "command",
    "option",
]
"""What a name is for:

- public: an attribute of ``fxpipe``.
- extension: a name for ``compile(..., extensions=[...])``; what it means is called without
  arguments, and returns an ``Extension``.
- instruction: an opcode of programs, whose class derives from ``ins.Move``, ``ins.Compute`` or
  ``ins.OncePerStep`` of ``fxpipe.ir.instruction``.
- schedule: a name for ``compile(..., schedule=)`` whose schedule is chosen at the first step; what
  it means is called without arguments, and returns a ``LateSchedule``.
- recipe: the name of a schedule of the library, and its ``Recipe``.
- view: a method of a class of the core, such as ``Schedule.draw``.
- option: a function that the core calls for an option or a method that few need, such as
  "table" for what ``print(pipe)`` shows.
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
        "reduce_scatter": f"{_HERE}.replicas.opcodes:ReduceScatter",
        "all_gather": f"{_HERE}.replicas.opcodes:AllGather",
        "gather_weights": f"{_HERE}.replicas.opcodes:GatherWeights",
        "share": f"{_HERE}.copies.opcodes:Share",
        "give": f"{_HERE}.copies.opcodes:Give",
        "add": f"{_HERE}.copies.opcodes:Add",
    },
    "public": {
        "Comparison": f"{_HERE}.comparison.comparison:Comparison",
        "CudaGraphs": f"{_HERE}.cuda_graphs.capturing:CudaGraphs",
        "DeferredBatchNorm": f"{_HERE}.deferred_batchnorm.defer_batchnorm:DeferredBatchNorm",
        "Dispatch": f"{_HERE}.dispatch.extension:Dispatch",
        "Inductor": f"{_HERE}.inductor.compile_stages:Inductor",
        "LeafModules": f"{_HERE}.leaf_modules.extension:LeafModules",
        "LossWeight": f"{_HERE}.loss_weight.extension:LossWeight",
        "Offload": f"{_HERE}.offload.add_offload:Offload",
        "Replicas": f"{_HERE}.replicas.extension:Replicas",
        "Slices": f"{_HERE}.slices.extension:Slices",
        "compare": f"{_HERE}.comparison.comparison:compare",
        "list_schedule": f"{_HERE}.list_schedules.listed:list_schedule",
        "rejoin": f"{_HERE}.ranks.rejoin:rejoin",
        "search_schedule": f"{_HERE}.search.search:search_schedule",
    },
    "schedule": {
        "auto": f"{_HERE}.planner.auto:Auto",
        "auto-2bw": f"{_HERE}.planner.auto:AutoTwoBW",
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
    "option": {
        "add_clip": f"{_HERE}.clipping.opcodes:add_clip",
        "add_reduce": f"{_HERE}.replicas.lowering:add_reduce",
        "any_size": f"{_HERE}.any_size.graphs:AnySizeGraphs",
        "partitioner": f"{_HERE}.exact_cut.solve:ExactCut",
        "call": f"{_HERE}.differentiable.call:differentiable_call",
        "clipping": f"{_HERE}.clipping.clipping:Clipping",
        "check_copies": f"{_HERE}.copies.lowering:check_copies",
        "check": f"{_HERE}.model_check.checking:Checking",
        "commit_moments": f"{_HERE}.deferred_batchnorm.moments:commit",
        "merged_moments": f"{_HERE}.deferred_batchnorm.moments:merged_moments",
        "counting": f"{_HERE}.leaf_modules.counting:Counting",
        "coupled": f"{_HERE}.coupled_updates.coupled:warn_if_coupled",
        "delays": f"{_HERE}.overlapping.delays:too_small",
        "end_with_flush": f"{_HERE}.overlapping.delays:end_with_flush",
        "fallback": f"{_HERE}.leaf_modules.extension:LeafModules",
        "fitting": f"{_HERE}.planner.fitting:fitting_advice",
        "footprint": f"{_HERE}.memory_limits.footprint:estimate_footprint",
        "memory_budget": f"{_HERE}.memory_limits.budget:MemoryBudget",
        "guard": f"{_HERE}.python_state.state_guard:StateGuard",
        "copies_faults": f"{_HERE}.copies.rules:copies_faults",
        "run_together": f"{_HERE}.copies.rules:run_together",
        "kept": f"{_HERE}.inductor.libraries:kept",
        "offload": f"{_HERE}.offload.lowering:LowerOffload",
        "mesh": f"{_HERE}.ranks.mesh:ranks_of",
        "peaks": f"{_HERE}.simulator.pipe:peaks",
        "rank_streams": f"{_HERE}.ranks.streams:StreamRanks",
        "place_devices": f"{_HERE}.streams.place_devices:place_devices",
        "refuse_copied": f"{_HERE}.copies.lowering:refuse_copied",
        "overlap": f"{_HERE}.overlapping.step:step",
        "owners": f"{_HERE}.replicas.opcodes:owners",
        "part_of": f"{_HERE}.replicas.opcodes:part_of",
        "part_gradients": f"{_HERE}.replicas.buckets:into_buckets",
        "collectives": f"{_HERE}.replicas.collectives:Collectives",
        "metrics": f"{_HERE}.metrics.meter:metrics",
        "sum_copies": f"{_HERE}.copies.lowering:SumCopies",
        "sum_replicas": f"{_HERE}.replicas.lowering:SumReplicas",
        "table": f"{_HERE}.stage_table.table:stage_table",
        "events": f"{_HERE}.streams.events:Streams",
        "unordered": f"{_HERE}.streams.clocks:unordered",
        "seconds": f"{_HERE}.simulator.pipe:task_seconds",
        "streams": f"{_HERE}.streams.launching:backend",
        "weighing": f"{_HERE}.loss_weight.weighing:ByDivisors",
    },
    "command": {
        "main": f"{_HERE}.cli:main",
    },
}
"""Door → name → "module:attribute", or the function itself."""

Kernels = Callable[["Sequence[Kernel]", "Plan", "Schedule", "Program"], "Sequence[Kernel]"]
"""The kernels of a plan's stages, with the plan, the schedule and the program that runs them → the
kernels that run in their place."""

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


def option(name: str, otherwise: Any = None) -> Any:
    """What the door "option" knows by a name, or ``otherwise`` where its extension is not there."""
    return find("option", name) if there("option", name) else otherwise


def _package(target: str) -> str:
    """The extension that has a target: a folder of ``fxpipe/extensions``, or somebody's package."""
    parts = target.partition(":")[0].split(".")
    return ".".join(parts[:3] if target.startswith(f"{_HERE}.") else parts[:1])


class MissingView(InputError, AttributeError):
    """A view whose extension is not there, so that ``hasattr`` is False."""


class View(Generic[_S, _P, _R]):
    """A method of a class that an extension has: ``draw = View("package.module:function", …)`` in
    the body of ``Schedule`` is what the door "view" knows as "Schedule.draw", imported when it is
    first read. Reading it raises MissingView where the extension is not there.

    Args:
        target: the function, as the door takes it.
        of: returns it; never called, but type checkers read its arguments.
    """

    def __init__(
        self,
        target: str | Callable[Concatenate[_S, _P], _R],
        of: Callable[[], Callable[Concatenate[_S, _P], _R]] | None = None,
    ) -> None:
        self._target, self._name = target, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{owner.__name__}.{name}"
        register("view", self._name, self._target)

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
        made: View[Any, ..., Any] = View(function)
        made.__set_name__(cls, name)
        setattr(cls, name, made)
        return function

    return put


class LateSchedule:
    """What ``compile(..., schedule=)`` takes for a schedule that is chosen at the first step. One
    object may serve several pipes."""

    def start(self) -> tuple[Recipe, Callable[[Options, ThreadChoice], Compiler]]:
        """For a new pipe: the recipe for whatever is compiled before the first step, and a function
        that makes the compiler, which decides when it sees a batch."""
        raise NotImplementedError


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

    def fallback(self, options: Options) -> Fallback | None:
        """What decides about lines that cannot be traced, or None. Called once for a pipe."""
        return None

    def transport(self) -> MakeTransport | None:
        """What carries values from rank to rank in place of fxpipe's transport, or None. Not asked
        where one process runs all devices, which hands them over by reference."""
        return None
