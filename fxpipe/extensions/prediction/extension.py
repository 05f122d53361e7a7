"""The extension that lets batches read predicted weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import Extension


@dataclass(frozen=True)
class Prediction(Extension):
    """Let a batch read predicted weights instead of weights that are as many versions old as the
    schedule's delay says.

    They are predicted from the optimizer's momentum, for the time when the batch's update comes:
    SpecTrain for SGD with momentum, XPipe for Adam and AdamW. Without a delay there is nothing to
    predict. In a schedule's text, ``predict`` in the header says the same.
    """

    def options(self, options: Options) -> Options:
        """The options with a recipe that predicts. Raises InputError if the first step chooses the
        schedule."""
        if options.decides:
            raise InputError(
                f'schedule="{options.decides}" may decide that batches read the newest weights, '
                "and Prediction is for those that read older ones; leave it out, or give what "
                "fxpipe.search_schedule(..., flush=False) finds"
            )
        return replace(options, recipe=replace(options.recipe, predict=True))

    def check(self, options: Options) -> None:
        """Raise InputError with a sharded optimizer."""
        if options.sharded:
            raise InputError(
                "Prediction needs the momentum of all weights, and with shard_optimizer=True a "
                "replica has that of a part; leave one of them out"
            )
