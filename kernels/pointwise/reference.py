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

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = [int((row == row.max()).nonzero()[0]) if not row.isnan().any() else 0 for row in logits]
        return torch.tensor(places, dtype=torch.int64), logits.isfinite().all(1)

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        uniform: torch.Tensor,
        *,
        min_p: torch.Tensor | None = None,
        top_k: torch.Tensor | None = None,
        top_p: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In float64 from the quotient on."""
        drawn = torch.full_like(rows, -1)
        for i, row in enumerate(rows.tolist()):
            scaled = logits[row : row + 1] / temperature[i].clamp(min=1e-5)
            probs = torch.softmax(scaled.double(), 1)
            if probs.isnan().any():
                continue
            if min_p is not None:
                probs[probs < min_p[i] * probs.max()] = 0
            if top_k is not None:
                self.keep_top_k(probs, top_k[i : i + 1])
            if top_p is not None:
                self.keep_top_p(probs, top_p[i : i + 1])
            cumulative = probs[0].cumsum(0)
            drawn[i] = (cumulative > uniform[i] * cumulative[-1]).nonzero()[0, 0]
        return drawn
