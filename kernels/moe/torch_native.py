"""A mixture of experts out of torch operations, for any device. Knows tensors; knows no model.

Tokens are grouped by expert, so each expert that was hit at all is one pair of matrix multiplications. A
token's result is a sum over its own k experts in the router's order, whoever else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from hybridserve.kernels.gemm.torch_native import matmul
from hybridserve.kernels.moe.interface import ExpertGroups, MoEBackend, expert_weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.kernels.gemm.interface import Weight
    from hybridserve.kernels.moe.interface import ExpertDelta


class TorchNative(MoEBackend):
    name = "torch_native"
    copies_codes = "plain copies of slices of its weight"

    def route(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return softmax_top_k(logits, top_k, renormalize=renormalize)

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
        if num_tokens == 1:
            return _one_token(x, weights, ids, gate_up, down, delta)
        if num_tokens == 0:
            return torch.empty_like(x)
        flat_ids = ids.flatten()
        order = flat_ids.argsort(stable=True)
        tokens = order // top_k
        grouped = x.index_select(0, tokens)
        counts = torch.bincount(flat_ids, minlength=gate_up.shape[0]).tolist()
        hit = [(expert, count) for expert, count in enumerate(counts) if count]
        rows = torch.split_with_sizes(grouped, [count for _, count in hit])
        added = None if delta is None else _Added(delta, x, ExpertGroups(tokens, flat_ids[order]))
        parts = _experts(rows, [expert for expert, _ in hit], gate_up, down, added)
        results = torch.cat([part.float() for part in parts])
        outputs = torch.empty_like(results, memory_format=torch.contiguous_format)
        outputs.index_copy_(0, order, results)
        outputs = outputs.view(num_tokens, top_k, x.shape[1])
        return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1).to(x.dtype)


def softmax_top_k(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The interface's `route`."""
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids


class _Added(NamedTuple):
    """A delta, and what it asks for."""

    delta: ExpertDelta
    x: torch.Tensor
    groups: ExpertGroups


def _one_token(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    delta: ExpertDelta | None,
) -> torch.Tensor:
    """The same for a single token: nothing to group, and few calls."""
    chosen = ids[0].tolist()
    order = sorted(range(len(chosen)), key=chosen.__getitem__)
    added = None
    if delta is not None:
        added = _Added(delta, x, ExpertGroups(torch.zeros_like(ids[0]), ids[0].sort().values))
    parts = _experts([x] * len(chosen), [chosen[k] for k in order], gate_up, down, added)
    outputs = dict(zip(order, parts, strict=True))
    total = torch.zeros_like(x, dtype=torch.float32)
    for k, weight in enumerate(weights[0].tolist()):
        total.add_(outputs[k], alpha=weight)
    return total.to(x.dtype)


def _experts(
    rows: Sequence[torch.Tensor],
    experts: Sequence[int],
    gate_up: Weight,
    down: Weight,
    added: _Added | None,
) -> Sequence[torch.Tensor]:
    """Each of `rows` [M, H] through its expert; [M, H], in x's dtype or, not yet rounded to it, in float32.

    A delta sees all rows at once, the products stay those of one expert each: the same calls on the same
    shapes with it and without it.
    """
    pairs = zip(rows, experts, strict=True)
    inner: Sequence[torch.Tensor] = [matmul(x, expert_weight(gate_up, e)) for x, e in pairs]
    if added is not None:
        y = torch.cat(list(inner))
        added.delta.add_gate_up(y, added.x, added.groups)
        inner = _split_like(y, inner)
    halves = [part.chunk(2, dim=-1) for part in inner]
    activations = [F.silu(gate).mul_(up) for gate, up in halves]
    pairs = zip(activations, experts, strict=True)
    outputs: Sequence[torch.Tensor] = [matmul(x, expert_weight(down, e)) for x, e in pairs]
    if added is not None:
        y = torch.cat(list(outputs))
        added.delta.add_down(y, torch.cat(activations), added.groups)
        outputs = _split_like(y, outputs)
    return outputs


def _split_like(y: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Undoes `cat`, which takes the widest dtype of its parts."""
    rows = torch.split_with_sizes(y, [len(part) for part in parts])
    return [some.to(part.dtype) for some, part in zip(rows, parts, strict=True)]
