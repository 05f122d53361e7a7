"""Signals while something runs as a whole: held, and raised where it can do no harm."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from fxpipe.signals import HeldSignals, SignalsAtOperations
from tests.helpers.tiny import raise_signal

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")


def test_of_two_that_hold_signals_the_inner_one_does() -> None:
    with HeldSignals(lambda: None) as outer:
        with pytest.raises(KeyboardInterrupt), HeldSignals(lambda: None) as inner:
            raise_signal()
            assert isinstance(inner.held, KeyboardInterrupt)
            assert outer.held is None
        raise_signal()
        assert isinstance(outer.take(), KeyboardInterrupt)


def test_handlers_are_as_before_after_a_step_and_stay_as_they_were_changed() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with HeldSignals(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before[signal.SIGINT]
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    try:
        with pytest.raises(KeyboardInterrupt), HeldSignals(lambda: None) as signals:
            raise_signal()
            assert isinstance(signals.held, KeyboardInterrupt)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a handler may do
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])


def test_an_interrupt_of_a_trace_comes_at_an_operation_and_never_while_a_context_changes() -> None:
    came: list[str] = []

    @contextmanager
    def changing() -> Iterator[None]:
        raise_signal()
        operation("while entering")
        yield

    def operation(word: str) -> None:
        run_node()
        came.append(word)

    def run_node() -> None:
        pass

    with pytest.raises(KeyboardInterrupt), SignalsAtOperations(), changing():
        came.append("entered")
        operation("inside")
    assert came == ["while entering", "entered"]
    assert sys.getprofile() is None


def test_an_interrupt_that_something_swallows_comes_in_the_end() -> None:
    def run_node() -> None:
        pass

    with pytest.raises(KeyboardInterrupt), SignalsAtOperations():
        raise_signal()
        with suppress(KeyboardInterrupt):
            run_node()
            pytest.fail("it was not raised")
