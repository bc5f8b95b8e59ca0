"""A mixture of experts out of torch operations, for any device. Knows tensors; knows no model.

Tokens are grouped by expert, so each expert that was hit at all is one pair of matrix multiplications. A
token's result is a sum over its own k experts in the router's order, whoever else is in the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridserve.kernels.gemm.torch_native import matmul
from hybridserve.kernels.moe.interface import MoEBackend


class TorchNative(MoEBackend):
    name = "torch_native"

    def route(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
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
        num_tokens, top_k = ids.shape
        if num_tokens == 1:
            return _one_token(x, weights, ids, gate_up, down)
        if num_tokens == 0:
            return torch.empty_like(x)
        flat_ids = ids.flatten()
        order = flat_ids.argsort(stable=True)
        grouped = x.index_select(0, order // top_k)
        counts = torch.bincount(flat_ids, minlength=len(gate_up)).tolist()
        hit = [(expert, count) for expert, count in enumerate(counts) if count]
        rows = torch.split_with_sizes(grouped, [count for _, count in hit])
        parts = [_expert(part, gate_up[e], down[e]) for part, (e, _) in zip(rows, hit, strict=True)]
        results = torch.cat([part.float() for part in parts])
        outputs = torch.empty_like(results, memory_format=torch.contiguous_format)
        outputs.index_copy_(0, order, results)
        outputs = outputs.view(num_tokens, top_k, x.shape[1])
        return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1).to(x.dtype)


def _one_token(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The same for a single token: nothing to group, and few calls."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True):
        total.add_(_expert(x, gate_up[expert], down[expert]), alpha=weight)
    return total.to(x.dtype)


def _expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [M, H] through one expert; [M, H], in x's dtype or, not yet rounded to it, in float32."""
    gate, up = matmul(x, gate_up).chunk(2, dim=-1)
    return matmul(F.silu(gate).mul_(up), down)
