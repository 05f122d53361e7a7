"""Quantities as short texts."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """``2.0 MiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    size, units = count / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while size >= 1023.95 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}"


def time_text(seconds: float) -> str:
    """``3.2 ms``, with three digits."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
