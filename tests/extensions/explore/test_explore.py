"""The page of schedules: its numbers are those of the schedules, it needs nothing else, and a
browser shows what was chosen."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from argparse import Namespace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fxpipe.errors import InputError
from fxpipe.extensions.explore.command import write_page
from fxpipe.extensions.explore.data import UNIT, every_run
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def plan_of(data: dict[str, Any], **chosen: Any) -> dict[str, Any]:
    (plan,) = [x for x in data["plans"] if all(x[key] == value for key, value in chosen.items())]
    return dict(plan)


def page(path: Path, devices: str = "2,3", microbatches: str = "4") -> Path:
    write_page(Namespace(file=str(path), devices=devices, microbatches=microbatches))
    return path


def packed(path: Path) -> dict[str, Any]:
    (text,) = re.findall(r'id="data">([^<]*)<', path.read_text())
    return dict(json.loads(gzip.decompress(base64.b64decode(text))))


@pytest.mark.smoke
def test_figures_are_those_of_the_closed_forms() -> None:
    data = every_run([3], [4])
    run = plan_of(data, name="1f1b")["runs"][0][0]
    assert run["bubble"] == pytest.approx((3 - 1) / (4 + 3 - 1))
    assert run["peak"] == 3 and run["versions"] == [1, 1, 1]
    rows = plan_of(data, name="1f1b")["rows"]
    assert rows[2] == [*(f"{letter}{i}@2" for i in range(4) for letter in "FB"), "U@2"]
    assert run["rows"][2][:6] == [2 * UNIT, UNIT, UNIT, 0, 2 * UNIT, UNIT]
    plain, _, late = plan_of(data, name="gpipe")["runs"][0]
    assert plain["peak"] == 4
    assert late["step"] == pytest.approx(plain["step"] + 4)  # two transfers there, two back
    slow = plan_of(data, name="naive")["runs"][2][0]
    assert slow["step"] == pytest.approx(4 * (3 + 3 + 1.5 * 3) + 0.25)


def test_every_schedule_that_trains_is_there_and_its_text_gives_it_again() -> None:
    data = every_run([2], [4])
    assert {plan["name"] for plan in data["plans"]} == RECIPES.keys() - {"inference"}
    assert {plan["v"] for plan in data["plans"] if plan["name"] == "looped-bfs"} == {2, 3, 4}
    for plan in data["plans"]:
        text = plan["copy"][plan["copy"].index("\nschedule ") + 1 :].partition('""")')[0]
        schedule = Schedule.parse(text).verify()
        assert (schedule.devices, schedule.microbatches) == (2, 4)
        if not schedule.overlaps:
            drawn = [[task for task in row if task[0] in "FBIW"] for row in plan["rows"]]
            tasks = [[str(task) for task in row if task.kind in "FBIW"] for row in schedule.rows]
            assert drawn == tasks
        for run in (each for runs in plan["runs"] for each in runs):
            assert [len(row) for row in run["rows"]] == [3 * len(row) for row in plan["rows"]]


@pytest.mark.smoke
def test_the_page_has_all_in_itself(tmp_path: Path) -> None:
    path = page(tmp_path / "explorer.html", devices="2", microbatches="4")
    assert packed(path) == every_run([2], [4])
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|<link|@import|\bsrc=", text)


@pytest.mark.parametrize("given", ["0", "2,x", "", "1000", "-2"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(InputError, match=r"--devices has .* such as 2,4,8"):
        page(tmp_path / "page.html", devices=given)
    assert not list(tmp_path.iterdir())


def shown(path: Path, chosen: str) -> str:
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={path.parent}",
    ]
    made = subprocess.run(
        [*command, "--virtual-time-budget=10000", "--dump-dom", f"{path.as_uri()}#{chosen}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return unescape(made.stdout)


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize(
    "chosen",
    [
        {"name": "zb-h1", "p": 3, "m": 4, "time": 1, "link": 2},
        {"name": "looped-bfs", "p": 2, "v": 3},
    ],
)
def test_a_browser_shows_what_the_address_names(tmp_path: Path, chosen: dict[str, Any]) -> None:
    path = page(tmp_path / "explorer.html")
    dom = shown(path, "&".join(f"{key}={value}" for key, value in chosen.items()))
    time, link = chosen.pop("time", 0), chosen.pop("link", 0)
    plan = plan_of(packed(path), **{"m": 4, **chosen})
    run = plan["runs"][time][link]
    titles = re.findall(r"<title>(\S+), from [\d.]+ to [\d.]+</title>", dom)
    assert titles == [task for row in plan["rows"] for task in row]
    assert f"bubble {100 * run['bubble']:.1f} %" in dom
    assert f"{run['peak']:.2f} micro-batches" in dom
    (row,) = re.findall(r'<tr class="chosen">(.*?)</tr>', dom)
    assert row.startswith(f"<td>{plan['name']}</td><td>{plan['v']}</td><td>{run['step']:.2f}</td>")
    ends = [float(end) for end in re.findall(r"to ([\d.]+)</title>", dom)]
    assert max(ends) == pytest.approx(run["step"], abs=0.01)
