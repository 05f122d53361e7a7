"""Pictures draw themselves inside the process, whether or not ``dot`` is installed."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import pytest

from fxpipe.errors import InputError
from fxpipe.extensions.draw.canvas import ArrowStyle, BoxStyle, Canvas
from fxpipe.extensions.draw.picture import FORMATS, Picture, blank, lay_out
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.schedules import gpipe
from tests.helpers.plans import chain

MAGIC = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "jpeg": b"\xff\xd8", "gif": b"GIF8"}


@pytest.fixture(autouse=True)
def no_dot_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def picture() -> Picture:
    drawn = blank("small")
    drawn.edge("a", "b", label="c")
    return drawn


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_every_promised_format_comes_out_without_dot(picture: Picture, format: str) -> None:
    data = picture.pipe(format)
    assert data
    assert data.startswith(MAGIC.get(format, b""))


def test_jupyter_shows_svg(picture: Picture) -> None:
    svg = picture._repr_svg_()
    assert "<svg" in svg
    assert picture._repr_mimebundle_() == {"image/svg+xml": svg}
    bundle = picture._repr_mimebundle_(include=["image/png"])
    assert bundle["image/png"].startswith(b"\x89PNG")


@pytest.mark.parametrize(("microbatches", "shown"), [(2, 1.0), (12, None), (40, 0.65)])
def test_a_page_shows_a_wide_picture_smaller(microbatches: int, shown: float | None) -> None:
    picture = gpipe(2, microbatches).draw()
    box = re.search(r'viewBox="0.00 0.00 ([0-9.]+) ([0-9.]+)"', picture.pipe(encoding="utf-8"))
    assert box
    wide, high = map(float, box.groups())
    expected = 690 if shown is None else shown * wide
    size = f'width="{expected:g}pt" height="{high * expected / wide:g}pt"'
    style = f'style="max-width: max(100%, {0.65 * wide:g}pt); height: auto"'
    assert f"<svg {size} {style}" in picture._repr_svg_()


def test_a_notebook_shows_pictures_of_schedules_plans_and_programs() -> None:
    program = chain_program(gpipe(2, 3))
    texts: list[tuple[Schedule | Plan | Program, str]] = [
        (gpipe(2, 3), "<Schedule gpipe: 2 devices, 2 stages, 3 micro-batches>"),
        (chain(2), "<Plan: 2 stages, 3 edges>"),
        (program, f"<Program gpipe: 2 devices, {sum(map(len, program.lists))} instructions>"),
    ]
    for value, text in texts:
        assert value._repr_mimebundle_() == {
            "text/plain": text,
            "image/svg+xml": value.draw()._repr_svg_(),
        }
        assert repr(value) == text


def test_a_notebook_shows_no_picture_of_thousands_of_things() -> None:
    large = gpipe(4, 600)
    assert large._repr_mimebundle_() == {"text/plain": repr(large)}


def test_a_notebook_shows_the_table_of_a_simulation() -> None:
    simulation = gpipe(2, 2).simulate()
    assert repr(simulation) == "<Simulation of gpipe, simulated: 2 devices, 1 step>"
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    assert str(simulation) and pretty(simulation) == str(simulation)  # a legend is told once


def test_an_encoding_gives_text(picture: Picture) -> None:
    svg = picture.pipe("svg", encoding="utf-8")
    assert isinstance(svg, str)
    assert svg.startswith("<?xml")


@pytest.mark.parametrize("format", ["svg", "png", "pdf"])
def test_render_writes_just_the_file_that_its_path_names(
    picture: Picture, tmp_path: Path, format: str
) -> None:
    path = tmp_path / "folder" / f"small.{format}"
    assert picture.render(path) == str(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes().startswith(MAGIC[format])


@pytest.mark.parametrize("cleanup", [False, True])
def test_render_adds_the_ending_of_its_format(
    picture: Picture, tmp_path: Path, cleanup: bool
) -> None:
    path = picture.render("fig.v2", tmp_path, format="PNG", cleanup=cleanup)
    assert path == str(tmp_path / "fig.v2.png")
    assert Path(path).read_bytes().startswith(MAGIC["png"])


def test_render_without_a_path_uses_the_name_and_svg(picture: Picture, tmp_path: Path) -> None:
    assert picture.render(directory=tmp_path) == str(tmp_path / "small.svg")


def test_save_writes_the_source(picture: Picture, tmp_path: Path) -> None:
    path = Path(picture.save(tmp_path / "small.gv"))
    assert path.read_text() == picture.source


def test_an_unknown_format_is_refused_by_name(picture: Picture, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no format 'pngg'.*'png'"):
        picture.pipe("pngg")
    with pytest.raises(InputError, match="no format 'docx'"):
        picture.render(tmp_path / "small.docx")
    assert not list(tmp_path.iterdir())


def test_what_is_not_dot_is_refused() -> None:
    with pytest.raises(InputError, match="Graphviz cannot draw"):
        lay_out("digraph { a -> ", engine="dot", format="svg")


def test_drawing_says_nothing_of_fonts(picture: Picture, capfd: pytest.CaptureFixture[str]) -> None:
    picture.pipe("png")
    assert capfd.readouterr().err == ""


def test_a_copy_draws_as_the_original_does(picture: Picture) -> None:
    assert picture.copy().pipe("svg") == picture.pipe("svg")


@pytest.mark.parametrize("text", [r"a\n\N\lb", "<b>", '"', "a&lt;b", "{x|y}", "ümläut → ×"])
def test_a_plain_label_shows_exactly_its_text(text: str) -> None:
    canvas = Canvas("odd")
    canvas.box((0, 0), 200, 20, BoxStyle(), label=text, tooltip=text, name=text)
    svg = canvas.picture.pipe("svg", encoding="utf-8")
    assert f">{escape(text, quote=True)}</text>" in svg


def test_what_is_placed_stays_where_it_was_put() -> None:
    canvas = Canvas("placed")
    canvas.box((100, 50), 20, 10, BoxStyle("#112233"), name="one")
    canvas.box((130, 80), 20, 10, BoxStyle("#445566"), name="two")
    canvas.arrow("one", "two", [(110, 60), (110, 70), (140, 70), (140, 80)], ArrowStyle())
    drawn = json.loads(canvas.picture.pipe("json"))
    (x1, y1), (x2, y2) = (map(float, node["pos"].split(",")) for node in drawn["objects"])
    assert (x2 - x1, y1 - y2) == (30, 30)
    assert drawn["edges"][0]["pos"].startswith("e,")
