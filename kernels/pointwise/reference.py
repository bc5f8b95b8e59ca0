"""The plainest definition of operators on rows: one segment at a time, in float32.

Knows nothing of speed; every other backend is tested against it.
"""

from __future__ import annotations

import torch

from hybridserve.kernels.pointwise.interface import PointwiseBackend


class Reference(PointwiseBackend):
    name = "reference"

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        parts = []
        start = 0
        for size in sizes:
            segment = slice(start, start + size)
            values = x[:, segment].float()
            scale = torch.rsqrt(values.square().mean(1, keepdim=True) + eps)
            parts.append(values * scale * weight[segment].float())
            start += size
        return torch.cat(parts, 1).to(x.dtype)
