"""Garbage collection is off while many objects are made, and on again whatever happens."""

from __future__ import annotations

import gc

import pytest

from fxpipe.garbage import without_collection


@without_collection()
def collects(fail: bool = False) -> bool:
    if fail:
        raise ValueError
    return gc.isenabled()


def test_collection_is_off_inside_and_on_again_behind_it() -> None:
    assert gc.isenabled()
    for _ in range(2):
        assert not collects()
        assert gc.isenabled()


def test_collection_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError):
        collects(fail=True)
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        assert not collects()
        assert not gc.isenabled()
    finally:
        gc.enable()
