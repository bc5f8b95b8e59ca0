"""What the Triton backends share: when they can run, how sizes become tiles, how a step's facts reach the
device. Knows no operator, and does not import Triton: that is left to each operator's `triton_kernels`, which
only a backend that runs imports.

Every backend keeps to the same rules. A tile is chosen from shapes by a pure function, never by timing, so
the same call takes the same path. Sums have a fixed order: no atomics. Offsets that grow with memory are
64-bit. Nothing waits for the device, so that all of a step can be queued, or captured, ahead of it. Integers
that change with the batch are not specialized: a new number of tokens compiles nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hybridserve.kernels.registry import Capabilities

DTYPES = ("float32", "bfloat16", "float16")


def obstacle(capabilities: Capabilities) -> str | None:
    """Why no Triton backend can run here, or None."""
    if capabilities.device != "cuda":
        return "no CUDA device"
    if capabilities.dtype not in DTYPES:
        return f"has no arithmetic for {capabilities.dtype}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def import_obstacle(module: str, package: str) -> str | None:
    """Why an optional package can't be used, or None: one built for another torch can't be
    imported."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return f"{package} is not installed"
        return f"{package} can't be imported: {error}"
    except (ImportError, OSError) as error:
        return f"{package} can't be imported: {error}"
    return None


def cdiv(size: int, step: int) -> int:
    return -(-size // step)


def power_of_2(size: int, least: int = 1) -> int:
    """The smallest power of 2 that is neither below `size` nor below `least`, which is one."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def upload(
    values: Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.int32], device: torch.device
) -> torch.Tensor:
    """Whole numbers as int32 on the device, without waiting for what it is doing."""
    host = torch.from_numpy(np.asarray(values, dtype=np.int32))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [T, n], or a copy of it, whose rows may lie apart but not their elements."""
    return x if x.stride(-1) == 1 else x.contiguous()
