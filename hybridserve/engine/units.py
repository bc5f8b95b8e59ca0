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


def size_below(num_bytes: int) -> tuple[str, int]:
    """The largest size of that many bytes or less that is a unit's multiple in tenths: as a setting writes
    it, and the bytes that it is read as."""
    unit, scale = next((unit, scale) for unit, scale in reversed(UNITS.items()) if scale <= num_bytes)
    if scale == 1:
        return f"{num_bytes}{unit}", num_bytes
    tenths = num_bytes * 10 // scale
    return f"{tenths / 10}{unit}", int(tenths / 10 * scale)
