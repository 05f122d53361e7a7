"""Texts that are made wrong, and the faults that a verifier finds."""

from __future__ import annotations

from typing import Protocol

import pytest

from fxpipe.errors import Fault, VerificationError


class Verifiable(Protocol):
    """A schedule, plan or program."""

    def verify(self) -> object:
        """Raise VerificationError where it is wrong."""


def changed(text: str, old: str, new: str) -> str:
    """The text with the first ``old`` replaced; it has to be there."""
    assert old in text
    return text.replace(old, new, 1)


def faults_of(wrong: Verifiable) -> tuple[Fault, ...]:
    """The faults of what is wrong."""
    with pytest.raises(VerificationError) as caught:
        wrong.verify()
    assert caught.value.value is wrong
    return caught.value.faults
