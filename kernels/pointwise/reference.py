"""The plainest definition of operators on rows: one segment or row at a time, in float32.

Knows nothing of speed; every other backend is tested against it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

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

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        x += residual
        return self.rms_norm(x, weight, eps, (x.shape[1],))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, 1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = cos.shape[-1]
        y = x.to(torch.float32, copy=True)
        first, second = y[..., :half].clone(), y[..., half : 2 * half].clone()
        y[..., :half] = first * cos.float() - second * sin.float()
        y[..., half : 2 * half] = second * cos.float() + first * sin.float()
        return y.to(x.dtype)

    def keep_top_k(self, probs: torch.Tensor, top_k: torch.Tensor) -> None:
        for row, k in zip(probs, top_k.tolist(), strict=True):
            if 0 < k < len(row):
                row[row < row.sort(descending=True).values[k - 1]] = 0

    def keep_top_p(self, probs: torch.Tensor, top_p: torch.Tensor) -> None:
        for row, p in zip(probs, top_p.tolist(), strict=True):
            if p < 1:
                ordered = row.double().sort(descending=True).values
                inside = ordered.cumsum(0) - ordered < p * ordered.sum()
                inside[0] = True
                row[row < ordered[inside][-1]] = 0
