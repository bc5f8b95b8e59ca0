"""Mamba-2's scan by Triton: how a ragged batch is cut, and the launches. Knows tables of chunks, and tiles;
the arithmetic is in `triton_ssd_kernels`.

Sequences of up to `FEW` tokens, which are decoded or verified, are moved on token by token; longer ones are
cut into chunks where each begins. Which of the two, and where, depends on a sequence's own length alone.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridserve.kernels.ssm.interface import SCRATCH_TOKENS
from hybridserve.kernels.triton_support import cdiv, power_of_2, upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.kernels.ssm.interface import SSMMetadata

FEW = 8
"""Tokens of a sequence that are moved on one by one: what a step decodes or verifies."""

CHUNK = SCRATCH_TOKENS
"""Tokens. Between chunks lie states of float32: the more tokens, the fewer of them, and the more products of
pairs of tokens."""

CHANNELS = 16
"""Of a head that a program of four warps updates: 256 states of each are 32 registers of a thread."""

TILE = 64
"""Tokens that a program of four warps multiplies at a time. Float32 is multiplied outside of the tensor
cores, which takes more registers: half the tokens, twice the warps."""

HALVES = (torch.bfloat16, torch.float16)


class Scan(NamedTuple):
    """What a scan is given, x, dt, B, C and z in rows, and where its results go."""

    x: torch.Tensor  # [T, H, P]
    dt: torch.Tensor  # [T, H]
    A: torch.Tensor  # [H]
    B: torch.Tensor  # [T, G, N]
    C: torch.Tensor  # [T, G, N]
    D: torch.Tensor  # [H]
    z: torch.Tensor | None  # [T, H, P]
    dt_bias: torch.Tensor | None  # [H]
    state: torch.Tensor  # [num_slots, H, P, N]
    y: torch.Tensor  # [T, H, P] contiguous
    dt_limits: tuple[float, float]

    @property
    def is_half(self) -> bool:
        """Whether what is multiplied comes in one half dtype."""
        return self.x.dtype in HALVES and self.x.dtype is self.B.dtype is self.C.dtype

    @property
    def sizes(self) -> dict[str, int]:
        num_heads, head_dim, num_states = self.state.shape[1:]
        return {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "NUM_STATES": num_states}


class Prompt(NamedTuple):
    """A sequence of more than `FEW` tokens."""

    sequence: int
    start: int
    length: int


class Batch(NamedTuple):
    """How a step's sequences are scanned."""

    num_few: int
    few: torch.Tensor | None  # [num_few]: sequences of up to FEW tokens; None if they are all
    prompts: list[Prompt]  # all others
    chunks: torch.Tensor  # [n, 5]: sequence, first token, number of tokens, entry before it and after it
    num_inner: int  # of the chunks, at their head: those that aren't the last of a sequence
    carried: torch.Tensor  # [m, 4], sequences of several chunks: sequence, first token, first entry, entries


def cut(lens: Sequence[int], device: torch.device) -> Batch:
    """An entry of scratch is what an inner chunk leaves: at most one for `CHUNK` tokens of the step."""
    few = [sequence for sequence, length in enumerate(lens) if length <= FEW]
    starts = accumulate(lens, initial=0)
    spans = zip(range(len(lens)), starts, lens, strict=False)
    prompts = [Prompt(*span) for span in spans if span[2] > FEW]
    inner: list[tuple[int, int, int, int, int]] = []
    last: list[tuple[int, int, int, int, int]] = []
    carried: list[tuple[int, int, int, int]] = []
    for sequence, start, length in prompts:
        before, first = -1, len(inner)
        for begin in range(0, length - CHUNK, CHUNK):
            inner.append((sequence, start + begin, CHUNK, before, len(inner)))
            before = len(inner) - 1
        num_inner = len(inner) - first
        last.append((sequence, start + num_inner * CHUNK, length - num_inner * CHUNK, before, -1))
        if num_inner:
            carried.append((sequence, start, first, num_inner))
    return Batch(
        num_few=len(few),
        few=upload(few, device) if prompts and few else None,
        prompts=prompts,
        chunks=upload([*inner, *last], device),
        num_inner=len(inner),
        carried=upload(carried, device),
    )


def update(kernels: Any, scan: Scan, metadata: SSMMetadata, batch: Batch) -> None:
    """Moves the sequences of few tokens on."""
    x, dt, A, B, C, D, z, dt_bias, state, y, limits = scan
    gate, has_bias = x if z is None else z, dt_bias is not None
    num_heads, head_dim, num_states = state.shape[1:]
    kernels.ssd_update[(batch.num_few, num_heads, cdiv(head_dim, CHANNELS))](
        *(x, dt, A, B, C, D, gate, dt_bias if has_bias else D, state, y),
        *(metadata.state_slots if batch.few is None else batch.few, metadata.query_start),
        *(metadata.state_slots, metadata.has_state.view(torch.uint8), *limits),
        *(*x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2], *gate.stride()[:2]),
        *state.stride(),
        **scan.sizes,
        HEADS_OF_GROUP=num_heads // B.shape[1],
        IS_PART=batch.few is not None,
        HAS_DT_BIAS=has_bias,
        HAS_Z=z is not None,
        BLOCK_P=CHANNELS,
        BLOCK_N=power_of_2(num_states),
        num_warps=4,
    )


def scan_prompts(kernels: Any, scan: Scan, metadata: SSMMetadata, batch: Batch) -> None:
    """Scans the others, in chunks.

    B and C meet in their own dtype, which is exact. All else multiplies inputs by float32 numbers: of a half
    dtype as TF32, which holds either half exactly and cuts float32 to 11 bits, 8 times as fine as bfloat16
    would; of float32 as they are. Sums are float32, as are states between chunks.
    """
    x, dt, A, B, C, D, z, dt_bias, state, y, limits = scan
    gate, has_bias = x if z is None else z, dt_bias is not None
    num_heads, head_dim, num_states = state.shape[1:]
    num_chunks, chunks, num_inner = len(batch.chunks), batch.chunks, batch.num_inner
    deltas = x.new_empty((num_heads, len(x)), dtype=torch.float32)
    clocks = x.new_empty((num_heads, len(x)), dtype=torch.float64)
    carry = x.new_empty((num_inner, *state.shape[1:]), dtype=torch.float32)
    kernels.ssd_steps[(num_chunks, cdiv(num_heads, 8))](
        *(dt, A, dt_bias if has_bias else D, deltas, clocks, chunks, *limits),
        *(len(x), num_heads, dt.stride(0)),
        HAS_DT_BIAS=has_bias,
        CHUNK=CHUNK,
        BLOCK_H=8,
        num_warps=4,
    )
    facts = (metadata.state_slots, metadata.has_state.view(torch.uint8), len(x))
    block_t, num_warps = (TILE, 4) if scan.is_half else (TILE // 2, 8)
    block_p, block_n = power_of_2(min(head_dim, 64), 16), power_of_2(min(num_states, 32), 16)
    tile = {"BLOCK_T": block_t, "BLOCK_P": block_p, "BLOCK_N": block_n, "num_warps": num_warps}
    tile |= {"IS_HALF": scan.is_half, "HEADS_OF_GROUP": num_heads // B.shape[1], **scan.sizes}
    parts = cdiv(head_dim, block_p) * cdiv(num_states, block_n)

    def leave(chunks: torch.Tensor, *, is_last: bool) -> None:
        kernels.ssd_states[(len(chunks), num_heads, parts)](
            *(x, B, deltas, clocks, state, carry, chunks, *facts),
            *(*x.stride()[:2], *B.stride()[:2], *state.stride()),
            IS_LAST=is_last,
            **tile,
        )

    if num_inner:
        leave(chunks[:num_inner], is_last=False)
        kernels.ssd_carry[(len(batch.carried), num_heads, cdiv(head_dim, CHANNELS))](
            *(clocks, state, carry, batch.carried, *facts, *state.stride()),
            **scan.sizes,
            CHUNK=CHUNK,
            BLOCK_P=CHANNELS,
            BLOCK_N=power_of_2(num_states),
            num_warps=4,
        )
    kernels.ssd_outputs[(num_chunks, num_heads, CHUNK // block_t * cdiv(head_dim, block_p))](
        *(x, B, C, D, gate, deltas, clocks, state, carry, y, chunks, *facts),
        *(*x.stride()[:2], *B.stride()[:2], *C.stride()[:2], *gate.stride()[:2], *state.stride()),
        HAS_Z=z is not None,
        CHUNK=CHUNK,
        **tile,
    )
    leave(chunks[num_inner:], is_last=True)
