"""Norms in C, for CPUs, and the other operators on rows as torch has them. Knows how to hand tensors over;
the arithmetic is in `native.c`.

A row's result depends neither on the other rows nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels import native
from hybridserve.kernels.native import INT, KINDS, POINTER
from hybridserve.kernels.pointwise.torch_native import TorchNative

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities

SOURCE = Path(__file__).resolve().with_name("native.c")


FUNCTIONS = {
    "rms_norm": (
        *(POINTER, INT, INT, POINTER, INT),  # x, weight
        *(POINTER, INT, INT, INT, ctypes.c_double),  # segments, rows, size of a row, eps
        *(POINTER, INT),
    ),
}
"""What native.c has, by the types of arguments."""


class Native(TorchNative):
    """RuntimeError where there is no library: ask `why_not` first."""

    name = "native"
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cpu":
            return "runs on CPUs only"
        return native.obstacle(*cls.sources(capabilities))

    @classmethod
    def sources(cls, capabilities: Capabilities) -> tuple[Path, ...]:
        return (SOURCE,)

    def __init__(self) -> None:
        super().__init__()
        self._rms_norm = native.load(SOURCE, FUNCTIONS).rms_norm

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        if not weight.is_contiguous():
            weight = weight.contiguous()
        num_rows, row_size = x.shape
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._rms_norm(
            x.data_ptr(),
            x.stride(0),
            KINDS[x.dtype],
            weight.data_ptr(),
            KINDS[weight.dtype],
            _int64_array(sizes),
            len(sizes),
            num_rows,
            row_size,
            eps,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y


@functools.cache
def _int64_array(sizes: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(sizes))(*sizes)
