"""Text that is no graph: refused at its place, whatever it is, and nothing of it is run."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxpipe.errors import ParseError
from fxpipe.text.graph import parse_graph, print_graph
from tests.text.test_graph import LeafTracer, WithLeaves, round_trip

# What is refused

GOOD = "x = placeholder()\ny = torch.relu(x)\nreturn (y,)"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "the graph has no end"),
        ("x = placeholder()", 1, 18, "the graph has no end"),
        (GOOD + "\nz = torch.relu(x)", 4, 1, "nothing may follow the graph's 'return'"),
        (GOOD + "\n  return y", 4, 3, "nothing may follow"),
        ("x = placeholder()\nreturn (z,)", 2, 9, "no line above makes a node 'z'"),
        ("relu = placeholder()\nreturn (relv,)", 2, 9, "did you mean 'relu'"),
        ("  x = placeholder()\n  x = torch.relu(x)\nreturn x", 2, 3, "already makes a node 'x'"),
        ("x = placeholder()\ny = torch.rleu(x)\nreturn y", 2, 11, "did you mean .*'relu'"),
        ("y = torch.ops.aten.rleu.default(1)\nreturn y", 1, 20, "did you mean 'relu'"),
        ("y = torch.ops.aten.add.Tensr(1)\nreturn y", 1, 24, "did you mean 'Tensor'"),
        ("y = torch.ops.atem.add.Tensor(1)\nreturn y", 1, 15, "did you mean 'aten'"),
        ("y = torch.ops.load_library('x')\nreturn y", 1, 5, "torch.ops.<namespace>"),
        ("y = torch.ops.aten.add.Tensor.x(1)\nreturn y", 1, 5, "torch.ops.<namespace>"),
        ("y = torch.ops.aten.add['__call__'](1)\nreturn y", 1, 24, "no overload '__call__'"),
        ("y = torch.load('x')\nreturn y", 1, 11, "there is no function 'load' in torch"),
        ("y = torch._import_dotted_name('os.system')\nreturn y", 1, 11, "no function '_import_dot"),
        ("y = torch.import_ir_module(1)\nreturn y", 1, 11, "no function 'import_ir_module'"),
        ("y = torch.compile(1)\nreturn y", 1, 11, "no function 'compile' in torch"),
        ("y = torch.save(1, 'x')\nreturn y", 1, 11, "no function 'save' in torch"),
        ("y = torch.from_file('x', True, 8)\nreturn y", 1, 11, "no function 'from_file'"),
        ("y = torch.set_default_device(1)\nreturn y", 1, 11, "no function 'set_default_device'"),
        ("y = operator.call(1, 'x')\nreturn y", 1, 14, "no function 'call' in operator"),
        ("y = operator.attrgetter('x')\nreturn y", 1, 14, "no function 'attrgetter'"),
        ("y = operator.methodcaller('x')\nreturn y", 1, 14, "no function 'methodcaller'"),
        ("y = fxpipe.random._as(1)\nreturn y", 1, 19, "no function '_as' in fxpipe.random"),
        ("y = torch.ops.aten.save(1, 'x')\nreturn y", 1, 20, "no operator 'save'"),
        ("y = torch.ops.aten.from_file('x', True, 8)\nreturn y", 1, 20, "no operator 'from_file'"),
        ("y = torch.ops.aten.warn('x')\nreturn y", 1, 20, "no operator 'warn'"),
        ("y = torch.ops.prim.Print('x')\nreturn y", 1, 15, "no operators of 'prim'"),
        ("y = torch.ops.higher_order.wrap(1)\nreturn y", 1, 28, "no operator 'wrap'"),
        ("x = placeholder()\ny = torch.relu(torch.ops.aten.save)\nreturn y", 2, 31, "'save'"),
        ("x = placeholder()\ny = getattr(x, '__class__')\nreturn y", 2, 5, "does not begin with"),
        ("x = placeholder()\ny = getattr(x, x)\nreturn y", 2, 5, "does not begin with '_'"),
        ("x = placeholder()\ny = getattr(x, 'a', x)\nreturn y", 2, 5, "write getattr"),
        ("x = placeholder()\ny = getattr(x, 'numpy')\nreturn y", 2, 5, "'numpy' is a method"),
        ("x = placeholder()\ny = x.__reduce_ex__(2)\nreturn y", 2, 7, "no method '__reduce_ex__'"),
        ("x = placeholder()\ny = x.numpy()\nreturn y", 2, 7, "no method 'numpy' that a text"),
        ("x = placeholder()\ny = x.tofile('x')\nreturn y", 2, 7, "did you mean .*'tile'"),
        ("x = placeholder()\ny = method('apply_', 'x', x)\nreturn y", 2, 12, "no method 'apply_'"),
        ("y = torch.hub.load('x')\nreturn y", 1, 11, "names no functions of 'torch.hub'"),
        ("y = torch.os.system('x')\nreturn y", 1, 11, "names no functions of 'torch.os'"),
        ("y = math.__loader__('x')\nreturn y", 1, 10, "no function '__loader__' in math"),
        ("y = os.system('x')\nreturn y", 1, 5, "no line above makes a node 'os'"),
        ("y = eval('x')\nreturn y", 1, 5, "there is no function 'eval'"),
        ("y = getatr(1, 'x')\nreturn y", 1, 5, "did you mean 'getattr'"),
        ("y = torch.relu(eval('1'))\nreturn y", 1, 16, "can call slice, range, complex"),
        ("y = torch.relu(1 + 2)\nreturn y", 1, 16, "not an argument that a graph can have"),
        ("y = torch.relu([i for i in 'x'])\nreturn y", 1, 16, "not an argument"),
        ("y = torch.relu(f'{1}')\nreturn y", 1, 16, "not an argument"),
        ("y = torch.relu(b'1')\nreturn y", 1, 16, "not an argument"),
        ("y = torch.relu(*'1')\nreturn y", 1, 16, "not an argument"),
        ("y = torch.relu(**'1')\nreturn y", 1, 16, "write each argument by its name"),
        ("y = torch.relu(a=1, a=2)\nreturn y", 1, 21, "argument 'a' is given twice"),
        ("y = torch.relu({'a': 1, 'a': 2})\nreturn y", 1, 25, "this key is given twice"),
        ("y = torch.relu({[]: 1})\nreturn y", 1, 17, "must be hashable"),
        ("y = torch.relu(--1)\nreturn y", 1, 17, "only a number can be negative"),
        ("y = torch.relu(-'a')\nreturn y", 1, 17, "only a number can be negative"),
        ("y = torch.relu(torch.flot32)\nreturn y", 1, 22, "did you mean 'float32'"),
        ("y = torch.relu(torch.device('qqq'))\nreturn y", 1, 16, "this device cannot be"),
        ("y = torch.relu(range(1, 2, 0))\nreturn y", 1, 16, "this range cannot be made"),
        ("x = placeholder()\ny = x.a.b(1)\nreturn y", 2, 5, "write a method of a node"),
        ("x = placeholder()\ny = torch.relu(x.shape)\nreturn y", 2, 16, "a node or a constant"),
        ("x = placeholder()\ny = x.shape\nreturn y", 2, 5, "write 'name = function"),
        ("y = self.encoder(1)\nreturn y", 1, 5, "self.encoder needs a root"),
        ("y = self.encoder.w\nreturn y", 1, 5, "self.encoder.w needs a root"),
        ("y = operator.add(1)\nreturn y", 1, 5, "wrong arguments: missing a required"),
        ("y = operator.add(1, b=1)\nreturn y", 1, 5, "wrong arguments"),
        ("y = torch.relu(1); z = 2\nreturn y", 1, 20, "write one statement a line"),
        ("y = z = torch.relu(1)\nreturn y", 1, 1, "write 'name = function"),
        ("y: int = torch.relu(1)\nreturn y", 1, 1, "write 'name = function"),
        ("y, z = torch.relu(1)\nreturn y", 1, 1, "write 'name = function"),
        ("import os\nreturn 1", 1, 1, "write 'name = function"),
        ("return", 1, 1, "write 'name = function"),
        ("y = torch.relu(1\nreturn y", 1, 15, "cannot be read: '\\(' was never closed"),
        ("y = torch.relu('é', é.é)\nreturn y", 1, 21, "a node or a constant"),
        ("y = torch.relu(1)\nx = placeholder()\nreturn y", 2, 5, "placeholders come before"),
        ("x = placeholder('a b')\nreturn x", 1, 17, "write placeholder"),
        ("x = placeholder('x=1')\nreturn x", 1, 17, "write placeholder"),
        ("x = placeholder('class')\nreturn x", 1, 5, "cannot take an argument 'class'"),
        ("x = placeholder('y')\ny = placeholder()\nreturn x", 2, 5, "cannot take an argument 'y'"),
        ("x = placeholder(init=1)\nreturn x", 1, 17, "a placeholder takes 'default' alone"),
        ("x = placeholder()\ny = placeholder(default=x)\nreturn x", 2, 25, "no line above"),
        ("x = placeholder(default=1)\ny = placeholder()\nreturn x", 1, 1, "fx cannot make code"),
    ],
)
def test_what_is_malformed_is_refused_at_its_place(
    text: str, line: int, column: int, message: str
) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        parse_graph(text, None)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize("module", ["torch", "torch.nn.functional", "math", "torch.ops.aten"])
def test_no_name_is_read_of_what_opens_files_imports_compiles_or_sets(module: str) -> None:
    words = r"load|save|file|import|compile|jit|fork|seed|print|warn|set_[dngp]|hook"
    first, *rest = module.split(".")
    holder: object = functools.reduce(getattr, rest, importlib.import_module(first))
    every = set(dir(holder))
    if module == "torch.ops.aten":  # where names stand only once somebody has asked for them
        full = torch._C._dispatch_get_all_op_names()
        every |= {n[6:].partition(".")[0] for n in full if n.startswith("aten::")}
    accepted = []
    for name in sorted(name for name in every if re.search(words, name)):
        try:
            parse_graph(f"y = {module}.{name}(1, 1)\nreturn y", None)
        except ParseError:
            continue
        accepted.append(name)
    assert accepted == []


@pytest.mark.parametrize(
    ("path", "column", "message"),
    [
        ("self.blocks[2](x)", 17, "nothing named '2' here: .*'0'"),
        ("self.blcks(x)", 10, "did you mean 'blocks'"),
        ("self.weight(x)", 10, "'weight' is no module"),
        ("self.weight.data", 10, "'weight' is no module"),
        ("self.forward", 10, "nothing named 'forward'"),
        ("self.training", 10, "nothing named 'training'"),
        ("self._modules", 10, "nothing named '_modules'"),
    ],
)
def test_what_the_root_does_not_hold_is_refused(path: str, column: int, message: str) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        parse_graph(f"x = placeholder()\ny = {path}\nreturn y", WithLeaves())
    assert (caught.value.line, caught.value.column) == (2, column)


def test_blank_lines_comments_and_indentation_mean_nothing() -> None:
    text = "# head\n\n  " + GOOD.replace("\n", "  # tail\r\n\n\t") + "\n\n"
    assert print_graph(parse_graph(text, None).graph) == GOOD


def test_reading_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(nn.Module):
        @property
        def loud(self) -> Tensor:
            print("ran")
            return torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            print("ran")
            return x

    root = nn.Sequential(Loud())
    parse_graph("x = placeholder()\ny = self[0](x)\nreturn y", root)
    for text in (
        "x = placeholder('x=print(\"ran\")')\nreturn x",
        "y = self['a\") or print(\"ran'](1)\nreturn y",
        "y = self[0].loud\nreturn y",
        "y = print('ran')\nreturn y",
        "y = torch.relu(print('ran'))\nreturn y",
        "y = method('a or print(1)', 1)\nreturn y",
        "y = torch.relu(**{'a=print(1)': 1})\nreturn y",
    ):
        with pytest.raises(ParseError):
            parse_graph(text, root)
    assert capsys.readouterr().out == ""


SEED_TEXT = print_graph(LeafTracer().trace(WithLeaves()))
ROOT = WithLeaves()
pieces = st.sampled_from(
    [
        *"()[]{}.,:='\"\\#-*\n \t\r\0",
        "é",
        "\ud800",
        "self",
        "torch.ops",
        "return ",
        "x",
        "1",
        "None",
    ]
)


@given(st.integers(0, len(SEED_TEXT)), st.integers(0, 12), st.one_of(st.text(), pieces))
def test_damaged_text_raises_a_parse_error_or_is_read(at: int, cut: int, put: str) -> None:
    text = SEED_TEXT[:at] + put + SEED_TEXT[at + cut :]
    try:
        module = parse_graph(text, ROOT)
    except ParseError as error:
        lines = text.split("\n")
        assert 1 <= error.line <= len(lines)
        assert 1 <= error.column <= len(lines[error.line - 1]) + 1
    else:
        round_trip(module.graph, ROOT)


@given(st.text())
def test_any_text_raises_nothing_but_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError):
        parse_graph(text, None)


@given(st.integers(400, 6000), st.sampled_from(["0x{}", "0b{}", "-0x{}", "0o{}", "0x1{}"]))
def test_a_number_of_any_length_is_read_or_refused(digits: int, form: str) -> None:
    number = form.format("1" * digits)
    for value in ("{}", "complex({}, 1)", "range({}, 1, 1)", "slice(None, {}, {})", "{{{}: {}}}"):
        with contextlib.suppress(ParseError):
            parse_graph(f"y = torch.relu({value.format(number, number)})\nreturn y", None)
        with pytest.raises(ParseError):
            parse_graph(f"y = self[{number}](1)\nreturn y", nn.Sequential())


@pytest.mark.parametrize(
    "line",
    [
        "y_{} = placeholder()",
        "y_{} = torch.relu(1)",
        "y = self['{}'](1)",
        "y = torch.ops.aten.relu['{}'](1)",
        "y = y_{}.relu()",
        "y = method('a_{}', 1)",
    ],
)
def test_names_that_end_in_many_digits_are_refused(line: str) -> None:
    text = f"x = placeholder()\n{line.format('9' * 5000)}\nreturn x"
    with pytest.raises(ParseError) as caught:
        parse_graph(text, nn.Sequential())
    assert caught.value.line == 2


@pytest.mark.parametrize(
    "value", ["(" * 300, "[" * 300 + "]" * 300, "-" * 50000 + "1", "x" + ".x" * 50000, "9" * 5000]
)
def test_text_that_nests_deep_or_is_huge_is_refused(value: str) -> None:
    with pytest.raises(ParseError):
        parse_graph(f"y = torch.relu({value})\nreturn y", None)
