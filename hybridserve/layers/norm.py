"""Root-mean-square normalisation (arXiv 1910.07467): its weights; the arithmetic is a backend's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hybridserve.layers.footprint import OTHER

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hybridserve.layers.context import BuildContext


class RMSNorm:
    """weight * x / sqrt(mean(x^2) + eps) along the last axis of x [T, size]; the same on every rank."""

    def __init__(
        self, context: BuildContext, name: str, size: int, eps: float, *, dtype: torch.dtype | None = None
    ) -> None:
        self.sizes = (size,)
        self.eps = eps
        self.backend = context.pointwise
        self.weight = context.allocate(size, dtype=dtype)
        context.footprint.widen(OTHER, 3 * size)  # what came in, what the norm gives, what a layer adds
        context.weights.expect(f"{name}.weight", self.sizes, self._load)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps, self.sizes)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of x + residual, which x becomes."""
        return self.backend.add_rms_norm(x, residual, self.weight, self.eps)

    def _load(self, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)


class SegmentedRMSNorm:
    """RMSNorm of each of the segments that make up the last axis, all at once: [T, total] -> [T, total].

    A decode step is bound by the number of calls, and a Mamba mixer of Jamba has three such norms.
    """

    def __init__(self, context: BuildContext, names: Sequence[str], sizes: Sequence[int], eps: float) -> None:
        self.sizes = tuple(sizes)
        self.eps = eps
        self.backend = context.pointwise
        self.weight = context.allocate(sum(sizes))
        start = 0
        for name, size in zip(names, sizes, strict=True):
            load = partial(self._load, slice(start, start + size))
            context.weights.expect(f"{name}.weight", (size,), load)
            start += size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps, self.sizes)

    def _load(self, segment: slice, tensor: torch.Tensor) -> None:
        self.weight[segment].copy_(tensor)
