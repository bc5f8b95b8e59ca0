"""Tokens of rows of logits out of torch operations, for any device. Knows tensors; what of a distribution
may be drawn is a backend's to find.

No row's result depends on the other rows: what is kept is decided by values, never by positions in a sort
that ties could reorder, and the draw walks the vocabulary in its own order. Nothing waits for a device.
"""

from __future__ import annotations

import torch

from hybridserve.kernels.pointwise.interface import PointwiseBackend


class TorchDraw(PointwiseBackend):
    """A backend that has no kernels of its own for this."""

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(dim=-1), torch.isfinite(logits).all(dim=-1)

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
        # a temperature near 0 must stay finite; it is greedy then anyway
        probs = torch.softmax(logits[rows] / temperature.clamp(min=1e-5)[:, None], dim=-1)
        if min_p is not None:
            least = probs.amax(dim=-1) * min_p
            probs.masked_fill_(probs < least[:, None], 0.0)
        if top_k is not None:
            self.keep_top_k(probs, top_k)
        if top_p is not None:
            self.keep_top_p(probs, top_p)
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1]
        places = torch.searchsorted(cumulative, (total * uniform)[:, None], right=True)[:, 0]
        return places.clamp_(max=logits.shape[1] - 1).masked_fill_(~(total > 0), -1)
