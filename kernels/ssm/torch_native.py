"""State-space operators out of torch operations, for any device. Knows tensors; knows no request, no model.

Sequences of one token go through one batched update, longer ones through a convolution over all their tokens
and a scan whose only Python loop is over time.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hybridserve.kernels.ssm import ssd
from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata
from hybridserve.kernels.ssm.ragged import Chunks, Edges, RaggedMetadata, Rows, Slots, split

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK_ELEMENTS = 1 << 18
"""How much of h [tokens, N, C] a scan holds at once: 1 MiB, to stay in cache between passes."""

_SEGMENT_ELEMENTS = 1 << 18
"""The same for inputs [tokens, C]: so little is recycled, and fresh pages cost more than the arithmetic."""

_FEW_ELEMENTS = 1 << 13
"""Up to here the number of calls is what costs, not the arithmetic."""

_BLOCK_TOKENS = 64
"""Tokens of a sequence that Mamba-2's scan takes at a time: their products grow with the square, the number
of calls with the inverse."""

_LOG2_E = math.log2(math.e)
"""For exp(x) as exp2(x log2(e)): torch's exp2 takes little more than half the time of its exp."""


class TorchNative(SSMBackend):
    """One instance serves one thread: it keeps its scratch memory."""

    name = "torch_native"

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def prepare(self, metadata: SSMMetadata) -> RaggedMetadata:
        return split(metadata)

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
        ragged = _ragged(metadata)
        out = _Output(x)

        def put(rows: Rows, y: torch.Tensor) -> None:
            if bias is not None:
                y.add_(bias)
            out.put(rows, F.silu(y, inplace=True) if silu else y)

        if (singles := ragged.singles) is not None:
            put(singles.tokens, _conv_singles(singles.tokens.take(x), weight, state, singles.slots))
        if (chunks := ragged.chunks) is not None:
            taps = weight.float().t().contiguous()  # [W, C]
            segment = max(1, _SEGMENT_ELEMENTS // x.shape[1])
            for start in range(0, chunks.tokens.num, segment):
                num = min(segment, chunks.tokens.num - start)
                put(chunks.tokens.part(start, num), _conv_flat(x, taps, chunks.tokens, start, num))
            if len(taps) > 1:
                # A sequence's first outputs saw another's tokens: they are made again, from its own past.
                edges = chunks.edges(num_past=len(taps) - 1)
                put(edges.heads, _conv_heads(x, taps, state, chunks, edges))
        return out.take()

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
        ragged = _ragged(metadata)
        out = _Output(u)

        def scan(rows: Rows, recurrence: Callable[..., torch.Tensor]) -> None:
            inputs = rows.take(u).float()
            delta = rows.take(dt).float()
            delta = F.softplus(delta if dt_bias is None else delta + dt_bias)
            y = recurrence(inputs * delta, delta, rows.take(B).float(), rows.take(C).float())
            y.addcmul_(inputs, D)
            if z is not None:
                y.mul_(F.silu(rows.take(z).float()))
            out.put(rows, y)

        if (singles := ragged.singles) is not None:
            scan(singles.tokens, partial(self._step, A, state, singles.slots))
        if (chunks := ragged.chunks) is not None:
            A = (A * _LOG2_E).t().contiguous()
            h = chunks.slots.read(state).transpose(1, 2).contiguous()  # [S, N, C]
            start = 0
            for widths in _time_blocks(chunks.widths, max_tokens=_SEGMENT_ELEMENTS // u.shape[1]):
                rows = chunks.time_major.part(start, sum(widths))
                start += rows.num
                scan(rows, partial(self._scan, A, h, widths))
            chunks.slots.write(state, h.transpose(1, 2))
        return out.take()

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
        ragged = _ragged(metadata)
        heads = ssd.Heads(A, D, dt_bias, dt_limits)
        out = _Output(x)

        def put(rows: Rows, inputs: torch.Tensor, y: torch.Tensor) -> None:
            y = y.addcmul(inputs, D.unsqueeze(1))
            out.put(rows, y if z is None else y.mul_(F.silu(rows.take(z).float())))

        if (singles := ragged.singles) is not None:
            taken, delta, *groups = (singles.tokens.take(each).float() for each in (x, dt, B, C))
            h = singles.slots.read(state).float()
            y = ssd.step(heads, ssd.Inputs(taken, heads.delta(delta), *groups), h)
            singles.slots.write(state, h)
            put(singles.tokens, taken, y)
        if (chunks := ragged.chunks) is not None:
            h = torch.empty(len(chunks.spans), *state.shape[1:], device=state.device)
            h.copy_(chunks.slots.read(state))
            for block in chunks.blocks(_BLOCK_TOKENS):
                taken, delta, *groups = (each[block.places].float() for each in (x, dt, B, C))
                delta = heads.delta(delta)
                if block.valid is not None:
                    delta = delta * block.valid.unsqueeze(2)
                y = ssd.block(heads, ssd.Inputs(taken, delta, *groups), h[: len(block.places)])
                put(block.tokens, *(block.results.take(rows.flatten(0, 1)) for rows in (taken, y)))
            chunks.slots.write(state, h)
        return out.take()

    def _step(
        self,
        A: torch.Tensor,  # [C, N]
        state: torch.Tensor,
        slots: Slots,
        inputs: torch.Tensor,  # [n, C] delta u
        delta: torch.Tensor,  # [n, C]
        B: torch.Tensor,  # [n, N]
        C: torch.Tensor,  # [n, N]
    ) -> torch.Tensor:
        """One token for each of n sequences, whose states it reads and writes; C h [n, C]."""
        h = slots.read(state).float()
        log2_decay = torch.mul((delta * _LOG2_E).unsqueeze(2), A, out=self._buffer("decay", *h.shape, like=A))
        h.mul_(log2_decay.exp2_()).addcmul_(inputs.unsqueeze(2), B.unsqueeze(1))
        slots.write(state, h)
        if len(C) == 1:
            return torch.mv(h[0], C[0]).unsqueeze(0)
        return _sum_last(h.mul_(C.unsqueeze(1)))  # h is a copy, and has been stored

    def _scan(
        self,
        A: torch.Tensor,  # [N, C] times log2(e)
        h: torch.Tensor,  # [S, N, C]
        widths: list[int],
        inputs: torch.Tensor,  # [n, C] delta u
        delta: torch.Tensor,  # [n, C]
        B: torch.Tensor,  # [n, N]
        C: torch.Tensor,  # [n, N]
    ) -> torch.Tensor:
        """Some time steps, `widths[t]` tokens at time t; C h [n, C]. Moves the states h on, in place.

        Channels are innermost, so that every product below runs over long vectors.
        """
        y = torch.empty_like(inputs)
        start = 0
        for block in _time_blocks(widths, max_tokens=_BLOCK_ELEMENTS // A.numel()):
            num = sum(block)
            now = slice(start, start + num)
            start += num
            decays = self._buffer("decay", num, *A.shape, like=A)
            torch.mul(delta[now].unsqueeze(1), A, out=decays).exp2_()
            hs = self._buffer("h", num, *A.shape, like=A)
            torch.mul(inputs[now].unsqueeze(1), B[now].unsqueeze(2), out=hs)
            last = h[: block[0]]
            for step, decay in zip(torch.split(hs, block), torch.split(decays, block), strict=True):
                if len(step) < len(last):  # the shortest sequences ended one step ago
                    h[len(step) : len(last)] = last[len(step) :]
                    last = last[: len(step)]
                last = step.addcmul_(last, decay)
            h[: len(last)] = last
            torch.bmm(C[now].unsqueeze(1), hs, out=y[now].unsqueeze(1))
        return y

    def _buffer(self, name: str, *shape: int, like: torch.Tensor) -> torch.Tensor:
        """Scratch of this shape with undefined content, kept from call to call."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.device != like.device:
            with torch.inference_mode(False):  # else it could not be written to outside of inference mode
                buffer = self._buffers[name] = torch.empty(size, dtype=torch.float32, device=like.device)
        return buffer[:size].view(shape)


def _ragged(metadata: SSMMetadata) -> RaggedMetadata:
    return metadata if isinstance(metadata, RaggedMetadata) else split(metadata)


class _Output:
    """Collects the rows of a result like x [T, C]; the only group of rows to come is the result itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self._like = x
        self._result: torch.Tensor | None = None

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        if self._result is None and rows.index is None and rows.num == len(self._like):
            self._result = values.to(self._like.dtype)
            return
        if self._result is None:
            self._result = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        rows.put(self._result, values)

    def take(self) -> torch.Tensor:
        return torch.empty_like(self._like) if self._result is None else self._result


def _conv_singles(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, slots: Slots) -> torch.Tensor:
    """x [n, C], one token a sequence; the convolution [n, C] before bias and activation, float32."""
    if weight.shape[1] == 1:
        return x.float() * weight[:, 0]
    past = slots.read(state)  # [n, C, W - 1]
    out = _sum_last(past.float() * weight[:, :-1]).addcmul_(x, weight[:, -1])
    new = torch.empty_like(past, memory_format=torch.contiguous_format)
    # One long copy moves all channels by a place; x overwrites what crosses into the next channel.
    new.view(len(x), -1)[:, :-1] = past.view(len(x), -1)[:, 1:]
    new[:, :, -1] = x
    slots.write(state, new)
    return out


def _conv_flat(x: torch.Tensor, taps: torch.Tensor, tokens: Rows, start: int, num: int) -> torch.Tensor:
    """Tokens start .. start + num as if they and those before were one sequence; [num, C] as above."""
    num_past = len(taps) - 1
    first = max(start - num_past, 0)
    before = start - first
    wide = tokens.part(first, before + num).take(x).float()
    out = wide[before:] * taps[num_past]
    for back in range(1, num_past + 1):
        skip = max(back - before, 0)  # outputs that have nothing that far back
        if skip < num:
            out[skip:].addcmul_(wide[before + skip - back : before + num - back], taps[num_past - back])
    return out


def _conv_heads(
    x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor, chunks: Chunks, edges: Edges
) -> torch.Tensor:
    """The outputs [H, C] that a sequence's past takes part in, as above; writes the new states."""
    past = chunks.slots.read(state).transpose(1, 2)  # [S, W - 1, C]
    rows = torch.cat([past.flatten(0, 1), x.index_select(0, edges.tokens).float()])
    chunks.slots.write(state, rows[edges.tails].transpose(1, 2))
    return (rows[edges.windows] * taps).sum(dim=1)


def _time_blocks(widths: list[int], max_tokens: int) -> list[list[int]]:
    """Cuts `widths`, tokens by time, into blocks of at most max_tokens, or of one time step."""
    blocks: list[list[int]] = []
    room = 0
    for width in widths:
        if width > room:
            blocks.append([])
            room = max_tokens
        blocks[-1].append(width)
        room -= width
    return blocks


def _sum_last(x: torch.Tensor) -> torch.Tensor:
    """x [n, C, k] -> [n, C]: of many, by a product with ones, as a reduction over so few elements is slow."""
    if x.numel() <= _FEW_ELEMENTS:
        return x.sum(2)
    return torch.mv(x.view(-1, x.shape[2]), x.new_ones(x.shape[2])).view(x.shape[:2])
