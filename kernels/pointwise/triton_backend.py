"""Operators on rows by Triton, for NVIDIA GPUs. Knows shapes and tiles; the arithmetic is in
`triton_kernels`.

A row's result has the same bits in any company.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels.pointwise.torch_draw import TorchDraw
from hybridserve.kernels.triton_support import cdiv, obstacle, power_of_2, rows_of, upload

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities


def num_warps(block: int) -> int:
    """For rows of `block` elements: at least 8 elements a thread, and at most 8 warps."""
    return min(8, max(1, block // 256))


class Triton(TorchDraw):
    """Keeps where segments start, on the device."""

    name = "triton"
    can_be_recorded = True

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
        return self._norm(rows_of(x), None, weight, eps, sizes)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if x.stride(-1) != 1:
            return self.rms_norm(x.add_(residual), weight, eps, (x.shape[1],))
        return self._norm(x, rows_of(residual), weight, eps, (x.shape[1],))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = rows_of(gate_up)
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        y = gate_up.new_empty(num_rows, size)
        if num_rows and size:
            block = min(1024, power_of_2(size))
            self._kernels.silu_and_mul[(num_rows, cdiv(size, block))](
                *(gate_up, y, size, gate_up.stride(0)), BLOCK=block, num_warps=num_warps(block)
            )
        return y

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = rows_of(x)
        num_tokens, num_heads, head_dim = x.shape
        y = x.new_empty(x.shape)
        if num_tokens:
            wide = power_of_2(head_dim)
            heads = min(power_of_2(num_heads), max(1, 4096 // wide))
            self._kernels.rotate[(num_tokens, cdiv(num_heads, heads))](
                *(x, cos.contiguous(), sin.contiguous(), y, *x.stride()[:2]),
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                HALF=cos.shape[-1],
                BLOCK_H=heads,
                BLOCK_D=wide,
                num_warps=num_warps(heads * wide),
            )
        return y

    def keep_top_k(self, probs: torch.Tensor, top_k: torch.Tensor) -> None:
        self._keep_largest(probs, top_k, mass=False)

    def keep_top_p(self, probs: torch.Tensor, top_p: torch.Tensor) -> None:
        self._keep_largest(probs, top_p, mass=True)

    def _keep_largest(self, probs: torch.Tensor, limits: torch.Tensor, *, mass: bool) -> None:
        if probs.stride(1) != 1:
            raise ValueError("probabilities of a row must lie side by side")
        num_rows, row_size = probs.shape
        if num_rows:
            self._kernels.keep_largest[(num_rows,)](
                *(probs, limits.contiguous(), row_size, probs.stride(0)),
                MASS=mass,
                BLOCK=min(2048, power_of_2(row_size)),
                num_warps=8,
            )

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        sizes: tuple[int, ...],
    ) -> torch.Tensor:
        """Of rows whose elements lie side by side."""
        weight = weight.contiguous()
        num_rows, row_size = x.shape
        y = x.new_empty(x.shape)
        added = x if residual is None else residual
        if not num_rows:
            return y
        block = power_of_2(max(sizes))
        self._kernels.rms_norm[(num_rows, len(sizes))](
            *(x, added, weight, y, self._segments(sizes, x.device)),
            *(row_size, x.stride(0), added.stride(0), eps),
            HAS_RESIDUAL=residual is not None,
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
