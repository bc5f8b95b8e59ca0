"""Operators on rows out of torch operations, for any device. Knows tensors; knows no layer."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hybridserve.kernels.pointwise.torch_draw import TorchDraw

_MANY_ELEMENTS = 1 << 16
"""From here torch's composite spends its time on memory passes, not on calls: a third of them is enough."""


NUCLEUS_PREFIX = 256
"""How many of a row's largest are looked at first for top_p; a row whose nucleus is larger is sorted
whole."""


class TorchNative(TorchDraw):
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

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self.rms_norm(x.add_(residual), weight, eps, (x.shape[1],))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = cos.shape[-1]
        first, second, rest = torch.split_with_sizes(x, (half, half, x.shape[-1] - 2 * half), -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def keep_top_k(self, probs: torch.Tensor, top_k: torch.Tensor) -> None:
        rows = (top_k > 0).nonzero()[:, 0]
        ks = top_k[rows].clamp(max=probs.shape[1])
        if not len(rows):
            return
        kept = probs[rows]
        least = kept.topk(int(ks.max()), dim=-1).values.gather(1, ks[:, None] - 1)
        probs[rows] = kept.masked_fill_(kept < least, 0.0)

    def keep_top_p(self, probs: torch.Tensor, top_p: torch.Tensor) -> None:
        rows = (top_p < 1).nonzero()[:, 0]
        if not len(rows):
            return
        kept = probs[rows]
        mass = top_p[rows] * kept.sum(dim=-1)
        prefix = kept.topk(min(NUCLEUS_PREFIX, kept.shape[1]), dim=-1).values
        least = _nucleus_floor(prefix, mass)
        open_ended = (prefix.sum(dim=-1) < mass).nonzero()[:, 0]
        if len(open_ended):
            least[open_ended] = _nucleus_floor(
                kept[open_ended].sort(dim=-1, descending=True).values, mass[open_ended]
            )
        probs[rows] = kept.masked_fill_(kept < least[:, None], 0.0)


def _nucleus_floor(descending: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The smallest probability in each row's nucleus, given the row's largest probabilities in order."""
    before = descending.cumsum(dim=-1) - descending
    inside = (before < mass[:, None]) | (torch.arange(descending.shape[1], device=descending.device) == 0)
    return descending.masked_fill(~inside, torch.inf).amin(dim=-1)
