"""A method with the signature of another one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


class SignedLikeTheModel:
    """Decorates a pipe's ``forward`` with the signature of the model's ``forward``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, pipe: Any | None, owner: type) -> Any:
        if pipe is None:
            return self._function

        @functools.wraps(self._function)
        def forward(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            return self._function(pipe, *args, **kwargs)

        models = inspect.signature(pipe._model.forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = models.replace(parameters=[first, *models.parameters.values()])
        vars(forward)["__signature__"] = signature
        return MethodType(forward, pipe)
