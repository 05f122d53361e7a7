"""Weights that are mapped from a file, and what of them a process has copied."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def mapped(model: nn.Module, path: Path) -> None:
    """Write a model's weights to a file of torch or safetensors, and let the model read them there
    by whatever the file's own library maps."""
    if path.suffix == ".safetensors":
        save_file(model.state_dict(), path)
        model.load_state_dict(load_file(path), assign=True)
    else:
        torch.save(model.state_dict(), path)
        model.load_state_dict(torch.load(path, mmap=True), assign=True)


def copied_pages(path: Path) -> tuple[int, int]:
    """KiB of a mapped file that are in memory, and of them those that this process has written, so
    that they are copies of its own; as Linux counts them."""
    resident = written = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if "-" in key.split()[0]:  # the addresses of the next mapping
            inside = line.endswith(str(path))
        elif inside and key == "Rss":
            resident += int(rest.split()[0])
        elif inside and key == "Anonymous":
            written += int(rest.split()[0])
    return resident, written
