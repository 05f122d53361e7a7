"""Where messages about a run go: to its channels, which this rank may open later than others."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from fxpipe.errors import RankError
from fxpipe.runtime.ranks.message import Message

if TYPE_CHECKING:
    from fxpipe.runtime.ranks.channels import RankChannels

Key = tuple[int, int]
"""The number of the call that has opened a run's channels, and how many it had opened before."""


class Delivery:
    """The channels of the runs of a group of ranks, and messages for those not opened yet."""

    def __init__(self, changed: AbstractContextManager[object]) -> None:
        """No channels are open.

        Args:
            changed: held while a message is delivered.
        """
        self._changed = changed
        self._key: Key = 0, 0
        self._channels = weakref.WeakValueDictionary[Key, "RankChannels"]()
        self._early: dict[Key, list[tuple[int, Message]]] = {}

    def begin(self, call: int) -> None:
        """A call begins; whatever was not delivered in earlier ones never will be."""
        with self._changed:
            self._key = call, 0
            self._early = {key: found for key, found in self._early.items() if key[0] >= call}

    def open(self, channels: RankChannels) -> Key:
        """Deliver messages to these channels from now on. Returns their key, alike on all ranks."""
        with self._changed:
            self._key = key = self._key[0], self._key[1] + 1
            self._channels[key] = channels
            for rank, message in self._early.pop(key, []):
                channels.deliver(rank, message)
        return key

    def deliver(self, rank: int, message: Message) -> None:
        """Deliver a message to the channels with the key that it begins with, or keep it."""
        call, number = message.key[0]
        with self._changed:
            channels = self._channels.get((call, number))
            if channels is not None:
                channels.deliver(rank, message)
            elif (call, number) > self._key:  # else of a run that is over here
                self._early.setdefault((call, number), []).append((rank, message))

    def stop(self, error: RankError) -> None:
        """Stop what runs because of an error."""
        with self._changed:
            running = list(self._channels.values())
        for channels in running:
            channels.fail(error)
