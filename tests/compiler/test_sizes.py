"""For which sizes graphs are captured, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from fxpipe.compiler.front_end import Call
from fxpipe.compiler.memo import Memo
from fxpipe.compiler.sizes import GraphSizes
from fxpipe.runtime.batch import Batch
from fxpipe.schedules import gpipe


class Kinds:
    """Sizes of graphs, and the graphs that a compiler would have captured: each holds for what a
    function tells."""

    def __init__(self) -> None:
        self.memo, self.kind = Memo(), "a call"
        self.sizes = GraphSizes(lambda call: (self.kind,), self.memo)

    def capture(self, call: Call, accepts: Callable[[Any], bool] | None = None) -> None:
        only, shapes = self.sizes.only(call), call.shapes
        others = None if only is not None else self.sizes.free(call)[1]
        traced: Any = SimpleNamespace(
            of=None, accepts=accepts or (lambda given: tuple(given) == shapes)
        )
        self.sizes.captured(call, traced, others)
        self.memo("trace", lambda: (self.kind, only), lambda: traced, lambda _: False)
        self.sizes.placed(call, only)


def call(samples: int, length: int = 5, *, uniform: bool = True, fixed: bool | None = None) -> Call:
    """A call whose micro-batches have so many samples of this length."""
    x = torch.empty(samples, length)
    batch = Batch.of(torch.nn.Flatten(), (torch.empty(2 * samples, length),), {}, (), {}, "")
    if not uniform:
        batch = replace(batch, size=2 * samples - 1)
    return Call(batch, [x], samples, "step", (False,), gpipe(1, 2), fixed)


def test_the_first_sizes_have_a_graph_of_their_own() -> None:
    kinds = Kinds()
    assert kinds.sizes.only(call(4)) == ((4, 5),)
    kinds.capture(call(4))
    assert kinds.sizes.only(call(4)) == ((4, 5),)
    assert kinds.sizes.first(call(4)) == ((4, 5),)


def test_a_batch_of_several_sizes_has_a_graph_for_any() -> None:
    assert Kinds().sizes.only(call(4, uniform=False)) is None


def test_the_second_sizes_have_a_graph_for_any_of_the_dimensions_that_changed() -> None:
    kinds = Kinds()
    kinds.capture(call(4))
    assert kinds.sizes.only(call(3)) is None
    assert kinds.sizes.free(call(3)) == ([(0,)], [(3, 5)])
    assert kinds.sizes.free(call(4, 7)) == ([(0, 1)], [(4, 5)])
    kinds.capture(call(3), accepts=lambda given: given[0][1] == 5)
    assert kinds.sizes.only(call(6)) is None  # that holds for it, too
    assert kinds.sizes.only(call(4)) == ((4, 5),)  # the first keeps its own
    assert kinds.sizes.first(call(4)) is None


def test_a_size_of_1_is_no_symbol() -> None:
    kinds = Kinds()
    kinds.capture(call(4))
    assert kinds.sizes.free(call(4, 1)) == ([(0,)], [(4, 5)])
    assert kinds.sizes.free(call(1)) == ([()], [(1, 5)])


def test_where_a_model_holds_for_no_other_length_each_length_has_its_first_graph() -> None:
    kinds = Kinds()
    kinds.capture(call(4, 5))
    kinds.capture(call(4, 7), accepts=lambda given: given[0][1] == 7)  # not for length 5
    assert kinds.sizes.only(call(4, 9)) == ((4, 9),)  # of a length of its own, the first
    assert kinds.sizes.free(call(3, 7)) == ([(0,)], [(3, 7)])  # the length is no symbol any more


def test_what_is_asked_for_one_size_is_for_one_size() -> None:
    kinds = Kinds()
    kinds.capture(call(4))
    assert kinds.sizes.only(call(3, fixed=True)) == ((3, 5),)
    assert kinds.sizes.only(call(4, fixed=False)) is None


def test_another_kind_of_call_begins_anew_and_what_is_gone_is_forgotten() -> None:
    kinds = Kinds()
    kinds.capture(call(4))
    kinds.kind = "another"
    assert kinds.sizes.only(call(3)) == ((3, 5),)
    kinds.kind = "a call"
    kinds.memo.forget("trace")
    kinds.sizes.keep()
    assert kinds.sizes.only(call(3)) == ((3, 5),)


def test_compilers_of_one_model_share_what_they_know() -> None:
    kinds, other = Kinds(), Kinds()
    kinds.capture(call(4, 5))
    kinds.capture(call(4, 7), accepts=lambda given: given[0][1] == 7)
    other.sizes.share(kinds.sizes)
    other.memo.share(kinds.memo, "trace", "shapes")
    assert other.sizes.free(call(3, 7)) == ([(0,)], [(3, 7)])
