"""What a state-space backend is given and must do. Knows tensors; knows no request and no model."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridserve.kernels.registry import Backend

if TYPE_CHECKING:
    import torch


SCRATCH_TOKENS = 256
"""For so many tokens of a step a scan of Mamba-2 may keep one state beside them."""


def ssd_scratch_bytes(num_heads: int, head_dim: int, num_states: int) -> int:
    """That a scan of Mamba-2 may take a token of a step while it runs: states in float32, and two numbers a
    head, of 4 and of 8 bytes."""
    return num_heads * (4 + 8 + -(-4 * head_dim * num_states // SCRATCH_TOKENS))


@dataclass(slots=True)
class SSMMetadata:
    """One step's tokens, `T` in all, of `S` sequences laid end to end.

    Built once a step, shared by all layers. A backend's `prepare` may return a subclass with derived tensors.
    """

    query_start: torch.Tensor  # [S + 1] int64, first token of each sequence in the flat batch
    state_slots: torch.Tensor  # [S] int64; 0 is the null slot of padding rows
    has_state: (
        torch.Tensor
    )  # [S] bool; where false the slot's content is not read: the state starts from zero
    query_lens: list[int]  # [S] the same facts on the host, so that no kernel has to wait for the device


class SSMBackend(Backend):
    """Recurrences over ragged batches, with initial and final states read and written by slot."""

    def prepare(self, metadata: SSMMetadata) -> SSMMetadata:
        """Derive, once a step, whatever the operators need in every layer."""
        return metadata

    @abstractmethod
    def causal_conv1d(
        self,
        x: torch.Tensor,  # [T, C]
        weight: torch.Tensor,  # [C, W]
        bias: torch.Tensor | None,  # [C]
        state: torch.Tensor,  # [num_slots, C, W - 1], any strides: the last W - 1 inputs, oldest first
        metadata: SSMMetadata,
        *,
        silu: bool = True,
    ) -> torch.Tensor:
        """y[t] = silu(bias + sum_k weight[:, k] * x[t - W + 1 + k]) a channel; [T, C] in x's dtype.

        Inputs before a sequence's first token of the step come from its slot, or are zero where it has no
        state. Writes each slot's new last W - 1 inputs.
        """

    @abstractmethod
    def selective_scan(
        self,
        u: torch.Tensor,  # [T, C]
        dt: torch.Tensor,  # [T, C] before bias and softplus
        A: torch.Tensor,  # [C, N] float32, negative
        B: torch.Tensor,  # [T, N]
        C: torch.Tensor,  # [T, N]
        D: torch.Tensor,  # [C] float32
        z: torch.Tensor | None,  # [T, C] gate
        dt_bias: torch.Tensor | None,  # [C] float32
        state: torch.Tensor,  # [num_slots, C, N], any strides, float32 unless configured otherwise
        metadata: SSMMetadata,
    ) -> torch.Tensor:
        """Mamba-1's selective scan (arXiv 2312.00752, algorithm 2), computed in float32; [T, C] in u's dtype.

        delta = softplus(dt + dt_bias); h[t] = exp(delta A) h[t-1] + delta B[t] u[t]; y = C[t] h[t] + D u[t];
        y *= silu(z). h starts from the sequence's slot, or from zero where it has no state; the last h is
        written back to the slot.
        """

    @abstractmethod
    def ssd_scan(
        self,
        x: torch.Tensor,  # [T, H, P]
        dt: torch.Tensor,  # [T, H] before bias and softplus
        A: torch.Tensor,  # [H] float32, negative
        B: torch.Tensor,  # [T, G, N]
        C: torch.Tensor,  # [T, G, N]
        D: torch.Tensor,  # [H] float32
        z: torch.Tensor | None,  # [T, H, P] gate
        dt_bias: torch.Tensor | None,  # [H] float32
        state: torch.Tensor,  # [num_slots, H, P, N], any strides, float32 unless configured otherwise
        metadata: SSMMetadata,
        *,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> torch.Tensor:
        """Mamba-2's scan (arXiv 2405.21060, section 6), computed in float32; [T, H, P] in x's dtype.

        H heads of P channels share one decay each; H / G neighbouring heads share the B and C of a group.
        delta = clamp(softplus(dt + dt_bias), dt_limits); h[t] = exp(delta A) h[t-1] + delta x[t] B[t]^T;
        y = h[t] C[t] + D x[t]; y *= silu(z). Where h starts and where it stays is as above.
        """
