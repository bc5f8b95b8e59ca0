"""Bytes and counts as people read them."""

from __future__ import annotations

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def size_text(num_bytes: float) -> str:
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    unit, scale = next((unit, scale) for unit, scale in reversed(UNITS.items()) if scale <= num_bytes)
    return f"{num_bytes / scale:.1f} {unit}"


def count_text(number: float) -> str:
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.0f}{unit}" if unit == "" else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} B"
