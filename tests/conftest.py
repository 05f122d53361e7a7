"""What tests share.

Golden texts: a test compares with a file in tests/golden, ``--update-golden`` writes it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fxpipe.runtime import choice

GOLDEN = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]
"""``golden(name, text)``: the text equals that of the file ``name``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C raises, also in the background of a shell, where it is ignored by default."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def a_thread_for_each_device() -> Iterator[None]:
    """Where a test does not say who runs the devices' lists, no measurement of this machine does:
    handing the interpreter lock over takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "hand_over", lambda: 0.0)
        patch.setattr(choice, "processors", lambda: 8)
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Each device and the test itself compute with one intra-op thread: sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
