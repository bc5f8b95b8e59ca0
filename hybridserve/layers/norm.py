"""Root-mean-square normalisation (arXiv 1910.07467), statistics in float32."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.layers.context import BuildContext

_MANY_ELEMENTS = 1 << 16
"""From here torch's composite spends its time on memory passes, not on calls: a third of them is enough."""


class RMSNorm:
    """weight * x / sqrt(mean(x^2) + eps) along the last axis; the same on every rank."""

    def __init__(
        self, context: BuildContext, name: str, size: int, eps: float, *, dtype: torch.dtype | None = None
    ) -> None:
        self.shape = (size,)
        self.eps = eps
        self.weight = context.allocate(size, dtype=dtype)
        context.weights.expect(f"{name}.weight", self.shape, self._load)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() < _MANY_ELEMENTS:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)
        wide = x.float()
        scale = torch.linalg.vecdot(wide, wide).div_(self.shape[0]).add_(self.eps).rsqrt_()
        return torch.mul(wide, scale.unsqueeze(-1)).mul_(self.weight).to(x.dtype)

    def _load(self, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)


class SegmentedRMSNorm:
    """RMSNorm of each of the segments that make up the last axis, all at once: [T, total] -> [T, total].

    A decode step is bound by the number of calls, and a Mamba mixer of Jamba has three such norms.
    """

    def __init__(self, context: BuildContext, names: Sequence[str], sizes: Sequence[int], eps: float) -> None:
        self.eps = eps
        self.weight = context.allocate(sum(sizes))
        segment = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        member = torch.nn.functional.one_hot(segment).float().to(context.device)  # [total, segments]
        self.mean = member / member.sum(0)
        self.spread = member.t().contiguous()
        start = 0
        for name, size in zip(names, sizes, strict=True):
            load = partial(self._load, slice(start, start + size))
            context.weights.expect(f"{name}.weight", (size,), load)
            start += size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.mm(wide.square(), self.mean).add_(self.eps).rsqrt_()
        return torch.mm(scale, self.spread).mul_(wide).mul_(self.weight).to(x.dtype)

    def _load(self, segment: slice, tensor: torch.Tensor) -> None:
        self.weight[segment].copy_(tensor)
