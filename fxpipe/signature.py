"""The signature of a pipe's ``forward``, which frameworks look at."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from fxpipe.saving import Saved


class SignedLikeTheModel:
    """Decorates a pipe's ``forward`` so that it shows the signature of the model's own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, pipe: Saved | None, owner: type[Saved]) -> Any:
        if pipe is None:
            return self._function

        @functools.wraps(self._function)
        def forward(pipe: Saved, *args: Any, **kwargs: Any) -> Any:
            return self._function(pipe, *args, **kwargs)

        own = inspect.signature(pipe._model.forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = own.replace(parameters=[first, *own.parameters.values()])
        vars(forward)["__signature__"] = signature
        return MethodType(forward, pipe)
