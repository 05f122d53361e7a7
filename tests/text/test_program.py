"""A program's text: what is printed is read back, and what is wrong is named with its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxpipe.errors import ParseError
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.value import BETWEEN, COPIED, HOST, OWN, Buffer, Edge, own_buffer
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, one_f_one_b
from fxpipe.text.program import print_instruction
from tests.conftest import Golden
from tests.helpers.plans import chain, skipping

SKIP = Buffer("skip", "relu_3", 0, 2, 1)
LINES: dict[str, tuple[ins.Instruction, str]] = {
    "load": (ins.Load(Buffer("in", "x", HOST, 0, 3)), "load in:x:host->0[3]"),
    "output": (ins.Output(Buffer("grad", "x", 0, HOST, 3)), "output grad:x:0->host[3]"),
    "send": (ins.Send(Buffer("act", "y", 0, 1, 12)), "send act:y:0->1[12]"),
    "recv": (ins.Receive(SKIP), "recv skip:relu_3:0->2[1]"),
    "stash": (ins.Stash(SKIP), "stash skip:relu_3:0->2[1]"),
    "pop": (ins.Pop(SKIP), "pop skip:relu_3:0->2[1]"),
    "forward": (ins.Forward(1, 2, 3), "forward s1[2] v3 keep"),
    "recompute": (ins.Recompute(1, 2, 3), "recompute s1[2] v3"),
    "backward": (ins.Backward(1, 2, 3, batch=-1), "backward s1[2'] v3"),
    "input_grad": (ins.InputGrad(1, 2, -1), "input_grad s1[2] v-1"),
    "weight_grad": (ins.WeightGrad(1, 2, -2, -2), "weight_grad s1[2''] v-2"),
    "free": (ins.Free(own_buffer("saved", 1, 2)), "free saved:1[2]"),
    "barrier": (ins.Barrier(), "barrier"),
    "pause": (ins.Pause(), "pause"),
    "update": (ins.Update(1, 2, 3), "update s1 v2 -> v3"),
}
HEAD = "program mine microbatches=4\nplace 0 | 1\npasses lower\n"


def test_every_opcode_has_its_line() -> None:
    assert set(LINES) == set(ins.OPCODES)
    for opcode, (instruction, text) in LINES.items():
        assert type(instruction) is ins.OPCODES[opcode]
        assert print_instruction(instruction) == text


@pytest.mark.parametrize("opcode", ins.OPCODES)
def test_every_instruction_is_read_back(opcode: str) -> None:
    instruction, text = LINES[opcode]
    program = Program("mine", 4, (0,), (), ((instruction,),))
    assert text in " ".join(str(program).split())
    assert Program.parse(str(program)) == program


def test_a_lowered_program_reads_as_in_its_golden_text(golden: Golden) -> None:
    program = free(communicate(Lower(chain(2))(one_f_one_b(2, 2))))
    golden("program_1f1b_2x2.txt", str(program))


def test_skips_and_a_pause_read_as_in_their_golden_text(golden: Golden) -> None:
    program = free(communicate(Lower(skipping(3), updates=False, pause=True)(gpipe(3, 1))))
    golden("program_gpipe_skips_pause_3x1.txt", str(program))


def test_an_instruction_is_read_back_with_its_stream_and_events() -> None:
    launch = Launch("in0", (Event(3), Event(7, -1)), Event(8))
    program = Program(
        "mine", 4, (0,), (), ((ins.Receive(SKIP), ins.Pause()),), (), ((launch, Launch()),)
    )
    assert "recv skip:relu_3:0->2[1] stream=in0 wait=e3,e7' record=e8" in " ".join(
        str(program).split()
    )
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_program_of_every_library_schedule_is_read_back(name: str) -> None:
    for devices, microbatches in ((1, 1), (2, 3), (3, 2), (4, 8)):
        schedule = RECIPES[name](devices, microbatches)
        program = free(communicate(Lower(chain(schedule.stages))(schedule)))
        assert Program.parse(str(program)) == program


def test_comments_blank_lines_and_spacing_do_not_matter() -> None:
    program = free(communicate(Lower(skipping(3))(one_f_one_b(3, 2))))
    lines = [f"\n \t{line}  # said\r" for line in str(program).splitlines()]
    assert Program.parse("# mine" + "\n".join(lines)) == program
    single = "\n".join(" ".join(line.split()) for line in str(program).splitlines())
    assert Program.parse(single) == program


NAMES = st.sampled_from(["x", "relu_3", "_0", "Loss"])
SMALL = st.integers(0, 12)
ENDS = st.integers(HOST, 3)
BATCHES = st.integers(-2, 1)
VERSIONS = st.integers(-3, 9)


@st.composite
def buffers(draw: st.DrawFn) -> Buffer:
    kind = draw(st.sampled_from((*BETWEEN, *OWN, *COPIED)))
    microbatch, batch = draw(SMALL), draw(BATCHES)
    if kind not in BETWEEN:
        stage = draw(SMALL)
        return Buffer(kind, "", stage, stage, microbatch, batch)
    ends = draw(ENDS), draw(ENDS)
    return Buffer(kind, draw(NAMES), *ends, microbatch, batch)


INSTRUCTIONS = st.one_of(
    *(
        st.builds(made, buffers())
        for made in (ins.Load, ins.Output, ins.Send, ins.Receive, ins.Free)
    ),
    st.builds(ins.Forward, SMALL, SMALL, VERSIONS, BATCHES, st.booleans(), st.booleans()),
    *(
        st.builds(made, SMALL, SMALL, VERSIONS, BATCHES)
        for made in (ins.Recompute, ins.Backward, ins.WeightGrad)
    ),
    st.builds(ins.InputGrad, SMALL, SMALL, VERSIONS, BATCHES, st.booleans()),
    *(
        st.builds(made, SMALL, BATCHES)
        for word in ("norm", "clip")
        if (made := ins.find_opcode(word)) is not None
    ),
    st.builds(ins.Update, SMALL, VERSIONS, VERSIONS, BATCHES),
    st.sampled_from([ins.Barrier(), ins.Pause()]),
)
EVENTS = st.builds(Event, SMALL, BATCHES)
LAUNCHES = st.builds(
    Launch,
    st.sampled_from(["compute", "in", "in0", "in12"]),
    st.lists(EVENTS, max_size=3).map(tuple),
    st.none() | EVENTS,
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    stages, devices = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    homes = st.integers(0, devices - 1)
    lists = tuple(tuple(draw(st.lists(INSTRUCTIONS, max_size=5))) for _ in range(devices))
    launches = tuple(tuple([draw(LAUNCHES) for _ in own]) for own in lists)
    launched = draw(st.booleans()) and {x for own in launches for x in own} - {Launch()}
    return Program(
        draw(st.text(max_size=8)),
        draw(SMALL),
        tuple(draw(st.lists(homes, min_size=stages, max_size=stages))),
        tuple(draw(st.lists(st.builds(Edge, ENDS, ENDS, NAMES), max_size=4))),
        lists,
        tuple(draw(st.lists(st.text(max_size=6), max_size=3))),
        launches if launched else (),
        draw(st.integers(1, 3)),
        draw(st.just(()) | copies(stages, devices)),
        tuple(draw(st.lists(st.builds(Edge, ENDS, ENDS, NAMES, st.just(True)), max_size=4))),
    )


def copies(stages: int, devices: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    own = st.sets(st.integers(0, devices - 1)).map(tuple)
    return st.lists(own, min_size=stages, max_size=stages).map(tuple)


@given(programs())
def test_any_program_is_read_back_however_wrong_it_is(program: Program) -> None:
    assert Program.parse(str(program)) == program


def in_list(line: str) -> str:
    return HEAD + "device 0\n" + line + "\ndevice 1\n"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "expected 'program', as in program 1f1b"),
        ("schedule mine", 1, 1, "expected 'program', as in program 1f1b"),
        ("program mine", 1, 13, "expected a blank and 'microbatches=', as in"),
        ("program mine microbatches=4", 1, 28, "expected 'place'"),
        ("program mine microbatches=4\nplace 0", 2, 8, "expected 'passes'"),
        ("program mine microbatches=4\nplace 1\npasses", 2, 8, "stage 0 has no device"),
        ("program mine microbatches=4\nplace 0\npasses a,b", 3, 9, "expected a blank"),
        (HEAD, 4, 1, "device 0 has no list"),
        (HEAD + "device 0\n", 5, 1, "device 1 has no list"),
        (HEAD + "device 1\n", 4, 8, "expected device 0"),
        (HEAD + "device 0\ndevice 0", 5, 8, "expected device 1"),
        (HEAD + "device 2", 4, 8, "there is no device 2"),
        (HEAD + "barrier\ndevice 0", 4, 1, "expected 'device'"),
        (HEAD + "edge act x 0->2", 4, 6, "is of kind 'skip', not 'act'"),
        (HEAD + "edge act x 0-1", 4, 13, "expected '->', as in act x 0->1, got '-1'"),
        (HEAD + "edge act x 0->1 gradients", 4, 17, "unexpected 'gradients'; remove it"),
        (in_list("edge act x 0->1"), 5, 1, "there is no instruction 'edge'"),
        (in_list("  sned act:x:0->1[0]"), 5, 3, "did you mean 'send'"),
        (in_list("  send"), 5, 7, "expected a blank and a buffer"),
        (in_list("  send act"), 5, 8, "expected a buffer such as act:x:0->1[0]"),
        (in_list("  send acts:x:0->1[0]"), 5, 8, "expected a buffer such as act:x:0->1[0]"),
        (in_list("  send act:0->1[0]"), 5, 12, "'0' is no name of a value"),
        (in_list("  send act:class:0->1[0]"), 5, 12, "'class' is no name of a value"),
        (in_list("  send act:x:0>1[0]"), 5, 15, "expected '->'"),
        (in_list("  send act:x:0->1"), 5, 18, "expected '[', as in act:x:0->1[0]"),
        (in_list("  send act:x:0->1[0"), 5, 20, "expected ']'"),
        (in_list("  send act:x:0->1[0]2"), 5, 21, "expected a blank or the end of the line"),
        (in_list("  free saved:0->1[0]"), 5, 15, "expected '[', as in saved:0[0]"),
        (in_list("  forward 0[0] v0"), 5, 11, "expected 's', as in s0[0] v0"),
        (in_list("  forward s0[0]"), 5, 16, "expected a blank and 'v', as in s0[0] v0"),
        (in_list("  forward s0[0] v0 kept"), 5, 20, "expected 'keep' or 'again' or"),
        (in_list("  forward s0[0] v0keep"), 5, 19, "expected a blank or the end"),
        (in_list("  backward s0[0] v0 keep"), 5, 21, "expected 'stream=' or 'wait=' or"),
        (in_list("  partial_backward B s0[0] v0"), 5, 30, "expected a blank and 'bucket'"),
        (in_list("  partial_backward B s0[0] v0 bucket"), 5, 37, "a blank and more, as in"),
        (in_list("  backward s0 v0"), 5, 14, "expected '[', as in s0[0] v0"),
        (in_list("  update s0 v0 v1"), 5, 16, "expected '->'"),
        (in_list("  update s0 v0 -> v"), 5, 20, "expected a number after '-> v'"),
        (in_list("  barrier now"), 5, 11, "or 'record=' or the end of the line"),
        (in_list("  forward s0[0] v0 stream="), 5, 27, "expected a stream such as in0"),
        (in_list("  barrier wait=7"), 5, 16, "expected 'e', as in wait=e3, got '7'"),
        (in_list("  barrier wait=e7,"), 5, 19, "expected 'e', as in wait=e3"),
        (in_list("  barrier record=e7,e8"), 5, 20, "expected a blank or the end of the line"),
        (in_list("  barrier wait=e7 wait=e6"), 5, 19, "expected 'stream=' or 'record=' or"),
    ],
)
def test_what_is_wrong_is_named_with_line_and_column(
    text: str, line: int, column: int, message: str
) -> None:
    with pytest.raises(ParseError) as caught:
        Program.parse(text)
    assert (caught.value.line, caught.value.column) == (line, column), str(caught.value)
    assert message in str(caught.value)


def parses_or_says_where(text: str) -> None:
    """Whatever the text is, it is a program that prints and parses, or a ParseError."""
    try:
        program = Program.parse(text)
    except ParseError as error:
        lines = text.split("\n")
        assert 1 <= error.line <= len(lines)
        assert 1 <= error.column <= len(lines[error.line - 1]) + 1
    else:
        assert Program.parse(str(program)) == program


@given(st.text())
@example("program x microbatches=" + "9" * 5000)
@example(in_list("forward s" + "9" * 5000 + "[0] v0"))
@example(HEAD + "device 0\ndevice 1 #\n\x0b")
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    parses_or_says_where(text)


WHOLE = str(
    replace(
        Program(
            "mine",
            4,
            (0, 1, 0),
            (Edge(HOST, 0, "x"), Edge(0, 1, "y")),
            ((), ()),
            gradients=(Edge(1, 0, "y", True),),
        ),
        lists=(tuple(instruction for instruction, _ in LINES.values()), (ins.Pause(),)),
        passes=("lower", "communicate"),
    )
)


@given(st.data())
def test_any_change_of_a_text_is_read_or_refused_with_its_place(data: st.DataObject) -> None:
    text = WHOLE
    pieces = st.text(max_size=3) | st.text(" \n:>-[]0123vskeph#|", max_size=4)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 3)))
        text = text[:start] + data.draw(pieces) + text[stop:]
    parses_or_says_where(text)
