"""Libraries of C kernels as the environment of this very moment wants them, say those of another compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridserve.kernels.native import declare, open_library

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def load_anew(source: Path, functions: Mapping[str, Sequence[type[Any]]]) -> ctypes.CDLL:
    """Like `native.load`, which remembers what it has loaded."""
    return declare(open_library(source), functions)
