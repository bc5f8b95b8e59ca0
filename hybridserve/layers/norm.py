"""Root-mean-square normalisation (arXiv 1910.07467): its weights; the arithmetic is a backend's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridserve.layers.footprint import OTHER
from hybridserve.layers.linear import cut

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class GroupedRMSNorm:
    """RMSNorm of each of `num_groups` equal groups of channels that are divided among the ranks.

    [T, local channels] -> the same. A rank has whole groups or, where there are fewer groups than ranks, a
    part of one: then the ranks' sums of squares are summed, in float32, before anybody takes the root.
    """

    def __init__(
        self, context: BuildContext, name: str, num_channels: int, num_groups: int, eps: float
    ) -> None:
        self.tp, self.eps, self.backend = context.tp, eps, context.pointwise
        self.num_groups, self.group_size = num_groups, num_channels // num_groups
        self.channels = cut(name, num_channels, context.tp)
        num_local = self.channels.stop - self.channels.start
        self.sizes = (self.group_size,) * (num_local // self.group_size)
        """Of the groups that this rank has whole; empty where it has a part of one."""
        self.weight = context.allocate(num_local)
        if not self.sizes:
            context.footprint.reductions.append(num_groups * torch.float32.itemsize // context.dtype.itemsize)
        context.weights.expect(f"{name}.weight", (num_channels,), self._load)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps, self.sizes) if self.sizes else self._shared(x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank reduces the sums of all groups, those of other ranks' being zero here: the one group of
        ranks that there is need not be divided."""
        wide = x.float()
        mine = self.channels.start // self.group_size
        squares = wide.new_zeros(len(x), self.num_groups)
        squares[:, mine] = torch.linalg.vecdot(wide, wide)
        mean = self.tp.all_reduce(squares)[:, mine, None] / self.group_size
        return (wide * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)

    def _load(self, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor[self.channels])
