"""Operators on rows by Triton, for NVIDIA GPUs. Knows shapes and tiles; the arithmetic is in
`triton_kernels`.

A row's result has the same bits in any company.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels.pointwise.interface import PointwiseBackend
from hybridserve.kernels.triton_support import obstacle, power_of_2, rows_of, upload

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities


def num_warps(block: int) -> int:
    """For rows of `block` elements: at least 8 elements a thread, and at most 8 warps."""
    return min(8, max(1, block // 256))


class Triton(PointwiseBackend):
    """Keeps where segments start, on the device."""

    name = "triton"

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return obstacle(capabilities)

    def __init__(self) -> None:
        from hybridserve.kernels.pointwise import triton_kernels

        self._kernels = triton_kernels
        self._starts: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        x, weight = rows_of(x), weight.contiguous()
        num_rows, row_size = x.shape
        y = x.new_empty(x.shape)
        if not num_rows:
            return y
        block = power_of_2(max(sizes))
        self._kernels.rms_norm[(num_rows, len(sizes))](
            *(x, weight, y, self._segments(sizes, x.device), row_size, x.stride(0), eps),
            NUM_SEGMENTS=len(sizes),
            BLOCK=block,
            num_warps=num_warps(block),
        )
        return y

    def _segments(self, sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
        key = (sizes, device)
        if key not in self._starts:
            with torch.inference_mode(False):  # else it could not be used outside of inference mode
                self._starts[key] = upload([*accumulate(sizes, initial=0)], device)
        return self._starts[key]
