"""State-space operators out of torch operations, for any device. Knows tensors; knows no request and no model.

Decodes go through one batched update; longer queries through a convolution over one buffer and a scan whose only
Python loop is over time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata
from hybridserve.kernels.ssm.ragged import Chunks, RaggedMetadata, Rows, Slots, split

_BLOCK_ELEMENTS = 1 << 18
"""How much of h [tokens, N, C] a scan holds at once: 1 MiB, so that a block stays in cache between its passes."""

_SEGMENT_ELEMENTS = 1 << 16
"""The same for inputs [tokens, C]. Memory that small is recycled; fresh pages cost more than the arithmetic."""

_LOG2_E = math.log2(math.e)


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
        weight = weight.float()

        def finish(out: torch.Tensor) -> torch.Tensor:
            if bias is not None:
                out.add_(bias)
            return F.silu(out, inplace=True) if silu else out

        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if (singles := ragged.singles) is not None:
            singles.tokens.put(y, finish(_conv_singles(singles.tokens.take(x), weight, state, singles.slots)))
        if (chunks := ragged.chunks) is not None:
            chunks.tokens.put(y, finish(_conv_chunks(chunks.tokens.take(x), weight, state, chunks)))
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
        ragged = _ragged(metadata)
        y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        # exp2 takes little more than half of exp's time; the factor costs one pass over the small A.
        A = A * _LOG2_E

        def scan(rows: Rows, recurrence: Callable[..., torch.Tensor]) -> None:
            inputs = rows.take(u).float()
            delta = rows.take(dt).float()
            delta = F.softplus(delta if dt_bias is None else delta + dt_bias)
            out = recurrence(inputs * delta, delta, rows.take(B).float(), rows.take(C).float())
            out.addcmul_(inputs, D)
            if z is not None:
                out.mul_(F.silu(rows.take(z).float()))
            rows.put(y, out)

        if (singles := ragged.singles) is not None:
            scan(singles.tokens, partial(self._step, A, state, singles.slots))
        if (chunks := ragged.chunks) is not None:
            A = A.t().contiguous()
            h = chunks.slots.read(state).transpose(1, 2).contiguous()  # [S, N, C]
            start = 0
            for widths in _time_blocks(chunks.widths, max_tokens=_SEGMENT_ELEMENTS // u.shape[1]):
                rows = chunks.time_major.part(start, sum(widths))
                start += rows.num
                scan(rows, partial(self._scan, A, h, widths))
            chunks.slots.write(state, h.transpose(1, 2))
        return y

    def _step(
        self,
        A: torch.Tensor,  # [C, N] times log2(e)
        state: torch.Tensor,
        slots: Slots,
        inputs: torch.Tensor,  # [n, C] delta u
        delta: torch.Tensor,  # [n, C]
        B: torch.Tensor,  # [n, N]
        C: torch.Tensor,  # [n, N]
    ) -> torch.Tensor:
        """One token for each of n sequences, whose states it reads and writes; C h [n, C]."""
        h = slots.read(state, out=self._buffer("h", len(delta), *A.shape, like=A))
        decay = torch.mul(delta.unsqueeze(2), A, out=self._buffer("decay", *h.shape, like=A)).exp2_()
        h.mul_(decay).addcmul_(inputs.unsqueeze(2), B.unsqueeze(1))
        slots.write(state, h)
        return _sum_last(h.mul_(C.unsqueeze(1)))

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
        """Some time steps, `widths[t]` tokens at time t, of the sequences whose states h are, in place; C h [n, C].

        Channels are innermost, so that every product below runs over long vectors.
        """
        y = torch.empty_like(inputs)
        start = 0
        for block in _time_blocks(widths, max_tokens=_BLOCK_ELEMENTS // A.numel()):
            num = sum(block)
            now = slice(start, start + num)
            start += num
            decays = torch.mul(delta[now].unsqueeze(1), A, out=self._buffer("decay", num, *A.shape, like=A)).exp2_()
            hs = self._buffer("h", num, *A.shape, like=A)
            torch.mul(inputs[now].unsqueeze(1), B[now].unsqueeze(2), out=hs)
            last = h[: block[0]]
            for step, decay in zip(hs.split(block), decays.split(block), strict=True):
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
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.float32, device=like.device)
        return buffer[:size].view(shape)


def _ragged(metadata: SSMMetadata) -> RaggedMetadata:
    return metadata if isinstance(metadata, RaggedMetadata) else split(metadata)


def _conv_singles(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, slots: Slots) -> torch.Tensor:
    """x [n, C], one token a sequence; the convolution before bias and activation [n, C], float32."""
    x = x.float()
    num_past = weight.shape[1] - 1
    out = x * weight[:, num_past]
    if num_past:
        past = slots.read(state)  # [n, C, W - 1]
        new = torch.empty_like(past)
        # One long copy moves all channels by a place; what crosses into the next channel is then overwritten by x.
        new.flatten(1)[:, :-1] = past.flatten(1)[:, 1:]
        new[:, :, -1] = x
        slots.write(state, new)
        out += _sum_last(past.mul_(weight[:, :num_past]))
    return out


def _conv_chunks(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """x [n, C], sequence after sequence; the convolution before bias and activation [n, C], float32.

    Each sequence's last W - 1 inputs go in front of its tokens, so that one shifted product a tap serves all.
    """
    taps = weight.t().contiguous()  # [W, C]
    num_past = len(taps) - 1
    past = chunks.slots.read(state).transpose(1, 2)  # [S, W - 1, C]
    padded, token_rows, tails = _pad_with_past(x, past, chunks)
    chunks.slots.write(state, padded[tails].transpose(1, 2))
    num_outputs = len(padded) - num_past
    out = padded[:num_outputs] * taps[0]
    for k in range(1, num_past + 1):
        out.addcmul_(padded[k : k + num_outputs], taps[k])
    return out if token_rows is None else out.index_select(0, token_rows - num_past)


def _pad_with_past(
    x: torch.Tensor, past: torch.Tensor, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Rows of x [n, C] with each sequence's past [S, P, C] before them, float32 [n + S P, C].

    Also the rows where the tokens are (None: all but the first P), and those of each sequence's last P inputs [S, P].
    """
    num_sequences, num_past, num_channels = past.shape
    tail = torch.arange(-num_past, 0, device=x.device)
    if num_sequences == 1:
        padded = torch.cat([past[0], x.float()])
        return padded, None, (len(padded) + tail).unsqueeze(0)
    shift = num_past * torch.arange(1, num_sequences + 1, device=x.device)
    token_rows = torch.arange(len(x), device=x.device) + shift.index_select(0, chunks.sequence_of_token)
    ends = chunks.ends + shift
    tails = ends.unsqueeze(1) + tail
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    padded = past.new_empty(len(x) + num_sequences * num_past, num_channels)
    padded.index_copy_(0, token_rows, x.float())
    padded[starts.unsqueeze(1) + torch.arange(num_past, device=x.device)] = past
    return padded, token_rows, tails


def _time_blocks(widths: list[int], max_tokens: int) -> list[list[int]]:
    """Cuts a walk over time, `widths[t]` tokens at time t, into blocks of at most max_tokens or one time step."""
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
    """x [n, C, k] -> [n, C]: a product with ones, as a reduction over so few elements is slow."""
    return torch.mv(x.view(-1, x.shape[2]), x.new_ones(x.shape[2])).view(x.shape[:2])
