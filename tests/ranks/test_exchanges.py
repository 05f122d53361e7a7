"""What an exchange of ranks holds to, whatever order messages come in."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fxpipe import RankError
from fxpipe.runtime.ranks.inbox import OUTCOME, Exchange, Inbox
from fxpipe.runtime.ranks.links import CLOSED

pytestmark = pytest.mark.timeout(120, method="thread")

NAMES = tuple(f"rank {rank} (host, process {rank})" for rank in range(3))
FAILED = {"error": "ValueError: no", "traceback": "the traceback"}


def heard(inbox: Inbox, exchange: Exchange, seconds: float = 0.3) -> Any:
    return inbox.values(exchange, seconds, held=False)


def test_an_exchange_that_was_complete_where_a_rank_failed_later_is_complete_here_too() -> None:
    inbox = Inbox(NAMES, 0)
    end = Exchange(4, 2, "end")
    inbox.say(1, end, "one")
    inbox.fail(1, 4, 3, FAILED)  # after this exchange
    threading.Timer(0.1, inbox.say, (2, end, "two")).start()
    assert heard(inbox, end, 10) == {1: "one", 2: "two"}
    with pytest.raises(RankError, match=r"rank 1 .* failed: ValueError: no") as raised:
        heard(inbox, Exchange(4, 3, "more"))
    assert raised.value.rank == 1 and "the traceback" in raised.value.__notes__[-1]


def test_a_failure_before_an_exchange_was_complete_ends_it() -> None:
    inbox = Inbox(NAMES, 0)
    inbox.say(1, Exchange(4, 2, "end"), "one")
    inbox.fail(1, 4, 2, FAILED)
    with pytest.raises(RankError, match="ValueError"):
        heard(inbox, Exchange(4, 2, "end"))


def test_a_rank_that_has_said_its_value_may_be_gone_before_the_others_have() -> None:
    inbox = Inbox(NAMES, 0)
    end = Exchange(4, 2, "end")
    inbox.say(1, end, "one")
    inbox.lose(1, CLOSED)
    inbox.say(2, end, "two")
    assert heard(inbox, end) == {1: "one", 2: "two"}
    with pytest.raises(RankError, match=CLOSED) as raised:
        heard(inbox, Exchange(5, 0, "the beginning of a call"))
    assert raised.value.rank == 1


def test_the_first_rank_that_was_lost_is_named_where_another_one_left_because_of_it() -> None:
    inbox = Inbox(NAMES, 0)
    inbox.lose(2, "has ended")
    inbox.lose(1, CLOSED)
    with pytest.raises(RankError, match="has ended") as raised:
        heard(inbox, Exchange(5, 0, "the beginning of a call"))
    assert raised.value.rank == 2


def test_a_rank_that_went_on_after_another_one_failed_is_not_blamed() -> None:
    inbox = Inbox(NAMES, 0)
    inbox.say(2, Exchange(5, 0, "the beginning of a call"), "step")  # it has heard of the failure
    timer = threading.Timer(0.1, inbox.fail, (1, 4, 1, FAILED))
    timer.start()
    with pytest.raises(RankError, match="ValueError: no") as raised:
        heard(inbox, Exchange(4, 1, "the call"), 10)
    assert raised.value.rank == 1


def test_values_and_failures_of_calls_that_are_over_do_not_matter() -> None:
    inbox = Inbox(NAMES, 0)
    inbox.fail(1, 4, 1, FAILED)
    inbox.forget(4)
    inbox.fail(2, 4, 0, FAILED)
    assert inbox.failure(4, 9) is None
    inbox.say(1, Exchange(4, 2, "end"), "old")
    for rank in (1, 2):
        inbox.say(rank, Exchange(5, 0, "the beginning of a call"), rank)
    assert heard(inbox, Exchange(5, 0, "the beginning of a call")) == {1: 1, 2: 2}


def test_after_a_failure_ranks_recover_wherever_they_were() -> None:
    inbox = Inbox(NAMES, 0)
    inbox.fail(1, 4, 1, FAILED)
    inbox.say(2, Exchange(4, 1, "end"), None)
    for rank in (1, 2):
        inbox.say(rank, Exchange(4, -1, OUTCOME), 7 + rank)
    assert heard(inbox, Exchange(4, -1, OUTCOME)) == {1: 8, 2: 9}


def test_what_a_rank_found_out_for_all_is_told_in_its_own_words() -> None:
    inbox = Inbox(NAMES, 0)
    error = inbox.fail(1, 4, 1, {"error": "rank 2 is gone", "traceback": "", "rank": 2})
    assert error.rank == 2 and str(error) == "rank 2 is gone"


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    inbox = Inbox(NAMES, 0)
    inbox.say(1, Exchange(1, 0, "the beginning of a call"), "step")
    with pytest.raises(RankError, match=r"rank 2 .* has not reached") as raised:
        heard(inbox, Exchange(1, 0, "the beginning of a call"))
    assert raised.value.rank == 2
