"""Measure a timeline's page in a real browser: its size, time to draw, and frames per second.

Run it with ``python -m benchmarks.page`` on a machine with Chromium and its driver.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.report import Figure, Report
from fxpipe.errors import InputError
from fxpipe.extensions.simulator import simulate_schedule
from fxpipe.ir.recipe import find_recipe

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "no-first-run",
    "window-size=1300,1000",
)

READY = """
const [done] = arguments
const wait = () => globalThis.fxpipe ? requestAnimationFrame(() => done(performance.now()))
                                     : setTimeout(wait, 10)
wait()
"""
"""Waits until tasks are drawn; gives the milliseconds since the page was opened."""

PAN = """
const [part, frames, done] = arguments
const sight = fxpipe.views[0].boxes.document.get_model_by_name("sight")
const [low, high] = sight.bounds, width = (high - low) * part
let frame = 0, begin
const move = () => {
  if (frame === 0) begin = performance.now()
  if (frame === frames) return done(1e3 * frames / (performance.now() - begin))
  const start = low + width * frame++ / 30  // a screen in 30 frames
  sight.setv({start, end: start + width})
  requestAnimationFrame(move)
}
sight.setv({start: low, end: low + width})
requestAnimationFrame(() => requestAnimationFrame(move))
"""
"""Moves what is in sight; gives the frames a second."""


def start_browser() -> Any:
    """A headless Chromium, driven by selenium, or None where there is none."""
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        return None
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_script_timeout(120)
    return started


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a timeline's page in a browser.")
    parser.add_argument("--schedule", default="zb-v")
    parser.add_argument("-p", type=int, default=16)
    parser.add_argument("-m", type=int, default=256)
    given = parser.parse_args()
    machine = describe()
    browser = start_browser()
    if browser is None:
        raise InputError("there is no Chromium with its driver; install both")
    simulation = simulate_schedule(find_recipe(given.schedule)(given.p, given.m))
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            path.write_text(simulation.html(), encoding="utf-8")
            browser.get(path.as_uri())
            figures = [
                Figure("size, at most 3", path.stat().st_size / 1e6, "MB"),
                Figure("drawn after, at most 2", browser.execute_async_script(READY) / 1e3, "s"),
            ]
            for part in (0.5, 0.1, 0.02, 0.005):
                speed = browser.execute_async_script(PAN, part, 60 if part < 0.5 else 30)
                figures.append(Figure(f"moving, {part:.1%} in sight, at least 30", speed, "/s"))
    finally:
        browser.quit()
    settings: dict[str, str | int] = {
        "schedule": f"{given.schedule} over {given.p} devices, {given.m} micro-batches",
        "tasks": len(simulation.spans),
        "browser": "headless Chromium without a GPU",
    }
    Report("page", "A timeline's page", settings, figures, machine).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
