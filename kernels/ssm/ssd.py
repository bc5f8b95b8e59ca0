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
    """One token of each of n sequences: h C [n, H, P]. Moves their states h [n, H, P, N] on, in place."""
    x, delta, B, C = inputs
    h.mul_(torch.exp(delta * heads.A)[..., None, None])
    groups = _by_group(h, B)
    groups.addcmul_(_by_group(x * delta.unsqueeze(-1), B).unsqueeze(-1), B[:, :, None, None])
    return torch.matmul(groups, C[:, :, None, :, None]).flatten(1, 2).squeeze(-1)


def block(heads: Heads, inputs: Inputs, h: torch.Tensor) -> torch.Tensor:
    """Q tokens of each of n sequences: h C [n, Q, H, P]. Moves their states h [n, H, P, N] on, in place. A
    token whose delta is zero changes nothing but its own result."""
    x = inputs.x.transpose(1, 2)  # [n, H, Q, P]
    delta = inputs.delta.transpose(1, 2)  # [n, H, Q]
    B, C = inputs.B.transpose(1, 2), inputs.C.transpose(1, 2)  # [n, G, Q, N]
    groups = _by_group(h, B)  # [n, G, H / G, P, N]
    # Sums of logarithms: a decay is never divided by another, which may have vanished. In float64, because
    # what lies between two tokens is the difference of two sums that may be large.
    log_decay = (delta * heads.A.unsqueeze(1)).double().cumsum(2)
    weights = (log_decay.unsqueeze(3) - log_decay.unsqueeze(2)).float().exp_().tril_()
    weights.mul_(delta.unsqueeze(2))  # [n, H, Q, Q]: what a token keeps of an earlier one
    _by_group(weights, B).mul_(torch.matmul(C, B.transpose(2, 3)).unsqueeze(2))
    y = torch.matmul(weights, x)
    carried = torch.matmul(C.unsqueeze(2), groups.transpose(3, 4)).flatten(1, 2)
    y.addcmul_(carried, log_decay.exp().float().unsqueeze(3))
    left = (log_decay[:, :, -1:] - log_decay).exp().float().mul_(delta)
    grown = _by_group(x * left.unsqueeze(3), B)
    h.mul_(log_decay[:, :, -1].exp().float()[..., None, None])
    groups.add_(torch.matmul(grown.transpose(3, 4), B.unsqueeze(2)))
    return y.transpose(1, 2)


def _by_group(x: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """x [n, H, ...] -> a view [n, G, H / G, ...], of as many groups as B [n, G, ...] has."""
    return x.view(len(x), B.shape[1], -1, *x.shape[2:])
