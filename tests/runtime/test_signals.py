"""Signals while something runs as a whole: held, and raised where it can do no harm."""

from __future__ import annotations

import os
import signal

import pytest

from fxpipe.passes.runner import Pass, run_all
from fxpipe.signals import HeldSignals
from tests.helpers.tiny import raise_signal

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")


def test_of_two_that_hold_signals_the_inner_one_does() -> None:
    with HeldSignals() as outer:
        with pytest.raises(KeyboardInterrupt), HeldSignals() as inner:
            raise_signal()
            assert isinstance(inner.held, KeyboardInterrupt)
            assert outer.held is None
        raise_signal()
        assert isinstance(outer.take(), KeyboardInterrupt)


def test_handlers_are_as_before_after_a_step_and_stay_as_they_were_changed() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with HeldSignals():
        assert signal.getsignal(signal.SIGINT) is not before[signal.SIGINT]
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    try:
        with pytest.raises(KeyboardInterrupt), HeldSignals() as signals:
            raise_signal()
            assert isinstance(signals.held, KeyboardInterrupt)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a handler may do
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])


def test_an_interrupt_while_passes_run_comes_before_the_next_one() -> None:
    came: list[str] = []

    def first(number: int) -> int:
        raise_signal()
        came.append("first")
        return number

    second = Pass(lambda number: came.append("second"), "number", "")
    with pytest.raises(KeyboardInterrupt), HeldSignals():
        run_all([Pass(first, "number", "number"), second], {"number": 1})
    assert came == ["first"]
