"""A form prints the fields of an object, and reads them back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import ParseError
from fxpipe.ir.value import HOST
from fxpipe.text.form import Form, options
from fxpipe.text.scan import Line

FORM = Form("s{stage}[{microbatch}{batch:batch}] v{version:signed} {name:value}->{to:end}", "s0[0]")


def read(form: Form, text: str) -> dict[str, object]:
    return form.read(Line(text, 7))


@given(
    stage=st.integers(0, 999),
    microbatch=st.integers(0, 999),
    batch=st.integers(-3, 3),
    version=st.integers(-9, 9),
    name=st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
    to=st.one_of(st.just(HOST), st.integers(0, 99)),
)
def test_what_is_printed_is_read(**fields: object) -> None:
    assert read(FORM, FORM.text(SimpleNamespace(**fields))) == fields


def test_a_blank_stands_for_any_number_of_blanks() -> None:
    form = Form("a {x} b", "a 1 b")
    assert read(form, "a    12   b") == {"x": 12}


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("s", 2, "a number after 's', as in s0"),
        ("s1", 3, r"'\['"),
        ("s1[0] v", 8, "a number after"),
        ("s1[0] v0 9->1", 10, "'9' is no name of a value"),
        ("s1[0] v0 a->x", 13, "a stage's number or 'host'"),
    ],
)
def test_what_is_missing_is_named_with_its_place(text: str, at: int, message: str) -> None:
    with pytest.raises(ParseError, match=message) as raised:
        read(FORM, text)
    assert (raised.value.line, raised.value.column) == (7, at)


def test_flags_are_words_behind_the_fields() -> None:
    form = Form("{x}", "1", keep="keeps", last="is_last")
    assert form.text(SimpleNamespace(x=1, keeps=True, is_last=False)) == "1 keep"
    assert read(form, "1") == {"keeps": False, "is_last": False, "x": 1}


def test_options_come_once_each_and_in_any_order() -> None:
    line = Line(" n=3 quick", 1)
    seen = []
    for word in options(line, "quick", "n="):
        seen.append((word, line.integer("n") if word == "n=" else None))
    assert seen == [("n=", 3), ("quick", None)]
    for text in (" quick quick", " slow"):
        with pytest.raises(ParseError, match="the end of the line"):
            [*options(Line(text, 1), "quick", "n=")]
