"""The plainest definition of the state-space operators: one token at a time, in float32.

Every other backend is tested against this one. Knows tensors; knows no request and no model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata


class Reference(SSMBackend):
    name = "reference"

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: SSMMetadata,
        *,
        silu: bool = True,
    ) -> torch.Tensor:
        y = torch.zeros_like(x)
        for sequence, length in enumerate(metadata.query_lens):
            start = int(metadata.query_start[sequence])
            slot = int(metadata.state_slots[sequence])
            if metadata.has_state[sequence]:
                history = state[slot].float()
            else:
                history = torch.zeros(state.shape[1:], device=x.device)
            for t in range(start, start + length):
                window = torch.cat([history, x[t].float().unsqueeze(1)], dim=1)  # [C, W]
                out = (window * weight.float()).sum(dim=1)
                if bias is not None:
                    out = out + bias.float()
                y[t] = F.silu(out) if silu else out
                history = window[:, 1:]
            state[slot] = history.to(state.dtype)
        return y

    def selective_scan(
        self,
        u: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: SSMMetadata,
    ) -> torch.Tensor:
        y = torch.zeros_like(u)
        for sequence, length in enumerate(metadata.query_lens):
            start = int(metadata.query_start[sequence])
            slot = int(metadata.state_slots[sequence])
            h = state[slot].float() if metadata.has_state[sequence] else torch.zeros_like(A)
            for t in range(start, start + length):
                delta = dt[t].float()
                if dt_bias is not None:
                    delta = delta + dt_bias
                delta = F.softplus(delta).unsqueeze(1)  # [C, 1]
                x = u[t].float().unsqueeze(1)
                h = torch.exp(delta * A) * h + delta * B[t].float() * x
                out = (h * C[t].float()).sum(dim=1) + D * u[t].float()
                y[t] = out * F.silu(z[t].float()) if z is not None else out
            state[slot] = h.to(state.dtype)
        return y

    def ssd_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: SSMMetadata,
        *,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> torch.Tensor:
        y = torch.zeros_like(x)
        num_heads = x.shape[1]
        group_of = torch.arange(num_heads, device=x.device) // (num_heads // B.shape[1])
        for sequence, length in enumerate(metadata.query_lens):
            start = int(metadata.query_start[sequence])
            slot = int(metadata.state_slots[sequence])
            if metadata.has_state[sequence]:
                h = state[slot].float()
            else:
                h = torch.zeros(state.shape[1:], device=x.device)
            for t in range(start, start + length):
                delta = dt[t].float()
                if dt_bias is not None:
                    delta = delta + dt_bias
                delta = F.softplus(delta).clamp(*dt_limits)[:, None, None]  # [H, 1, 1]
                inputs = x[t].float()
                B_t, C_t = (group[t].float()[group_of].unsqueeze(1) for group in (B, C))  # [H, 1, N]
                h = torch.exp(delta * A[:, None, None]) * h + delta * inputs.unsqueeze(2) * B_t
                out = (h * C_t).sum(dim=2) + D.unsqueeze(1) * inputs
                y[t] = out * F.silu(z[t].float()) if z is not None else out
            state[slot] = h.to(state.dtype)
        return y
