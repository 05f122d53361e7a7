"""The tests of values that follow weights to CUDA devices, on simulated devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from tests.extensions.model_check import test_following as following
from tests.simcuda.process import on_devices, simulated

pytestmark = simulated


@pytest.mark.parametrize(
    "test",
    [
        following.test_a_function_that_reads_weights_of_two_devices_is_taken_apart,
        following.test_a_value_that_is_written_with_a_weight_of_another_device_stays_where_it_is,
    ],
)
def test_values_go_to_the_devices_of_weights(test: Callable[[], None]) -> None:
    on_devices(test)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_are_written_where_they_are(kind: type[nn.Module]) -> None:
    on_devices(
        following.test_statistics_are_written_where_they_are_if_weights_are_on_another_device, kind
    )
