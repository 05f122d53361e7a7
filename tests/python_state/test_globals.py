"""Only names that code loads as globals are globals that it reads: attributes have names, too."""

from __future__ import annotations

import dis
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler.python_state.reading import globals_of
from tests.oracles import loop

pytestmark = pytest.mark.traces

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

norm = mean = size = proj = 0.0
gain = 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + F.gelu(self.proj(self.norm(x))) * gain


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return [part.mean(1).mean(1).reshape(part.size(0), 1) for part in [x]][0]


def step(number):
    global norm, mean, size, proj
    norm, mean, size, proj = number, torch.tensor(number), str(number), [number]
"""


def test_a_scripts_globals_with_names_of_attributes_are_no_reason_to_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Any = types.ModuleType("script")
    monkeypatch.setitem(sys.modules, "script", script)
    exec(compile(SCRIPT, "script.py", "exec"), vars(script))
    model = script.Net()
    x, y = torch.randn(4, 3, 4), torch.randn(4, 1)
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss) as pipe,
    ):
        for number in range(4):
            pipe.step(x, target=y)
            script.step(float(number))
        assert not [r for r in caplog.records if "anew" in r.getMessage()]
        script.gain = 3.0
        loop.clear(model)
        made = pipe.step(x, target=y)
        assert torch.equal(made, loop.train(model, 2, x, loss=F.mse_loss, target=y).loss)
    assert "script.gain has changed" in caplog.text


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _loaded(code: CodeType) -> set[str]:
    """The names that the disassembler shows as loaded globals."""
    shown = dis.get_instructions(code)
    return {i.argval for i in shown if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


@given(st.sampled_from(sorted(Path(torch.__file__).parent.glob("*.py"))))
def test_names_are_those_that_the_disassembler_shows(path: Path) -> None:
    for code in _codes(compile(path.read_text(), str(path), "exec")):
        assert set(globals_of(code)) == _loaded(code)


def test_long_code_has_names_beyond_the_first_256() -> None:
    body = "".join(f"    self.a{i}\n" for i in range(300))
    code = compile(f"def f(self):\n{body}    return late", "long.py", "exec")
    (function,) = [each for each in _codes(code) if each.co_name == "f"]
    assert set(globals_of(function)) == {"late"}
