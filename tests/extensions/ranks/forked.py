"""What ranks are forked from: all that they import, and what a first compilation looks up."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads would not survive the fork

import torch
from torch import Tensor
from torch.nn import functional

import fxpipe
from tests.extensions.ranks import test_checkpoints, test_equal, test_replicas
from tests.helpers.failing import Skipping
from tests.helpers.remembered import remembering
from tests.helpers.times import equal_times
from tests.helpers.tiny import CUTS, batch, pipe_of

for name in (
    "_pytest.config",
    "encodings.idna",
    "fxpipe.text.plan",
    "hypothesis",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
):
    import_module(name)


def pipes() -> Iterator[tuple[fxpipe.Pipeline, Tensor, Tensor]]:
    """Pipes of the models that most ranks compile, with a batch; ranks need not trace them."""
    yield pipe_of(2), *batch()
    own: dict[str, Any] = {"microbatches": 2, "partition": CUTS[2]}
    yield fxpipe.compile(Skipping(), 2, loss=functional.cross_entropy, **own), *batch()
    images, tokens = test_equal.images(0), test_equal.tokens(0)
    yield test_equal.pipe_of(2, test_equal.skips()), images, images
    yield test_equal.pipe_of(2, test_equal.tied()), tokens, tokens
    yield test_checkpoints.pipe_of(2), *test_checkpoints.batch(0)
    own = {"microbatches": 4, "partition": ["third"]}
    replica = fxpipe.compile(test_replicas.made(), 2, loss=functional.mse_loss, **own)
    yield replica, *test_replicas.batch(0, 0)


# where torch knows other devices, autograd would start threads, which survive no fork
if torch.accelerator.current_accelerator() is None:
    with torch.random.fork_rng(), remembering(), equal_times():
        for pipe, x, y in pipes():
            with pipe:
                pipe.step(x, target=y)
    del pipe, x, y
for thread in threading.enumerate():
    if thread.name.startswith("fxpipe-"):
        thread.join()

gc.collect()
gc.freeze()  # ranks share the pages of what lies here as long as no collector writes into them
gc.set_threshold(20_000, 20, 50)
