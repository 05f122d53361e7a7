"""``generate`` of transformers over the stages of a pipe.

transformers' own loop runs: it samples, searches beams, stops and streams. Only the forward of the
model is that of the pipe, and the caches are buffers that each stage keeps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline

ROOM = 64
"""Caches have room for a multiple of so many tokens, so that other lengths need no other graph."""

NAME = "fxpipe_caches"
"""The submodule of the model that has the caches while it generates."""

CURE = (
    "give the weights to a model of one device: let every rank call pipe.save_hub(folder), and one "
    "of them generate(...) of from_pretrained(folder)"
)

_REFUSED = ("past_key_values", "cache_implementation", "assistant_model", "inputs_embeds")

_known: WeakKeyDictionary[Pipeline, dict[tuple[int, int], Any]] = WeakKeyDictionary()
"""Pipe → rows and length → caches."""


def over_stages(pipe: Pipeline, name: str) -> Callable[..., Any] | None:
    """``generate`` over the stages, if the model's method of this name is that of transformers."""
    own = getattr(getattr(type(pipe._model), name, None), "__module__", "")
    theirs = name == "generate" and own == "transformers.generation.utils"
    return functools.partial(generate, pipe) if theirs else None


@locked
@torch.inference_mode(False)
@torch.no_grad()
def generate(
    pipe: Pipeline, /, inputs: Tensor | None = None, generation_config: Any = None, **options: Any
) -> Any:
    """Generate tokens as the model's own ``generate`` does, with each stage on its device.

    Every rank calls it with the same arguments, and gets the same tokens; they draw as the first
    rank does. The model is in eval mode meanwhile. The first call of a kind compiles a graph for
    prompts and one for single tokens.

    Args:
        inputs: tokens of shape (batch, length); or ``input_ids=``.
        generation_config: as for the model's ``generate``.
        **options: the same; here or there, ``max_new_tokens`` or ``max_length`` has to say for how
            many tokens the caches have room.

    Raises:
        InputError: an option needs other caches, neither length is given, or the model keeps
            something else than keys and values of attention.
    """
    from fxpipe.extensions.generation.caches import Caches, StageCache, states_of

    model: Any = pipe._model
    ids = options.pop("input_ids", None) if inputs is None else inputs
    if refused := [name for name in _REFUSED if options.get(name) is not None]:
        raise InputError(f"{refused[0]} cannot be given over stages; leave it out, or {CURE}")
    parts = getattr(pipe._group, "columns", {})
    if not isinstance(ids, Tensor) or ids.dim() != 2 or model.config.is_encoder_decoder or parts:
        raise InputError(
            "over stages, generate takes tokens of shape (batch, length), models without an "
            f"encoder, and stages that are not divided; {CURE}"
        )
    given: Any = {**vars(generation_config or model.generation_config), **options}
    new, length = given.get("max_new_tokens"), given.get("max_length")
    if new is None and length is None:
        raise InputError("give max_new_tokens, for which the caches of the stages are to have room")
    length = length if new is None else ids.shape[1] + new
    rows = len(ids) * max(given.get(n) or 1 for n in ("num_beams", "num_return_sequences"))
    if pipe._calls.shown is None:
        pipe.prepare(input_ids=ids)  # else what is shown would have caches that are gone
    known, key = _known.setdefault(pipe, {}), (rows, -(-length // ROOM) * ROOM)
    if key not in known:
        known[key] = Caches(states_of(model), *key)
    caches, start = known[key], torch.zeros(1, dtype=torch.long)
    cache = StageCache(caches, torch.arange(rows), 0)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *, input_ids: Tensor, **arguments: Any) -> Any:
        inner = StageCache(caches, cache.rows, start + cache.start)
        arguments |= {"past_key_values": inner, "use_cache": False}  # it is not an output
        output = pipe(input_ids=input_ids, **arguments)
        cache.held = cache.held or _held(pipe)
        cache.start += input_ids.shape[1]
        output["past_key_values"] = cache
        return output

    staged = copy.copy(model)  # on which the loop runs; it has no tensors of its own
    names = {"forward": forward, "device": property(lambda self: ids.device)}
    staged.__class__ = type(type(model).__name__, (type(model),), names)
    options |= {"past_key_values": cache, "use_cache": True, "disable_compile": True}
    with _prepared(pipe, caches):
        return staged.generate(ids, generation_config, cache_implementation=None, **options)


@contextmanager
def _prepared(pipe: Pipeline, caches: Any) -> Iterator[None]:
    """Inside, the model has the caches and is in eval mode, and all ranks draw the same numbers.
    Then all is as before."""
    model, guard, group = pipe._model, pipe._compiler._guard, pipe._group
    number, modes = guard.present(), {m: m.training for m in model.modules()}
    with torch.random.fork_rng(devices=(), enabled=group.size > 1):
        try:
            if group.size > 1:
                seed = int(torch.randint(2**62, ()))
                with group.calling("generate"):
                    torch.manual_seed(group.share("the seed of generate", lambda: seed))
            pipe.eval()
            caches.fill()
            model.add_module(NAME, caches)
            yield
        finally:
            model._modules.pop(NAME, None)
            caches._buffers.clear()
            for module, mode in modes.items():
                module.training = mode
            guard.back_to(number)  # else the next step would be traced anew


def _held(pipe: Pipeline) -> list[Tensor]:
    """The caches of the stages of this process, in the call that ran last."""
    compiled: Any = pipe._calls.filled
    own = filter(pipe._options.owns, range(len(compiled.plan.stages)))
    names = frozenset[str]().union(*map(compiled.names, own))
    return [each for n, each in pipe._model.named_buffers() if n in names and n.startswith(NAME)]
