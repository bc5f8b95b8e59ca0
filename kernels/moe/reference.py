"""The plainest definition of a mixture of experts: one token and one expert at a time, in float32.

Knows tensors; knows no model and nothing of speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridserve.kernels.moe.interface import MoEBackend


class Reference(MoEBackend):
    name = "reference"

    def route(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = torch.softmax(logits.float(), dim=-1)
        weights, ids = torch.topk(probabilities, top_k, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, ids

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        y = torch.zeros(x.shape, device=x.device)
        intermediate = down.shape[2]
        for t in range(x.shape[0]):
            for k in range(ids.shape[1]):
                expert = int(ids[t, k])
                gate = gate_up[expert, :intermediate].float() @ x[t].float()
                up = gate_up[expert, intermediate:].float() @ x[t].float()
                y[t] += weights[t, k] * (down[expert].float() @ (F.silu(gate) * up))
        return y.to(x.dtype)
