"""The pages under docs/: complete, and their code gives what stands there."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import runpy
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxpipe import errors, extend, schedules
from fxpipe.compiler.passes import LISTS
from fxpipe.ir.instruction import every_opcode
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.task import BUILT_IN, KINDS
from fxpipe.ir.value import Buffer
from tests.helpers.registered import registry_restored
from tests.test_readme import run

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GENERATED = str(DOCS / "generated.py")

ROW = re.compile(r"^\| `(\w+)` \| (.*?) \|(.*)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """A page begins with the library's schedules; what it defines is gone after it."""
    registered = extend._REGISTRY["recipe"]
    before = dict(registered)
    library = {recipe.name for recipe in schedules.library()}
    for name in {*RECIPES} - library:
        del registered[name]
    yield
    for letter in KINDS.keys() - BUILT_IN:
        del KINDS[letter]
    registered.clear()
    registered.update(before)


def rows(text: str, begin: str) -> dict[str, tuple[str, str]]:
    """The first cell of the rows of the table that begins like this → the second, and the rest."""
    table = text[text.index(begin) :].partition("|---|")[2].partition("\n\n")[0]
    return {m[1]: (m[2], m[3]) for m in ROW.finditer(table)}


def made_of_code() -> dict[str, str]:
    """Mark → the table that stands in its place on a built page."""
    return {mark: table() for mark, table in runpy.run_path(GENERATED)["MARKS"].items()}


def table_of(what: str) -> str:
    return made_of_code()[f"<!-- the table of {what} -->"]


def test_every_table_that_is_made_of_the_code_has_one_place() -> None:
    marks = re.findall(r"<!--.*?-->", "".join(page.read_text() for page in PAGES))
    assert sorted(marks) == sorted(made_of_code())


def test_the_table_of_instructions_has_a_sentence_for_each() -> None:
    told = rows(table_of("instructions"), "| opcode |")
    assert list(told) == list(every_opcode())
    assert all(sentence.strip() for sentence, _ in told.values())


def test_the_table_of_extensions_has_a_sentence_for_each_folder() -> None:
    told = rows(table_of("extensions"), "| folder |")
    folders = (DOCS.parent / "fxpipe" / "extensions").glob("*/__init__.py")
    assert told.keys() == {path.parent.name for path in folders}
    assert all(sentence.strip() for sentence, _ in told.values())


def test_every_kind_of_buffer_is_on_the_page_of_instructions() -> None:
    page = (DOCS / "instructions.md").read_text().split("## Buffers")[1]
    for kind in re.findall(r"``(\w+)``[,:]", inspect.getdoc(Buffer) or ""):
        assert re.search(rf"^\| .*`{kind}`.* \|", page, re.MULTILINE), kind


def test_the_table_of_passes_has_a_sentence_for_each() -> None:
    table = table_of("passes").split("\n")[2:]
    passes = [each.name for made in LISTS.values() for each in made]
    assert [row.split(" | ")[1] for row in table] == [f"`{name}`" for name in passes]
    assert all(row.split(" | ")[2].strip() for row in table)


def test_all_that_the_page_of_the_architecture_names_is_there() -> None:
    page = (DOCS / "architecture.md").read_text()
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    named = re.findall(r"`((?:fxpipe|passes|schedules|tests|docs)/[\w./]*)`", prose)
    assert len(named) > 20
    missing = [name for name in named if not (DOCS.parent / name).exists()]
    assert not missing
    folders = {
        path.parent.relative_to(DOCS.parent).as_posix()
        for folder in ("fxpipe", "passes", "schedules")
        for path in (DOCS.parent / folder).rglob("*.py")
        if not {"passes", "schedules"} & set(path.relative_to(DOCS.parent).parts[1:])
    }
    told = {name.rstrip("/") for name in named}
    told |= {f"fxpipe/extensions/{name}" for name in rows(table_of("extensions"), "| folder |")}
    assert folders <= told, f"say in a sentence what is in {sorted(folders - told)}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip()) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *PAGES], ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in link or link.startswith("notebooks/"):  # copied there when the pages are built
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_kind_of_task_is_on_the_page_of_schedules_with_its_cost() -> None:
    told = rows((DOCS / "schedules.md").read_text(), "| task |")
    assert told.keys() == BUILT_IN
    for letter in BUILT_IN:
        name, rest = told[letter]
        assert name.startswith(KINDS[letter].name)
        assert float(rest.split("|")[1]) == KINDS[letter].cost


@pytest.mark.pages
@pytest.mark.filterwarnings("ignore:::pytorch_lightning")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_code_of_a_page_gives_what_stands_there(
    path: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = path.read_text()
    for name in ("accelerate", "pytorch_lightning"):
        if f"import {name}" in page or f"from {name}" in page:
            pytest.importorskip(name, reason=f"{name} is not installed: .[frameworks]")
    with registry_restored():
        outputs = list(run(page))
    if request.config.getoption("--update-golden"):
        for block, real in reversed(outputs):
            page = page[: block.start] + real + page[block.end :]
        path.write_text(page)
        for picture in (DOCS / "pictures").iterdir():
            if Path(picture.name).exists():
                shutil.copy(picture.name, picture)
        return
    for block, real in outputs:
        assert block.text == real


def test_every_schedule_is_on_the_page_of_the_library_with_its_file() -> None:
    page = (DOCS / "api" / "library.md").read_text()
    found: dict[str, bool] = {}
    for names, path in re.findall(r"^## (.*)\n\n```{literalinclude} (\S+)$", page, re.MULTILINE):
        text = (DOCS / "api" / path).read_text()
        written = re.findall(r'schedule\(\s*"(.*?)"', text)
        found |= {name: name in written for name in re.findall("`(.*?)`", names)}
    assert found == dict.fromkeys(RECIPES, True)


def test_every_error_has_a_section() -> None:
    made = [each for each in vars(errors).values() if inspect.isclass(each)]
    names = {each.__name__ for each in made if issubclass(each, errors.FxpipeError)}
    page = (DOCS / "errors.md").read_text()
    assert set(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == names - {"FxpipeError"}


def test_an_error_ends_with_the_place_of_its_section() -> None:
    class Mine(errors.ParseError):
        pass

    own, other = Mine("a name is missing", 2, 7), errors.RankError("it is gone", rank=1)
    copied, handed_over = copy.copy(own), pickle.loads(pickle.dumps(other))
    assert vars(copied) == vars(own) and vars(handed_over) == vars(other)
    links = (own, "parseerror"), (copied, "parseerror"), (handed_over, "rankerror")
    for error, section in links:
        *_, text, link = traceback.format_exception(error)
        assert text.endswith(f"{error}\n")
        assert link == f"see docs/errors.md#{section}\n"
