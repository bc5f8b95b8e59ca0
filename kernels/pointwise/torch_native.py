"""Operators on rows out of torch operations, for any device. Knows tensors; knows no layer."""

from __future__ import annotations

import torch

from hybridserve.kernels.pointwise.interface import PointwiseBackend

_MANY_ELEMENTS = 1 << 16
"""From here torch's composite spends its time on memory passes, not on calls: a third of them is enough."""


class TorchNative(PointwiseBackend):
    """Keeps what it derives from the sizes of segments."""

    name = "torch_native"

    def __init__(self) -> None:
        self._members: dict[tuple[tuple[int, ...], torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        if len(sizes) > 1:
            return self._segmented(x, weight, eps, sizes)
        if x.numel() < _MANY_ELEMENTS and x.dtype is weight.dtype:
            return torch.rms_norm(x, sizes, weight, eps)
        wide = x.float()
        scale = torch.linalg.vecdot(wide, wide).div_(sizes[0]).add_(eps).rsqrt_()
        return torch.mul(wide, scale.unsqueeze(-1)).mul_(weight).to(x.dtype)

    def _segmented(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """All segments by two products with constants: a decode step is bound by the number of calls."""
        mean, spread = self._membership(sizes, x.device)
        wide = x.float()
        scale = torch.mm(wide.square(), mean).add_(eps).rsqrt_()
        return torch.mm(scale, spread).mul_(wide).mul_(weight).to(x.dtype)

    def _membership(self, sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, segments], whose products with rows are means, and [segments, n], which gives them back."""
        key = (sizes, device)
        if key not in self._members:
            with torch.inference_mode(False):  # else they could not be used outside of inference mode
                segment = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
                member = torch.nn.functional.one_hot(segment, len(sizes)).float().to(device)
                self._members[key] = (member / member.sum(0), member.t().contiguous())
        return self._members[key]
