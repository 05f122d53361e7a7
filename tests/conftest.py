"""Options, fixtures and hooks that all tests share.

``make test`` leaves out what is marked with ``@pytest.mark.deep``: one more of a kind of which it
runs another. Of an extension's folder it runs what is marked with ``@pytest.mark.smoke``, if
anything is: the others there are deep. ``make deep`` runs all, with more examples of each, and
``pytest tests/extensions/planner`` all that stands there. ``make docs`` runs what is marked with
``@pytest.mark.pages``.

Golden texts: a test compares a text with a file in tests/golden; ``--update-golden`` writes it.

Quick tests are those in the folders ``QUICK``. They compile or trace no model and start no process,
except the few marked with ``@pytest.mark.models``. ``--quick`` runs only quick tests.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch

import fxpipe
from fxpipe import extend
from fxpipe.ir.task import KINDS
from fxpipe.runtime import choice
from tests.helpers.remembered import remembering
from tests.helpers.times import equal_times

# torch looks up the names of hosts that connect: where no name server answers, let it be soon
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

TESTS = Path(__file__).parent
EXTENSIONS = TESTS.parent / "fxpipe" / "extensions"
TARGETS = chain.from_iterable(each.values() for each in extend._REGISTRY.values())
REGISTERED = {extend._package(t).rpartition(".")[2] for t in TARGETS if isinstance(t, str)}
DELETED = {name for name in REGISTERED if not (EXTENSIONS / name).is_dir()}
"""The extensions that the registry knows, and whose folders were deleted."""

GOLDEN = TESTS / "golden"
QUICK = (
    "extensions/comparison",
    "extensions/draw",
    "extensions/list_schedules",
    "extensions/more_schedules",
    "extensions/simulator",
    "ir",
    "schedules",
    "text",
    "verify",
)
REMEMBERING = (
    "compiler",
    "extensions/checkpoint",
    "extensions/clipping",
    "extensions/copies",
    "extensions/deferred_batchnorm",
    "extensions/dispatch",
    "extensions/inductor",
    "extensions/loss_weight",
    "loss_weight",
    "extensions/metrics",
    "extensions/offload",
    "extensions/overlapping",
    "extensions/own_tasks",
    "extensions/planner",
    "python_state",
    "extensions/ranks",
    "extensions/replicas",
    "extensions/simulator",
    "extensions/slices",
    "extensions/streams",
    "ir",
    "models/test_autocast.py",
    "models/test_determinism.py",
    "models/test_exactness.py",
    "models/test_peers.py",
    "models/test_split_training.py",
    "partition",
    "runtime",
    "schedules",
    "verify",
)
"""Files and folders whose tests share traced graphs and their derivatives between equal models,
unless a test or file is marked with ``traces``."""

LONGEST = (
    "extensions/inductor/test_inductor.py",
    "extensions/inductor/test_inductor_images.py",
    "extensions/inductor/test_inductor_ranks.py",
    "extensions/inductor/test_inductor_values.py",
    "extensions/planner/test_ranks.py",
    "extensions/ranks",
    "extensions/replicas",
    "extensions/simulator/test_ranks.py",
    "extensions/simulator/test_ranks_looking.py",
    "test_examples.py",
    "test_notebooks.py",
)
"""The longest tests, which run first, so that no worker is left with them at the end, and so that
tests that share compiled libraries are not spread over workers that all compile them."""

Golden = Callable[[str, str], None]
"""``golden(name, text)`` asserts that the text equals the file ``name``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="run only tests that compile no model and start no process",
    )


def pytest_configure() -> None:
    there = [
        f for f in QUICK if not f.startswith("extensions/") or (EXTENSIONS.parent / f).is_dir()
    ]
    if lost := [folder for folder in there if not (TESTS / folder).is_dir()]:
        raise pytest.UsageError(f"QUICK in {__file__} names folders that are not there: {lost}")


def lacks(text: str, deleted: Collection[str] = DELETED) -> str | None:
    """Why a test is skipped, by the text of its error: it needs an extension that was deleted."""
    names = re.findall(r"(?:fxpipe|tests)[./]extensions[./](\w+)", text)
    lost = next((name for name in names if name in deleted), None)
    return lost and f"needs the extension {lost}"


Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


def skipped(report: Report, path: Path, text: str) -> Report:
    """The report, which skips what has failed for want of a deleted extension."""
    if report.failed and (reason := lacks(text)):
        report.outcome, report.longrepr = "skipped", (str(path), 0, reason)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    report = skipped(report, collector.path, str(report.longrepr))
    if report.skipped:
        # pytest keeps what it could not import, so that others would import half of it
        name = ".".join(collector.path.relative_to(TESTS.parent).with_suffix("").parts)
        sys.modules.pop(name, None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return skipped(report, item.path, f"{report.longrepr}{report.capstderr}")


@cache
def within(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(TESTS / place) for place in places)


def in_quick_folder(path: Path) -> bool:
    return within(path, QUICK)


def is_quick(item: pytest.Item) -> bool:
    return in_quick_folder(item.path) and item.get_closest_marker("models") is None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the other files with ``--quick``."""
    elsewhere = collection_path.suffix == ".py" and not in_quick_folder(collection_path)
    return True if elsewhere and config.getoption("--quick") else None


def rest_of_extensions(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests beside those that show that an extension works."""
    shown = {item.path.parent for item in items if item.get_closest_marker("smoke")}
    for item in items:
        if item.path.parent in shown and item.get_closest_marker("smoke") is None:
            yield item


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        slow = [item for item in items if not is_quick(item)]
        items[:] = [item for item in items if is_quick(item)]
        config.hook.pytest_deselected(items=slow)
    for item in items:
        for mark in item.iter_markers("needs"):
            if reason := lacks(f"fxpipe.extensions.{mark.args[0]}"):
                item.add_marker(pytest.mark.skip(reason))
    for item in rest_of_extensions(items):
        item.add_marker("deep")
    items.sort(key=lambda item: (not within(item.path, LONGEST), is_quick(item)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Pause the garbage collector during imports: all that is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Set one intra-op thread, and keep the garbage collector away from all that is imported.

    Tests build and drop graphs all the time, so the collector looks for cycles less often than by
    default.
    """
    torch.set_num_threads(1)
    # pytest adds its handlers to loggers that do not propagate. With a handler on this one, torch
    # would log each size, guard and stack of a trace, which nobody reads.
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.fixture(autouse=True)
def quick_tests_stay_quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_quick(request.node):
        return

    def refuse(*args: Any, **kwargs: Any) -> Any:
        pytest.fail(
            f"tests in {', '.join(QUICK)} compile no model, trace none and start no process; "
            "mark this one with @pytest.mark.models"
        )

    monkeypatch.setattr(fxpipe, "compile", refuse)
    monkeypatch.setattr(torch.export, "export", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture(autouse=True)
def like_models_are_traced_once(request: pytest.FixtureRequest) -> Iterator[None]:
    traces = request.node.get_closest_marker("traces") is not None
    with remembering() if within(request.path, REMEMBERING) and not traces else nullcontext():
        yield


@pytest.fixture(autouse=True)
def what_is_defined_stays_in_its_test() -> Iterator[None]:
    """Remove the schedules and kinds of tasks that a test has registered."""
    with patch.dict(extend._REGISTRY["recipe"]), patch.dict(KINDS):
        yield


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_what_is_new() -> None:
    """Keep the garbage collector away from the objects of earlier files.

    Some tests collect after each step, and remembered traces fill the heap.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Make Ctrl-C raise in background jobs, too, where shells ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def a_thread_for_each_device() -> Iterator[None]:
    """Let each device have a thread, however small a test's tensors are, and however many
    processors there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "HAND_OVER", 0.0)
        patch.setattr(choice, "processors", lambda: 8)
        yield


@pytest.fixture(scope="session", autouse=True)
def operations_take_equal_times() -> Iterator[None]:
    """Keep measurements of this machine from deciding where a model is cut."""
    with equal_times():
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    update = bool(request.config.getoption("--update-golden"))

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.write_text(text)
        elif not path.exists():
            pytest.fail(f"there is no golden file {name}; run pytest --update-golden and read it")
        assert text == path.read_text()

    return check


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Reset to one intra-op thread after each test.

    Kernels round differently with other numbers of threads, and the tests' workers share the cores.
    """
    yield
    torch.set_num_threads(1)
