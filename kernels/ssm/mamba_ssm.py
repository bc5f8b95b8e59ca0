"""Mamba-1's step of one token by the package mamba-ssm, where it is installed; all else by Triton.

Knows the package's interface. Asked for by name only: it has no ragged batches with initial states, so a step
that holds a prompt goes to this project's kernels, and it can't be told that a sequence has no state yet.
causal-conv1d is not used: the offsets into its states have 32 bits, which an arena outgrows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridserve.kernels.ssm.triton_backend import Triton, TritonMetadata
from hybridserve.kernels.triton_support import import_obstacle, obstacle

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities
    from hybridserve.kernels.ssm.interface import SSMMetadata


class MambaSSM(Triton):
    name = "mamba_ssm"

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return obstacle(capabilities) or import_obstacle(
            "mamba_ssm.ops.triton.selective_state_update", "mamba-ssm"
        )

    def __init__(self) -> None:
        super().__init__()
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        self._update = selective_state_update

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
        is_decode = isinstance(metadata, TritonMetadata) and metadata.all_single
        if not is_decode or len(u) != len(metadata.state_slots) or not len(u):
            return super().selective_scan(u, dt, A, B, C, D, z, dt_bias, state, metadata)
        slots = metadata.state_slots
        # what has no state starts from zero; for what has one the null slot is filled in its stead
        state.index_fill_(0, torch.where(metadata.has_state, torch.zeros_like(slots), slots), 0)
        # slots in 64 bits, and so what the package multiplies by them
        y: torch.Tensor = self._update(
            state, u, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=slots
        )
        return y
