"""What tests need a GPU for where devices are simulated (see ``tests/simcuda``)."""

from __future__ import annotations

import pytest
import torch

SIMULATED = torch.cuda.is_available() and torch.cuda.get_device_name(0) == "simulated"


def needs_gpu(reason: str) -> pytest.MarkDecorator:
    """Skip a test on simulated devices."""
    return pytest.mark.skipif(SIMULATED, reason=reason)
