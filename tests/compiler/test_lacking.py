"""A lack of memory outside of a step is told with its device, its stage and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpipe.compiler.lacking import naming_lacks
from fxpipe.compiler.options import Options
from fxpipe.errors import DeviceMemoryError, InputError
from fxpipe.schedules import gpipe
from fxpipe.torchtools import source

CPU, CUDA = torch.device("cpu"), (torch.device("cuda:0"), torch.device("cuda:1"))


def options(*devices: torch.device) -> Options:
    places = () if devices[0].type == "cpu" else devices
    return Options(
        model=nn.Identity(), devices=devices, torch_devices=devices, recipe=gpipe, places=places
    )


def told(error: Exception, compiling: bool, *devices: torch.device) -> DeviceMemoryError:
    inside = naming_lacks(options(*devices), compiling=compiling)
    with pytest.raises(DeviceMemoryError) as raised, inside:
        raise error
    return raised.value


def test_while_compiling_the_first_device_lacks_it() -> None:
    error = told(torch.OutOfMemoryError("no memory"), True, *CUDA)
    assert error.device == 0 and error.stage is None
    assert "(cuda:0) has no memory left to compile the model" in str(error)
    assert "more micro-batches" in str(error)


def test_tensors_that_go_to_a_device_name_its_stage() -> None:
    cause = torch.OutOfMemoryError("no memory")
    lack = source.Lack(CUDA[1], cause)
    lack.__cause__ = cause
    for compiling in (True, False):  # what compiling moves is no operation of the model
        error = told(lack, compiling, *CUDA)
        assert (error.device, error.stage) == (1, 1)
        assert "(cuda:1), stage 1, has no memory left for its parameters" in str(error)
        assert "memory_limits=" in str(error) and error.__cause__ is cause


def test_cpu_devices_share_the_memory_of_the_host() -> None:
    error = told(MemoryError(), False, CPU, CPU)
    assert str(error).startswith("the host has no memory left") and error.stage is None


def test_other_errors_stay_as_they_are() -> None:
    for error in (InputError("give another"), ZeroDivisionError()):
        with pytest.raises(type(error)) as raised, naming_lacks(options(CPU)):
            raise error
        assert raised.value is error
