"""Pages to move in: each task once, what it waits for, and what a browser shows of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import READY, start_browser
from fxpipe.errors import InputError
from fxpipe.extensions.page import page
from fxpipe.extensions.simulator import Link, Simulation, Sizes, simulate_schedule
from fxpipe.extensions.simulator.simulation import task_of
from fxpipe.schedules import gpipe, one_f_one_b, two_bw, zb_v

MISSING = "bokeh is not installed: pip install fxpipe[html]"

LOOKED = """
const texts = [], look = (root) => {
  for (const one of root.querySelectorAll("*")) {
    if (one.shadowRoot) look(one.shadowRoot)
    else if (!one.children.length && one.textContent) texts.push(one.textContent)
  }
}
look(document)
return texts
"""
"""All texts of the page's elements, also of those that bokeh keeps to itself."""


def two_measured() -> tuple[Simulation, Simulation]:
    """A prediction, and a run that is given as measured."""
    predicted = simulate_schedule(one_f_one_b(2, 3), {"F": 0.001, "B": 0.002, "U": 0.001})
    slow = simulate_schedule(one_f_one_b(2, 3), {"F": 0.002, "B": 0.004, "U": 0.001})
    return replace(predicted, seconds=True), replace(slow, measured=True, seconds=True)


@pytest.mark.smoke
def test_without_bokeh_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install fxpipe\[html\]"):
        simulate_schedule(gpipe(1, 1)).html()


@pytest.mark.smoke
def test_a_large_page_is_small() -> None:
    pytest.importorskip("bokeh", reason=MISSING)
    text = simulate_schedule(zb_v(16, 256)).html()
    assert len(text.encode()) < 3_000_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    pytest.importorskip("bokeh", reason=MISSING)
    pytest.importorskip("selenium", reason="selenium is not installed")
    started = start_browser()
    if started is None:
        pytest.skip("Chromium and its driver are not installed, which test pages")
    yield started
    started.quit()


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens the page of simulations; at the end nothing was fetched and nothing went wrong."""

    def open_page(*simulations: Simulation) -> Any:
        path = tmp_path / "page.html"
        path.write_text(simulations[0].html(*simulations[1:]), encoding="utf-8")
        browser.get(path.as_uri())
        browser.execute_async_script(READY)
        return browser

    yield open_page
    fetched = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert [name for name in fetched if not name.startswith(("blob:", "data:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def column(browser: Any, name: str, view: int = 0) -> list[float]:
    found: list[float] = browser.execute_script(f"return [...fxpipe.views[{view}].{name}]")
    return found


def sight(browser: Any) -> tuple[float, float]:
    """The times between which the page shows tasks."""
    start, end = browser.execute_script(
        "const {start, end} = fxpipe.views[0].boxes.document.get_model_by_name('sight')\n"
        "return [start, end]"
    )
    return start, end


def middle(browser: Any, time: float, row: int, plot: int = 0) -> tuple[int, int]:
    """Where that time of that row is in the window."""
    x, y = browser.execute_script(
        f"""
        const plot = fxpipe.views[{plot}].boxes.document.get_model_by_name("timeline {plot}")
        const view = Bokeh.index.find_one(plot)
        const frame = view.frame
        const box = view.el.getBoundingClientRect()
        return [
          box.x + frame.bbox.left + frame.x_scale.compute({time}) - frame.x_scale.compute(
            plot.x_range.start),
          box.y + frame.bbox.top + frame.y_scale.compute({row}) - frame.y_scale.compute(
            plot.y_range.end),
        ]
        """
    )
    return round(x), round(y)


def mouse(browser: Any, x: int, y: int) -> Any:
    from selenium.webdriver.common.action_chains import ActionChains

    actions = ActionChains(browser, duration=0)
    actions.w3c_actions.pointer_action.move_to_location(x, y)
    return actions


@pytest.mark.parametrize("recipe", [one_f_one_b, zb_v, two_bw])
def test_the_page_has_every_task_with_its_times_and_what_it_waits_for(
    recipe: Any, shown: Any
) -> None:
    simulation = simulate_schedule(recipe(3, 4), links=Link(latency=0.25))
    browser = shown(simulation)
    spans, tasks = simulation.spans, [task_of(span.instruction) for span in simulation.spans]
    assert column(browser, "start") == [span.start for span in spans]
    assert column(browser, "end") == [span.end for span in spans]
    assert column(browser, "stage") == [task.stage for task in tasks]
    assert column(browser, "device") == [span.device for span in spans]
    counts = [-1 if task.microbatch is None else task.microbatch for task in tasks]
    assert column(browser, "microbatch") == counts
    last = max(task.stage or 0 for task in tasks)
    awaited, makers = column(browser, "awaited"), column(browser, "maker")
    arrivals = column(browser, "arrival")
    for k, (span, task) in enumerate(zip(spans, tasks, strict=True)):
        of = range(int(awaited[k]), int(awaited[k + 1]))
        found = {(tasks[int(makers[w])].kind, tasks[int(makers[w])].stage): arrivals[w] for w in of}
        assert task.stage is not None
        if task.kind == "F" and task.stage:
            assert set(found) == {("F", task.stage - 1)}
        if task.kind in "BI" and task.stage < last:
            assert (task.kind, task.stage + 1) in found
        for w in of:
            maker = spans[int(makers[w])]
            late = 0.25 if maker.device != span.device else 0
            assert arrivals[w] == maker.end + late <= span.start


def test_memory_is_shown_in_bytes_where_sizes_are_known_else_in_micro_batches(shown: Any) -> None:
    plain = simulate_schedule(zb_v(3, 6))
    browser = shown(plain)
    assert max(column(browser, "level")) == max(plain.device_stash)
    sizes = Sizes(values={"y0": 2048}, saved={0: 1000, 1: 3000}, parameters={0: 10_000, 1: 20_000})
    sized = simulate_schedule(one_f_one_b(2, 3), sizes=sizes)
    browser = shown(sized)
    levels, ends = column(browser, "level"), column(browser, "points")
    peaks = [max(levels[int(a) : int(b)]) for a, b in pairwise(ends)]
    assert peaks == [memory.peak for memory in sized.memory]
    told = browser.execute_script("return fxpipe.level(0, 1, 5)")
    assert told.startswith("device 1, predicted: ") and "KiB" in told


def test_a_measured_run_stands_below_what_its_times_predict(shown: Any) -> None:
    _, measured = two_measured()
    browser = shown(measured)
    assert browser.execute_script("return fxpipe.views.map((view) => view.what)") == [
        "predicted",
        "measured",
    ]
    for view in range(2):
        assert max(column(browser, "end", view)) == pytest.approx(1e3 * measured.makespan)


def test_pointing_at_a_task_tells_about_it(shown: Any) -> None:
    browser = shown(simulate_schedule(one_f_one_b(2, 4), links=Link(latency=0.5)))
    # on device 1 the first backward begins when its forward is done, at 1.5 + 1
    mouse(browser, *middle(browser, 3.5, 1)).perform()
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    told = next(text for text in browser.execute_script(LOOKED) if "backward, device" in text)
    lines = told.split("\n")
    assert lines[0] == "B0@1: backward, device 1"
    assert {"stage 1", "micro-batch 0", "version 0 of the weights"} <= set(lines)
    assert "2.5 to 4.5: takes 2" in lines
    assert "device holds 1 micro-batches" in lines
    mouse(browser, *middle(browser, 2, 1)).perform()
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    texts = browser.execute_script(LOOKED)
    assert any("waits for F0@0 of device 0 (done 1, here 1.5)" in text for text in texts)
    lines_to = browser.execute_script("return fxpipe.views[0].ways.data.x0.length")
    assert lines_to == 1


def test_it_zooms_where_the_wheel_turns_and_moves_where_it_is_dragged(shown: Any) -> None:
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    simulation = simulate_schedule(zb_v(2, 64))
    browser = shown(simulation)
    before = sight(browser)
    x, y = middle(browser, (before[0] + before[1]) / 2, 1)
    for _ in range(3):
        origin = ScrollOrigin.from_viewport(x, y)
        mouse(browser, x, y).scroll_from_origin(origin, 0, -300).perform()
    zoomed = sight(browser)
    assert before[0] < zoomed[0] < zoomed[1] < before[1]
    mouse(browser, x, y).click_and_hold().move_by_offset(-100, 0).release().perform()
    drawn = sum(browser.execute_script("return fxpipe.views[0].boxes.data.count"))
    assert 0 < drawn < len(simulation.spans)  # those that are far out of sight are not
    moved = sight(browser)
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])


def test_search_marks_the_tasks_it_finds_and_enter_goes_to_them(shown: Any) -> None:
    browser = shown(simulate_schedule(zb_v(2, 8)))
    box = browser.execute_script(
        "return Bokeh.index.find_one(fxpipe.views[0].boxes.document.get_model_by_name('search'))"
        ".input_el"
    )
    box.send_keys("W3")
    assert "4 tasks" in browser.execute_script(LOOKED)
    data = browser.execute_script("return fxpipe.views[0].boxes.data")
    marked = [at for at, alpha in zip(data["at"], data["alpha"], strict=True) if alpha == 1]
    letters, microbatches = column(browser, "look"), column(browser, "microbatch")
    looks = browser.execute_script("return fxpipe.views[0].looks")
    assert len(marked) == 4
    assert all(looks[letters[at]][0] == "W" and microbatches[at] == 3 for at in marked)
    box.send_keys("@1\n")
    assert "1 of 1 tasks: W3@1, predicted" in browser.execute_script(LOOKED)
    start, end = sight(browser)
    (hit,) = [at for at in marked if column(browser, "stage")[at] == 1]
    assert start <= column(browser, "start")[hit] < column(browser, "end")[hit] <= end
    box.send_keys(" nonsense")
    assert "write a task as F3@1" in browser.execute_script(LOOKED)


def test_the_boxes_are_as_many_as_a_screen_shows_however_many_tasks_there_are(shown: Any) -> None:
    simulation = simulate_schedule(gpipe(2, 4096))
    browser = shown(simulation)
    data = browser.execute_script("return fxpipe.views[0].boxes.data")
    assert sum(data["count"]) == len(simulation.spans)
    assert len(data["at"]) < 2 * 1300
    told = browser.execute_script("return fxpipe.tell(0, fxpipe.views[0].boxes.data, 0)")
    assert "tasks, F0@0 to F" in told


@pytest.mark.parametrize("width", [600, 1000])
def test_a_wide_table_fits_the_page_of_a_notebook(width: int, browser: Any, tmp_path: Path) -> None:
    simulation = simulate_schedule(zb_v(8, 16), links=Link(latency=0.25))
    table = simulation._repr_html_()
    path = tmp_path / "table.html"
    path.write_text(f'<meta charset="utf-8"><div style="width: {width}px">{table}</div>', "utf-8")
    browser.get(path.as_uri())
    room, needed, size, font = browser.execute_script(
        "const pre = document.querySelector('pre'), style = getComputedStyle(pre)\n"
        "return [pre.clientWidth, pre.scrollWidth, parseFloat(style.fontSize), style.fontFamily]"
    )
    assert room == width and needed <= width
    assert 8 <= size <= 0.85 * 16 and "monospace" in font
