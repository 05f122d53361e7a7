"""A schedule's text: what is printed is read back, and what is wrong is named with its place."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxpipe.errors import ParseError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import B, F, Task, U

TEXT = """\
schedule mine stages=3 microbatches=4 delay=1
place 0 2 | 1
0: F0@0 B3'@2 U@0 F1@1
1: F0 B3'' U B2@0
"""


def test_a_stage_is_written_where_the_device_does_not_hold_exactly_that_one() -> None:
    schedule = Schedule.parse(TEXT)
    assert schedule == Schedule(
        "mine",
        4,
        (0, 1, 0),
        (
            (F(0, 0), B(3, 2, batch=-1), U(0), F(1, 1)),
            (F(0, 1), B(3, 1, batch=-2), U(1), B(2, 0)),
        ),
        delay=1,
    )
    assert str(schedule) == TEXT


def test_comments_blank_lines_and_the_order_of_rows_do_not_matter() -> None:
    text = (
        "# mine\n\n  schedule   mine stages=2 microbatches=1 delay=0  # header\r\n"
        "place 0|1 # two devices\n\n1:F0\n # between\n  0: F0# done"
    )
    assert Schedule.parse(text) == Schedule("mine", 1, (0, 1), ((F(0, 0),), (F(0, 1),)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages = draw(st.integers(1, 5))
    devices = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 5))
    homes, delays = st.integers(0, devices - 1), st.integers(0, 3)
    task = st.builds(
        lambda kind, i, stage, batch: Task(kind, None if kind == "U" else i, stage, batch),
        st.sampled_from("FBIWRU"),
        st.integers(0, microbatches - 1),
        st.integers(0, stages - 1),
        st.integers(-3, 0),
    )
    edge = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1))
    frozen = st.tuples(st.integers(0, microbatches - 1), st.integers(0, stages - 1))
    return Schedule(
        draw(st.text(max_size=8)),
        microbatches,
        tuple(draw(st.lists(homes, min_size=stages, max_size=stages))),
        tuple(tuple(draw(st.lists(task, max_size=6))) for _ in range(devices)),
        draw(delays | st.tuples(*[delays] * stages)),
        edges=draw(st.none() | st.sets(edge.filter(lambda ends: ends[0] < ends[1])).map(tuple)),
        frozen=draw(st.sets(frozen).map(frozenset)),
    )


@given(schedules())
def test_any_schedule_in_range_is_read_back_however_wrong_it_is(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_delays_of_stages_are_read_and_written() -> None:
    text = "schedule mine stages=3 microbatches=4 delay=1,2,0\nplace - | 0 1 2\n0:\n1:\n"
    schedule = Schedule.parse(text)
    assert str(schedule) == text
    assert schedule.delays == (1, 2, 0)


HEAD = "schedule mine stages=2 microbatches=4 delay=0\n"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "expected a header such as"),
        ("# only\n\n", 3, 1, "expected a header such as"),
        ("program mine", 1, 1, "expected 'schedule', as in schedule 1f1b"),
        ("schedulemine", 1, 9, "expected a blank and more, as in schedule 1f1b"),
        ("schedule", 1, 9, "expected a blank and more, as in schedule 1f1b"),
        ('schedule "mine', 1, 10, "expected a name after 'schedule', as in"),
        (r'schedule "\q" stages=1', 1, 10, "is not a quoted name"),
        ("schedule mine", 1, 14, "expected a blank and 'stages=', as in"),
        ("schedule mine stages=", 1, 22, "expected a number after 'stages=', as in"),
        ("schedule mine stages=-1", 1, 22, "expected a number after 'stages=', as in"),
        ("schedule mine stages=9999999999", 1, 22, "has 10 digits; at most 9 are read"),
        ("schedule mine stages=2 delay=0", 1, 24, "expected 'microbatches=', as in"),
        (HEAD.strip() + " x", 1, 47, "expected 'slices=' or the end of the line"),
        (HEAD.strip() + ",", 1, 47, "expected the delay of the next stage"),
        (HEAD.strip() + ",1,2", 1, 45, "there are 3 delays for 2 stages"),
        (HEAD.strip() + "/1", 1, 46, "expected a blank or the end of the line"),
        (HEAD.strip() + "-1", 1, 46, "expected a blank or the end of the line"),
        (HEAD, 2, 1, "expected 'place'"),
        (HEAD + "0: F0", 2, 1, "expected 'place'"),
        (HEAD + "place 0 | 2", 2, 11, "there is no stage 2; the header says stages=2"),
        (HEAD + "place 0 | 0", 2, 11, "stage 0 is on device 0 already"),
        (HEAD + "place 0 | -", 2, 12, "stage 1 has no device"),
        (HEAD + "place 0 | ", 2, 11, "expected a stage of device 1"),
        (HEAD + "place 0 || 1", 2, 10, "expected a stage of device 1"),
        (HEAD + "place 0 - | 1", 2, 9, "expected a stage of device 0"),
        (HEAD + "place 0 | 1x", 2, 12, "expected a stage of device 1"),
        (HEAD + "place 0 | 1\n0: F0", 3, 6, "device 1 has no row"),
        (HEAD + "place 0 | 1\n0: F0\n0: F0", 4, 1, "device 0 has a row already"),
        (HEAD + "place 0 | 1\n2: F0", 3, 1, "there is no device 2"),
        (HEAD + "place 0 | 1\nF0", 3, 1, "expected a row such as"),
        (HEAD + "place 0 | 1\n0 F0", 3, 2, "expected ':' after the device"),
        ('schedule "\\ud800" stages=2', 1, 10, "is not a quoted name"),
        ("x" * 1000, 1, 1, f"got '{'x' * 80}…'"),
        (HEAD + "place 0 | 1\n0: F0 X0", 3, 7, "there is no kind of task 'X'"),
        (HEAD + "place 0 | 1\n0: F0 2FISH", 3, 7, "there is no kind of task '2'"),
        (HEAD + "place 0 | 1\n0: F0xyz", 3, 6, "unexpected 'xyz' after F0"),
        (HEAD + "place 0 | 1\n0: F0B0", 3, 6, "unexpected 'B0' after F0"),
        (HEAD + "place 0 | 1\n0: F", 3, 5, "forward needs a micro-batch, such as F0"),
        (HEAD + "place 0 | 1\n0: F@0", 3, 5, "forward needs a micro-batch, such as F0"),
        (HEAD + "place 0 | 1\n0: U3", 3, 5, "update comes once a step and has no micro-batch"),
        (HEAD + "place 0 | 1\n0: F4", 3, 5, "there is no micro-batch 4"),
        (HEAD + "place 0 | 1\n0: F٣", 3, 5, "forward needs a micro-batch"),
        (HEAD + "place 0 | 1\n0: F0@2", 3, 7, "there is no stage 2"),
        (HEAD + "place 0 | 1\n0: F0@", 3, 7, "expected a stage after '@'"),
        (HEAD + "place 0 | 1\n0: F0@0'", 3, 8, 'unexpected "\'" after F0@0'),
        (HEAD + "place 0 1\n0: F0", 3, 4, "F0 needs a stage, as its device holds 2: F0@0 or F0@1"),
        (HEAD + "place 0 1 | -\n0:\n1: F0", 4, 4, "F0 needs a stage, as its device holds 0"),
    ],
)
def test_what_is_wrong_is_named_with_line_and_column(
    text: str, line: int, column: int, message: str
) -> None:
    with pytest.raises(ParseError) as caught:
        Schedule.parse(text)
    assert (caught.value.line, caught.value.column) == (line, column), str(caught.value)
    assert message in str(caught.value)


def test_a_task_of_a_later_batch_has_no_text() -> None:
    schedule = Schedule("mine", 1, (0,), ((F(0, 0, batch=1),),))
    with pytest.raises(ParseError, match=r"unexpected '\+' after F0"):
        Schedule.parse(str(schedule))


def parses_or_says_where(text: str) -> None:
    """Whatever the text is, it is a schedule that prints and parses, or a ParseError."""
    try:
        schedule = Schedule.parse(text)
    except ParseError as error:
        lines = text.split("\n")
        assert 1 <= error.line <= len(lines)
        assert 1 <= error.column <= len(lines[error.line - 1]) + 1
    else:
        assert Schedule.parse(str(schedule)) == schedule


@given(st.text() | st.text("schedule placetgmirob=0123|@',FBIWRU:#\"\\- \n\r\t"))
@example("schedule x stages=999999999 microbatches=1 delay=0\nplace 0")
@example("schedule x stages=1 microbatches=1 delay=0\nplace " + "9" * 5000)
@example("schedule x stages=0 microbatches=0 delay=0\nplace -\n0:")
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    parses_or_says_where(text)


@given(st.data())
def test_any_change_of_a_text_is_read_or_refused_with_its_place(data: st.DataObject) -> None:
    text = TEXT
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 3)))
        text = text[:start] + data.draw(st.text(max_size=3)) + text[stop:]
    parses_or_says_where(text)
