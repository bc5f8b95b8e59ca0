"""Steps of one token, and prompts of Mamba-2, by the package mamba-ssm, where it is installed; all else by
Triton.

Knows the package's interface. Asked for by name only, as it picks tiles by timing them. Taken for Mamba's and
Mamba-2's one token a sequence; and for prompts of Mamba-2 in a half dtype, one sequence a call, since a call
has one initial state a row of its batch. Left to this project's kernels are what the package can't do (limits
of delta in a step of one token, a layer without a bias of delta), what it would round to TF32 (float32),
short sequences beside prompts, and Mamba's prompts, which it starts from zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hybridserve.kernels.ssm import triton_ssd
from hybridserve.kernels.ssm.triton_backend import (
    Triton,
    TritonMetadata,
    has_one_token_each,
    put_state,
    start_from_zero,
    take_state,
)
from hybridserve.kernels.triton_support import import_obstacle, obstacle

if TYPE_CHECKING:
    import torch

    from hybridserve.kernels.registry import Capabilities
    from hybridserve.kernels.ssm.interface import SSMMetadata

CALL_TOKENS = 16384
"""Of a prompt that are scanned at once: the package's offsets into states of chunks have 32 bits."""


class MambaSSM(Triton):
    name = "mamba_ssm"

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return (
            obstacle(capabilities)
            or import_obstacle("mamba_ssm.ops.triton.selective_state_update", "mamba-ssm")
            or import_obstacle("mamba_ssm.ops.triton.ssd_combined", "mamba-ssm")
        )

    def __init__(self) -> None:
        super().__init__()
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        self._update, self._scan_chunks = selective_state_update, mamba_chunk_scan_combined

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
        if dt_bias is None or not has_one_token_each(metadata):
            return super().selective_scan(u, dt, A, B, C, D, z, dt_bias, state, metadata)
        start_from_zero(state, metadata)
        # slots in 64 bits, and so what the package multiplies by them
        slots = metadata.state_slots
        y: torch.Tensor = self._update(
            state, u, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=slots
        )
        return y

    def _update_few(self, scan: triton_ssd.Scan, metadata: TritonMetadata) -> None:
        is_free = scan.dt_limits == (0.0, math.inf)
        if scan.dt_bias is None or not is_free or not has_one_token_each(metadata):
            super()._update_few(scan, metadata)
            return
        start_from_zero(scan.state, metadata)
        per_channel = scan.state.shape[1:3]  # what a head has, repeated without memory: the package looks
        dt = scan.dt.unsqueeze(2).expand(-1, *per_channel)
        A = scan.A[:, None, None].expand(scan.state.shape[1:])
        D, dt_bias = (each.unsqueeze(1).expand(per_channel) for each in (scan.D, scan.dt_bias))
        y = self._update(
            *(scan.state, scan.x, dt, A, scan.B, scan.C, D),
            z=scan.z,
            dt_bias=dt_bias,
            dt_softplus=True,
            state_batch_indices=metadata.state_slots,
        )
        scan.y.copy_(y)

    def _scan_prompts(self, scan: triton_ssd.Scan, metadata: TritonMetadata) -> None:
        if not scan.is_half:
            super()._scan_prompts(scan, metadata)
            return
        for sequence, start, length in metadata.ssd.prompts:
            mine = slice(sequence, sequence + 1)
            h = take_state(scan.state, metadata, mine).float()
            for first in range(start, start + length, CALL_TOKENS):
                rows = slice(first, min(first + CALL_TOKENS, start + length))
                x, dt, B, C = (each[None, rows] for each in (scan.x, scan.dt, scan.B, scan.C))
                y, h = self._scan_chunks(
                    *(x, dt, scan.A, B, C, triton_ssd.CHUNK),
                    D=scan.D,
                    z=None if scan.z is None else scan.z[None, rows],
                    dt_bias=scan.dt_bias,
                    initial_states=h,
                    dt_softplus=True,
                    dt_limit=scan.dt_limits,
                    return_final_states=True,
                )
                scan.y[rows] = y[0]
            put_state(scan.state, metadata, mine, h)
