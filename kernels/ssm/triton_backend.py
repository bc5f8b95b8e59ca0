"""Recurrences by Triton, for NVIDIA GPUs. Knows how a ragged batch is cut into chunks; the arithmetic is in
`triton_kernels` and, for Mamba-2, in `triton_ssd_kernels`.

How a sequence is cut depends on its own length alone, and no chunk on another sequence: a row has the same
bits in any company. A few tokens to verify, of up to eight, take the kernels that one token takes, by slot
and at once, and get the bits that steps of one token would give them, states too where they are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridserve.kernels.ssm import triton_ssd
from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata
from hybridserve.kernels.triton_support import cdiv, obstacle, power_of_2, rows_of, upload

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hybridserve.kernels.registry import Capabilities

SCAN_TOKENS = 256
"""Of a chunk. A sequence of more tokens is scanned twice, but its chunks at the same time."""

SCAN_CHANNELS = 32
"""Of a program of one warp: many programs, as each is a chain of dependent steps."""

UNROLL = 4
"""Tokens whose inputs are loaded together, ahead of the chain."""

CONV_TOKENS = 32


class Long(NamedTuple):
    """Sequences of several chunks."""

    sequences: torch.Tensor  # [n, 3]: sequence, its first entry, number of its chunks
    chunks: torch.Tensor  # [m, 3], all but the last of each sequence: first token, number of tokens, entry
    num_entries: int


@dataclass(slots=True)
class TritonMetadata(SSMMetadata):
    conv_chunks: torch.Tensor  # [n, 2]: sequence, first of its tokens
    scan_chunks: torch.Tensor  # [n, 5]: sequence, first token, number of tokens, entry or -1, is last
    long: Long | None
    ssd: triton_ssd.Batch
    all_single: bool  # no sequence has more than one token


class Triton(SSMBackend):
    name = "triton"
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return obstacle(capabilities)

    def __init__(self) -> None:
        from hybridserve.kernels.ssm import triton_kernels, triton_ssd_kernels

        self._kernels, self._ssd_kernels = triton_kernels, triton_ssd_kernels

    def prepare(self, metadata: SSMMetadata) -> TritonMetadata:
        lens, device = metadata.query_lens, metadata.state_slots.device
        scan, long = _scan_chunks(lens, device)
        return TritonMetadata(
            metadata.query_start,
            metadata.state_slots,
            metadata.has_state,
            lens,
            conv_chunks=self._cut_conv(metadata),
            scan_chunks=upload(scan, device),
            long=long,
            ssd=triton_ssd.cut(lens, device),
            all_single=max(lens, default=1) == 1,
        )

    def _cut_conv(self, metadata: SSMMetadata, without: Collection[int] = ()) -> torch.Tensor:
        """Chunks [n, 2] to convolve, of all sequences but some."""
        lens = ((i, length) for i, length in enumerate(metadata.query_lens) if i not in without)
        chunks = [(i, first) for i, length in lens for first in range(0, length, CONV_TOKENS)]
        return upload(chunks, metadata.state_slots.device)

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
        metadata = prepared_by_triton(metadata)
        x = rows_of(x)
        y = x.new_empty(x.shape)
        num_channels, width = weight.shape
        num_tokens, channels, num_warps = (1, 256, 2) if metadata.all_single else (CONV_TOKENS, 64, 4)
        if len(metadata.conv_chunks):
            self._kernels.causal_conv1d[(len(metadata.conv_chunks), cdiv(num_channels, channels))](
                *(x, weight.contiguous(), x if bias is None else bias.contiguous(), state, y),
                *(
                    metadata.conv_chunks,
                    metadata.query_start,
                    metadata.state_slots,
                    metadata.has_state.view(torch.uint8),
                ),
                *(num_channels, x.stride(0), *state.stride()),
                WIDTH=width,
                HAS_BIAS=bias is not None,
                SILU=silu,
                BLOCK_T=power_of_2(max(num_tokens, width - 1)) if num_tokens > 1 else 1,
                BLOCK_C=channels,
                num_warps=num_warps,
            )
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
        metadata = prepared_by_triton(metadata)
        u, dt, B, C = rows_of(u), rows_of(dt), rows_of(B), rows_of(C)
        has_gate = z is not None
        z = rows_of(z) if z is not None else u
        A, D = A.contiguous(), D.contiguous()
        y = u.new_empty(u.shape)
        num_channels, num_states = A.shape
        num_blocks = cdiv(num_channels, SCAN_CHANNELS)
        if not len(metadata.scan_chunks):
            return y
        tile = {"NUM_STATES": num_states, "BLOCK_C": SCAN_CHANNELS, "BLOCK_N": power_of_2(num_states)}
        has_bias = dt_bias is not None
        bias = D if dt_bias is None else dt_bias.contiguous()
        facts = (metadata.state_slots, metadata.has_state.view(torch.uint8), num_channels)
        carry = y
        if (long := metadata.long) is not None:
            carry = u.new_empty((long.num_entries, num_channels, num_states), dtype=torch.float32)
            sums = u.new_empty((long.num_entries, num_channels), dtype=torch.float32)
            self._kernels.scan_alone[(len(long.chunks), num_blocks)](
                *(u, dt, A, B, bias, long.chunks, carry, sums),
                *(num_channels, u.stride(0), dt.stride(0), B.stride(0)),
                HAS_DT_BIAS=has_bias,
                UNROLL=UNROLL,
                num_warps=1,
                **tile,
            )
            self._kernels.scan_carry[(len(long.sequences), num_blocks)](
                *(A, state, long.sequences, carry, sums, *facts, *state.stride()), num_warps=1, **tile
            )
        self._kernels.scan[(len(metadata.scan_chunks), num_blocks)](
            *(u, dt, A, B, C, D, z, bias, state, y, metadata.scan_chunks, carry, *facts),
            *(x.stride(0) for x in (u, dt, B, C, z)),
            *state.stride(),
            HAS_DT_BIAS=has_bias,
            HAS_Z=has_gate,
            UNROLL=1 if metadata.all_single else UNROLL,
            num_warps=1,
            **tile,
        )
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
        metadata = prepared_by_triton(metadata)
        y = x.new_empty(x.shape)
        if not y.numel():
            return y
        x, dt, B, C = rows_of(x), rows_of(dt), rows_of(B), rows_of(C)
        z = None if z is None else rows_of(z)
        dt_bias = None if dt_bias is None else dt_bias.contiguous()
        scan = triton_ssd.Scan(
            *(x, dt, A.contiguous(), B, C, D.contiguous(), z, dt_bias, state, y), dt_limits=dt_limits
        )
        if metadata.ssd.num_few:
            self._update_few(scan, metadata)
        if metadata.ssd.prompts:
            self._scan_prompts(scan, metadata)
        return y

    def _update_few(self, scan: triton_ssd.Scan, metadata: TritonMetadata) -> None:
        triton_ssd.update(self._ssd_kernels, scan, metadata, metadata.ssd)

    def _scan_prompts(self, scan: triton_ssd.Scan, metadata: TritonMetadata) -> None:
        triton_ssd.scan_prompts(self._ssd_kernels, scan, metadata, metadata.ssd)


def has_one_token_each(metadata: SSMMetadata) -> bool:
    """Whether there are sequences, and each has one token."""
    is_decode = isinstance(metadata, TritonMetadata) and metadata.all_single
    return is_decode and 0 < len(metadata.query_lens) == sum(metadata.query_lens)


def start_from_zero(state: torch.Tensor, metadata: SSMMetadata) -> None:
    """Clears the slots [num_slots, ...] of sequences that have no state yet, and the null slot in stead of
    the others', for packages that can't be told."""
    slots = metadata.state_slots
    state.index_fill_(0, torch.where(metadata.has_state, torch.zeros_like(slots), slots), 0)


def take_state(state: torch.Tensor, metadata: SSMMetadata, sequences: slice) -> torch.Tensor:
    """A copy [n, ...] of some sequences' states, zero where they have none."""
    own = state.index_select(0, metadata.state_slots[sequences])
    fresh = metadata.has_state[sequences].logical_not()
    return own.masked_fill_(fresh.view(-1, *[1] * (own.dim() - 1)), 0)


def put_state(state: torch.Tensor, metadata: SSMMetadata, sequences: slice, own: torch.Tensor) -> None:
    state.index_copy_(0, metadata.state_slots[sequences], own.to(state.dtype))


def prepared_by_triton(metadata: SSMMetadata) -> TritonMetadata:
    if not isinstance(metadata, TritonMetadata):
        raise TypeError("metadata must come from this backend's prepare()")
    return metadata


def _scan_chunks(
    lens: Sequence[int], device: torch.device
) -> tuple[list[tuple[int, int, int, int, int]], Long | None]:
    chunks: list[tuple[int, int, int, int, int]] = []
    sequences: list[tuple[int, int, int]] = []
    num_entries = 0
    for sequence, (length, start) in enumerate(zip(lens, accumulate(lens, initial=0), strict=False)):
        firsts = range(0, length, SCAN_TOKENS)
        entry = -1
        if len(firsts) > 1:
            entry = num_entries
            sequences.append((sequence, entry, len(firsts)))
            num_entries += len(firsts)
        for i, first in enumerate(firsts):
            num = min(SCAN_TOKENS, length - first)
            chunks.append(
                (sequence, start + first, num, entry if entry < 0 else entry + i, first + num == length)
            )
    if not sequences:
        return chunks, None
    alone = [(start, num, entry) for _, start, num, entry, is_last in chunks if entry >= 0 and not is_last]
    return chunks, Long(upload(sequences, device), upload(alone, device), num_entries)
