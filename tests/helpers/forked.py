"""What ranks are forked from: all that they import, and what a first compilation looks up."""

from __future__ import annotations

import gc
import os
import threading
from importlib import import_module

os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads would not survive the fork

import torch

from tests.helpers.tiny import batch, pipe_of

for name in (
    "_pytest.config",
    "encodings.idna",
    "fxpipe.text.graph",
    "fxpipe.text.plan",
    "hypothesis",
    "pytest",
    "tests.helpers.failing",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
):
    import_module(name)

x, y = batch()
with torch.random.fork_rng(), pipe_of(2) as pipe:
    # where torch knows other devices, autograd would start threads, which survive no fork
    if torch.accelerator.current_accelerator() is not None:
        with torch.no_grad():
            pipe.eval()(x)
    else:
        pipe.step(x, target=y)
del pipe, x, y
for thread in threading.enumerate():
    if thread.name.startswith("fxpipe-"):
        thread.join()

gc.collect()
gc.freeze()  # ranks share the pages of what lies here as long as no collector writes into them
gc.set_threshold(20_000, 20, 50)
