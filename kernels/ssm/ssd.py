"""Mamba-2's scan out of torch operations: one token of many sequences, or a block of tokens of each.

Knows tensors in float32; which tokens and states they are is the backend's business. A block is a few
products of matrices (arXiv 2405.21060, section 6): what its tokens give each other, what they get from the
state before them, and what they leave in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Heads(NamedTuple):
    """What a layer's H heads have for themselves."""

    A: torch.Tensor  # [H]
    D: torch.Tensor  # [H]
    dt_bias: torch.Tensor | None  # [H]
    dt_limits: tuple[float, float]

    def delta(self, dt: torch.Tensor) -> torch.Tensor:
        """The length of each step, of dt [..., H]."""
        delta = F.softplus(dt if self.dt_bias is None else dt + self.dt_bias)
        return delta.clamp(*self.dt_limits)


class Inputs(NamedTuple):
    """Of tokens [...]: one of each sequence, or Q."""

    x: torch.Tensor  # [..., H, P]
    delta: torch.Tensor  # [..., H]
    B: torch.Tensor  # [..., G, N]
    C: torch.Tensor  # [..., G, N]


def step(heads: Heads, inputs: Inputs, h: torch.Tensor) -> torch.Tensor:
    """One token of each of n sequences: h C [n, H, P]. Moves their states h [n, H, P, N], of any strides, on,
    in place."""
    x, delta, B, C = inputs
    n, num_groups, num_states = B.shape
    h.mul_(torch.exp(delta * heads.A)[..., None, None])
    grown = (x * delta.unsqueeze(-1)).view(n, num_groups, -1, x.shape[2], 1)
    h.view(n, num_groups, -1, *h.shape[2:]).addcmul_(grown, B[:, :, None, None])
    rows = h.reshape(n * num_groups, -1, num_states)  # all that a group's C meets, as one matrix
    return torch.bmm(rows, C.reshape(n * num_groups, num_states, 1)).view(x.shape)


def block(heads: Heads, inputs: Inputs, h: torch.Tensor) -> torch.Tensor:
    """Q tokens of each of n sequences: h C [n, Q, H, P]. Moves their states h [n, H, P, N], contiguous, on,
    in place. A token whose delta is zero changes nothing but its own result."""
    x, delta = inputs.x, inputs.delta
    n, Q, H, P = x.shape
    B, C = inputs.B.transpose(1, 2), inputs.C.transpose(1, 2)  # [n, G, Q, N]
    G, N = B.shape[1], B.shape[3]
    rows = h.view(n, G, -1, N)  # [n, G, (H / G) P, N]
    # Sums of logarithms: a decay is never divided by another, which may have vanished. In float64, because
    # what lies between two tokens is the difference of two sums that may be large.
    log_decay = (delta * heads.A).double().cumsum(1)  # [n, Q, H]
    by_head = log_decay.transpose(1, 2)

    weights = (by_head.unsqueeze(3) - by_head.unsqueeze(2)).float().exp_().tril_()
    weights.mul_(delta.transpose(1, 2).unsqueeze(2))  # [n, H, Q, Q]: what a token keeps of an earlier one
    weights.view(n, G, -1, Q, Q).mul_(torch.matmul(C, B.transpose(2, 3)).unsqueeze(2))
    y = torch.matmul(weights, x.transpose(1, 2)).transpose(1, 2)

    before = torch.matmul(C, rows.transpose(2, 3)).transpose(1, 2)  # [n, Q, G, (H / G) P]
    y.addcmul_(before.reshape(n, Q, H, P), log_decay.exp().float().unsqueeze(3))

    left = (log_decay[:, -1:] - log_decay).exp().float().mul_(delta)
    grown = (x * left.unsqueeze(3)).view(n, Q, G, -1)
    h.mul_(log_decay[:, -1].exp().float()[..., None, None])
    rows.add_(torch.matmul(grown.permute(0, 2, 3, 1), B))
    return y
