"""Refuse models that change Python state while they run: attributes or random generators.

A graph computes tensors from tensors. A counter or a list would silently keep the value that it had
when the model was traced, and a number drawn from Python's or NumPy's generator would never change.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compiler.unread import unread
from fxpipe.errors import TraceError, way_out
from fxpipe.log import LOGGER
from fxpipe.torchtools.state import OF_EACH, other_states

Key = tuple[str, str]
"""A module and its attribute or buffer, by their names; or GENERATOR and the name of one."""

GENERATOR = "a generator"


def refuse_changes(
    model: nn.Module, leaves: Collection[str], run: Callable[[], Any], passing: set[Key]
) -> Any:
    """Run a model, and check that it changes nothing that a graph cannot hold; returns the result
    of ``run``. Leaf modules may change their own attributes.

    What only the first run sets, such as a table that is made when it is first needed, does not
    count as changed. Nor do attributes that each call sets before it reads them: ``passing`` are
    those of earlier kinds of calls, and gets those of this one.

    Raises:
        TraceError: the model changes an attribute, or draws from Python's or NumPy's random
            generator; names the attribute or the generator.
    """
    watch = _Watch(model, leaves)
    before, drawn = watch.look(), torch.get_rng_state()
    output = run()
    after = watch.look()
    changed: list[Key] = []
    if any(_differ(now, before.get(key)) for key, now in after.items()):
        torch.set_rng_state(drawn)
        run()
        changed = [
            key
            for key, now in watch.look().items()
            if _differ(now, after.get(key)) and _differ(after.get(key), before.get(key))
        ]
    if changed or passing:
        if (key := watch.left_over(changed, passing, run)) is not None:
            raise watch.refusal(key, key in changed)
        if new := [key for key in changed if key not in passing]:
            watch.tell(new)
        passing.update(changed)
    return output


class _Watch:
    """Looks at Python state: Python's and NumPy's random generators, the attributes of modules,
    except for leaf modules, and the buffers that modules do not have yet, which are not put back
    after a trial run. Of PyTorch's own modules these are the attributes that are tensors, which
    hooks set in every call, such as those of weight norms and of pruning."""

    def __init__(self, model: nn.Module, leaves: Collection[str]) -> None:
        self._model, self._modules = model, dict(model.named_modules())
        self._watched = {
            path: module
            for path, module in self._modules.items()
            if not any(path == leaf or path.startswith(f"{leaf}.") for leaf in leaves)
        }
        self._filled = {
            (path, name)
            for path, module in self._modules.items()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def look(self) -> dict[Key, tuple[Any, Any]]:
        """Each value, and what there is to compare of its content."""
        seen: dict[Key, tuple[Any, Any]] = {
            (path, name): (value, _content(value))
            for path, module in self._watched.items()
            for name, value in vars(module).items()
            if name not in OF_EACH and (isinstance(value, Tensor) or not _is_torchs(module))
        }
        for path, module in self._modules.items():
            for name, buffer in module._buffers.items():
                if (path, name) not in self._filled:
                    seen[path, name] = buffer, None if buffer is None else buffer._version
        return seen | {(GENERATOR, name): (None, state) for name, state in other_states().items()}

    def left_over(
        self, changed: Sequence[Key], passing: Collection[Key], run: Callable[[], Any]
    ) -> Key | None:
        """One of these attributes that a call reads before it sets it, and so as an earlier call
        has left it; or one among ``changed`` that it does not set. Found by a run with what cannot
        be read in their place. Of a dict or list that each call fills, these are its items."""
        keys = [*dict.fromkeys((*changed, *passing))]
        spaces = {key: self._space(key) for key in keys}
        for key in keys:
            if key[1] not in spaces[key]:
                if key in changed:
                    return key
                del spaces[key]
        before = {key: space[key[1]] for key, space in spaces.items()}
        read: list[Key] = []
        others = {key: _stand_in(x, partial(read.append, key)) for key, x in before.items()}
        unset = {key: {*map(id, _parts(other))} for key, other in others.items()}
        for key, space in spaces.items():
            space[key[1]] = others[key]
        try:
            run()
        except Exception:  # most likely as something was read
            read = read or keys
        finally:
            now = {key: {*map(id, _parts(space.get(key[1])))} for key, space in spaces.items()}
            for key, space in spaces.items():
                space[key[1]] = before[key]
        return next(iter([*read, *(key for key in changed if now[key] & unset[key])]), None)

    def _space(self, key: Key) -> dict[str, Any]:
        """The attributes of a module; a generator's state is none."""
        return self._modules[key[0]].__dict__ if key[0] != GENERATOR else {}

    def tell(self, keys: Sequence[Key]) -> None:
        """Warn that steps do not set these attributes, unless nobody expects it: what computes
        with PyTorch's own modules elsewhere sets those anew."""
        owners = [(self._modules[path], name) for path, name in keys]
        names = sorted({f"{type(x).__name__}.{name}" for x, name in owners if not _is_torchs(x)})
        if not names:
            return
        LOGGER.warning(
            "%s sets %s in every call, which graphs do not do: what reads it outside of forward "
            "and loss sees the value of a trial run. Return it from forward to read it there",
            type(self._model).__name__,
            ", ".join(names),
        )

    def refusal(self, key: Key, changed: bool) -> TraceError:
        """The error for what every run changes, or else for what only other calls set."""
        path, name = key
        if path == GENERATOR:
            return self._error(
                f"a line that draws from {name} (the trace would not be deterministic)",
                "draw with torch.rand, and choose with torch.where, or leave it out, as "
                "apply_spec_augment=False does in models of speech of transformers",
            )
        owner = type(self._modules[path]).__name__
        if not changed:
            return self._error(
                f"{owner}.{name} (it is read before it is set, and calls of another mode or kind "
                "set it, which graphs do not do)",
                f"set {name} in every call, or return it from forward to what reads it",
            )
        if name in self._modules[path]._buffers:
            return self._error(
                f"{owner}.{name} (a buffer that is made by the first call: every call changes "
                f"{owner}.{name}, also those that only trace)",
                f"let the constructor make it: register_buffer({name!r}, torch.zeros(...)), which "
                "forward writes in place; or run the model once before compile: model(example)",
            )
        cure = f"keep {name} in a buffer (register_buffer) that is written in place, or "
        if isinstance(vars(self._modules[path]).get(name), Tensor):
            cure = (
                f"return {name} from forward to what reads it; if that is no part of the loss, "
                f"{cure}if the model itself does not read it, "
            )
        return self._error(
            f"{owner}.{name} (a mutation of Python state: every call changes {owner}.{name}, which "
            "in a graph would stay as it is)",
            f"{cure}{way_out(path)}",
        )

    def _error(self, where: str, cure: str) -> TraceError:
        kind = type(self._model).__name__
        return TraceError(f"{kind} cannot be traced at {where}; {cure}", where)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _stand_in(value: Any, note: Callable[[], None]) -> Any:
    """What cannot be read, in place of a value; of a dict or list, one whose items cannot."""
    if type(value) is dict:
        return {key: _stand_in(item, note) for key, item in value.items()}
    if type(value) is list:
        return [_stand_in(item, note) for item in value]
    return unread(value, note)


def _parts(value: Any) -> list[Any]:
    """The items of a dict or list, and of those inside; of anything else, itself."""
    if type(value) is dict:
        value = [*value.values()]
    return [part for item in value for part in _parts(item)] if type(value) is list else [value]


def _content(value: Any) -> Any:
    """What there is to compare of a value besides its identity."""
    if isinstance(value, int | float | complex | str | bytes | frozenset):
        return type(value), value
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, set):
        return set(value)
    if type(value).__module__.partition(".")[0] in ("numpy", "random"):
        return pickle.dumps(value)  # an array or a generator
    return [*map(id, value)] if isinstance(value, list | deque) else None


def _differ(new: tuple[Any, Any] | None, old: tuple[Any, Any] | None) -> bool:
    """Whether state is not as it was; tensors and other objects are compared by identity."""
    if new is None or old is None:
        return new is not old
    a, b = new[1], old[1]
    return bool(a != b if isinstance(a, tuple | bytes) else new[0] is not old[0] or a != b)
