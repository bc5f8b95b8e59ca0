"""The plainest definition of a mixture of experts: one token and one expert at a time, in float32.

Knows tensors; knows no model and nothing of speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hybridserve.kernels.gemm.reference import product
from hybridserve.kernels.moe.interface import ExpertGroups, MoEBackend, expert_weight

if TYPE_CHECKING:
    from hybridserve.kernels.gemm.interface import Weight
    from hybridserve.kernels.moe.interface import ExpertDelta


class Reference(MoEBackend):
    name = "reference"
    copies_codes = "a plain copy of an expert's whole weight for each token"

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
        gate_up: Weight,
        down: Weight,
        delta: ExpertDelta | None = None,
    ) -> torch.Tensor:
        num_tokens, top_k = ids.shape
        hidden, intermediate = down.shape[1:]
        order = ids.flatten().argsort(stable=True)
        groups = ExpertGroups(order // top_k, ids.flatten()[order])
        pairs = list(zip(groups.tokens.tolist(), groups.experts.tolist(), strict=True))

        inner = torch.zeros(len(pairs), 2 * intermediate, device=x.device)
        for p, (token, expert) in enumerate(pairs):
            inner[p] = product(x[token : token + 1], expert_weight(gate_up, expert))[0]
        if delta is not None:
            delta.add_gate_up(inner, x, groups)
        activations = F.silu(inner[:, :intermediate]) * inner[:, intermediate:]

        outputs = torch.zeros(len(pairs), hidden, device=x.device)
        for p, (_, expert) in enumerate(pairs):
            outputs[p] = product(activations[p : p + 1], expert_weight(down, expert))[0]
        if delta is not None:
            delta.add_down(outputs, activations, groups)

        place = torch.empty_like(order)
        place[order] = torch.arange(len(pairs), device=x.device)
        y = torch.zeros(x.shape, device=x.device)
        for t in range(num_tokens):
            for k in range(top_k):
                y[t] += weights[t, k] * outputs[place[t * top_k + k]]
        return y.to(x.dtype)
