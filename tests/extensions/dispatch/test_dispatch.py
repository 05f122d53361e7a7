"""One thread or a thread for each device runs the lists, as is asked."""

from __future__ import annotations

from typing import Any

import pytest

import fxpipe
from fxpipe.errors import InputError
from fxpipe.runtime import choice
from fxpipe.runtime.choice import Dispatches
from tests.helpers.tiny import adam, batch, pipe_of


@pytest.mark.parametrize(("by", "count"), [("device", 2), ("thread", 1)])
@pytest.mark.parametrize("longer", [0.0, 1.0])
def test_the_threads_are_as_asked_whatever_operations_take(
    by: Dispatches, count: int, longer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "HAND_OVER", longer)
    monkeypatch.setattr(choice, "processors", lambda: 2)
    x, y = batch()
    with pipe_of(2, optimizer=adam, extensions=[fxpipe.Dispatch(by)]) as pipe:
        pipe.step(x, target=y)
        assert pipe._calls.shown is not None and pipe._calls.shown.threads == count


@pytest.mark.parametrize(
    ("by", "part"),
    [
        ("treads", "there is no dispatch 'treads': did you mean 'thread'?"),
        (None, "there is no dispatch None: the known ones are 'device', 'thread'"),
    ],
)
def test_an_unknown_dispatch_is_refused(by: Any, part: str) -> None:
    with pytest.raises(InputError) as raised:
        fxpipe.Dispatch(by)
    assert part in str(raised.value)
