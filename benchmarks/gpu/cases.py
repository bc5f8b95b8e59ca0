"""Calls of operators at the widths of real models: inputs from a seed, and how many bytes and operations a
call needs at least. The same ones are checked against the references and timed.

Knows interfaces of operators; knows no backend.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridserve.kernels.attention.interface import AttentionMetadata
from hybridserve.kernels.ssm.interface import SSMMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu.shapes import Shape

BLOCK_SIZE = 16

LAYERS = 2
"""That a block or slot holds, so that one layer's share of it lies apart."""

EPS = 1e-6

Lengths = list[tuple[int, int]]
"""Tokens before the step, and in it, of each sequence."""

Tensors = tuple[torch.Tensor, ...]


class Bound(NamedTuple):
    """An operator of one backend with its arguments."""

    call: Callable[[], Tensors]
    """Runs it, and returns what it returns. Again, it goes on from what it has overwritten."""

    overwritten: Callable[[], Tensors] = tuple


@dataclass(frozen=True, slots=True)
class Case:
    operator: str
    name: str
    shape: str
    num_bytes: float  # that have to be moved, each once
    num_ops: float  # multiplications and additions
    arithmetic: str  # which of `rates.Rates` bounds them
    bind: Callable[[Any], Bound]
    """Given a backend. Memory that the call is going to overwrite is as it was at first, or poisoned."""

    def results(self, backend: Any) -> Tensors:
        """All that one call returns and overwrites."""
        bound = self.bind(backend)
        returned = bound.call()
        return (*returned, *bound.overwritten())


class Inputs:
    """Random tensors of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = torch.randn(size, generator=self._generator, device=self.device)
        return x.to(dtype or self.dtype)

    def codes(self, *size: int) -> torch.Tensor:
        return torch.randint(-127, 128, size, generator=self._generator, device=self.device, dtype=torch.int8)

    def integers(self, below: int, *size: int) -> torch.Tensor:
        return torch.randint(below, size, generator=self._generator, device=self.device)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self._generator, device=self.device)

    def tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)


def element_bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def kind_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- attention


def attention(
    shape: Shape,
    lengths: Lengths,
    dtype: torch.dtype,
    device: str,
    *,
    name: str,
    window: int | None = None,
    first_block: int = 1,
) -> Case:
    """`first_block`: of the arena's blocks, those before it are nobody's; their memory is not written."""
    inputs = Inputs(dtype, device)
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    need = [-(-(context + rows) // BLOCK_SIZE) for context, rows in lengths]
    ids = torch.split(inputs.permutation(sum(need)) + first_block, need)
    positions = [torch.arange(context, context + rows, device=device) for context, rows in lengths]
    slots = [
        row[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, p in zip(ids, positions, strict=True)
    ]
    query_lens = [rows for _, rows in lengths]
    num_tokens = sum(query_lens)
    metadata = AttentionMetadata(
        query_start=inputs.tensor([0, *itertools.accumulate(query_lens)]),
        seq_lens=inputs.tensor([context + rows for context, rows in lengths]),
        block_table=torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True),
        slot_mapping=torch.cat(slots),
        query_lens=query_lens,
        context_lens=[context for context, _ in lengths],
    )
    arena = torch.empty(
        (first_block + sum(need), LAYERS, 2, BLOCK_SIZE, kv_heads, head_dim), dtype=dtype, device=device
    )
    arena[0].zero_()
    arena[first_block:].normal_(generator=inputs._generator)
    packed = inputs.normal(num_tokens, heads + 2 * kv_heads, head_dim)
    query, key, value = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)

    blocks, offsets = metadata.slot_mapping // BLOCK_SIZE, metadata.slot_mapping % BLOCK_SIZE

    def bind(backend: Any) -> Bound:
        cache, prepared = arena[:, LAYERS - 1], backend.prepare(metadata)
        cache[blocks, :, offsets] = float("nan")
        arguments, scale = (query, key, value, cache, prepared), head_dim**-0.5
        return Bound(
            lambda: (backend.forward(*arguments, scale=scale, window=window),),
            lambda: (cache[blocks, :, offsets],),
        )

    seen = [min(context + rows, (window or context + rows) + rows) for context, rows in lengths]
    pairs = sum(
        min(p + 1, window or p + 1) for context, rows in lengths for p in range(context, context + rows)
    )
    size = element_bytes(dtype)
    moved = 2 * sum(seen) * kv_heads + num_tokens * (2 * heads + 2 * kv_heads)
    return Case(
        *("attention", name, shape.name, size * head_dim * moved, 4 * heads * head_dim * pairs),
        *(kind_of(dtype), bind),
    )


# ---- recurrences


def _states(
    inputs: Inputs, lens: Sequence[int], first_slot: int, *size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, SSMMetadata]:
    """One layer's states [slots, *size], of which only those of the batch are written."""
    slots = inputs.permutation(len(lens)) + first_slot
    arena = torch.empty((first_slot + len(lens), LAYERS, *size), dtype=dtype, device=inputs.device)
    arena[0].zero_()
    arena[first_slot:].normal_(generator=inputs._generator)
    metadata = SSMMetadata(
        query_start=inputs.tensor([0, *itertools.accumulate(lens)]),
        state_slots=slots,
        has_state=inputs.tensor([i % 3 != 2 for i in range(len(lens))]),
        query_lens=list(lens),
    )
    return arena[:, LAYERS - 1], metadata


def convolution(
    shape: Shape, lens: Sequence[int], dtype: torch.dtype, device: str, *, name: str, first_slot: int = 1
) -> Case:
    inputs, channels = Inputs(dtype, device), shape.channels
    state, metadata = _states(inputs, lens, first_slot, channels, shape.taps - 1, dtype=dtype)
    x, _ = inputs.normal(sum(lens), 2 * channels).chunk(2, dim=1)
    weight, bias = inputs.normal(channels, shape.taps), inputs.normal(channels)

    live, before = metadata.state_slots, state[metadata.state_slots]

    def bind(backend: Any) -> Bound:
        prepared = backend.prepare(metadata)
        state[live] = before
        return Bound(
            lambda: (backend.causal_conv1d(x, weight, bias, state, prepared),), lambda: (state[live],)
        )

    moved = 2 * sum(lens) + 2 * len(lens) * (shape.taps - 1)
    ops = 2 * shape.taps * sum(lens) * channels
    return Case("ssm", name, shape.name, element_bytes(dtype) * channels * moved, ops, "float32", bind)


def scan(
    shape: Shape, lens: Sequence[int], dtype: torch.dtype, device: str, *, name: str, first_slot: int = 1
) -> Case:
    """Its exponentials, one a channel, state and token, are not counted: they may be what bounds it."""
    inputs, channels, states, total = Inputs(dtype, device), shape.channels, shape.states, sum(lens)
    state, metadata = _states(inputs, lens, first_slot, channels, states, dtype=torch.float32)
    u, z = inputs.normal(total, 2 * channels).chunk(2, dim=1)
    B, C = inputs.normal(total, 2 * states).chunk(2, dim=1)
    dt, bias = inputs.normal(total, channels), inputs.normal(channels, dtype=torch.float32) - 4
    A = -torch.arange(1.0, states + 1, device=device).repeat(channels, 1)
    D = torch.ones(channels, device=device)

    live, before = metadata.state_slots, state[metadata.state_slots]

    def bind(backend: Any) -> Bound:
        prepared = backend.prepare(metadata)
        state[live] = before
        return Bound(
            lambda: (backend.selective_scan(u, dt, A, B, C, D, z, bias, state, prepared),),
            lambda: (state[live],),
        )

    moved = element_bytes(dtype) * total * (4 * channels + 2 * states) + 8 * len(lens) * channels * states
    return Case("ssm", name, shape.name, moved, 7 * total * channels * states, "float32", bind)


def ssd(
    heads: tuple[int, int, int, int],
    lens: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    name: str,
    shape: str,
    first_slot: int = 1,
) -> Case:
    """Mamba-2. `heads`: how many, their channels, groups, and states of a channel."""
    num_heads, size, groups, states = heads
    inputs, total = Inputs(dtype, device), sum(lens)
    state, metadata = _states(inputs, lens, first_slot, num_heads, size, states, dtype=torch.float32)
    x, z = inputs.normal(total, num_heads, size), inputs.normal(total, num_heads, size)
    B, C = inputs.normal(total, 2 * groups, states).chunk(2, dim=1)
    dt, bias = inputs.normal(total, num_heads), inputs.normal(num_heads, dtype=torch.float32) - 4
    A, D = -torch.arange(1.0, num_heads + 1, device=device), torch.ones(num_heads, device=device)
    live, before = metadata.state_slots, state[metadata.state_slots]

    def bind(backend: Any) -> Bound:
        prepared = backend.prepare(metadata)
        state[live] = before
        return Bound(
            lambda: (backend.ssd_scan(x, dt, A, B, C, D, z, bias, state, prepared),),
            lambda: (state[live],),
        )

    elements = num_heads * size
    moved = element_bytes(dtype) * total * (3 * elements + 2 * groups * states)
    moved += 8 * len(lens) * elements * states
    return Case("ssm", name, shape, moved, 5 * total * elements * states, "float32", bind)


# ---- rows


def rms_norm(
    sizes: tuple[int, ...], rows: int, dtype: torch.dtype, device: str, *, name: str, shape: str
) -> Case:
    inputs = Inputs(dtype, device)
    x, weight = inputs.normal(rows, sum(sizes)), inputs.normal(sum(sizes))
    return _rows(name, shape, 2 * x.nbytes, lambda backend: (backend.rms_norm(x, weight, EPS, sizes),))


def add_rms_norm(shape: Shape, rows: int, dtype: torch.dtype, device: str, *, name: str) -> Case:
    inputs = Inputs(dtype, device)
    x, residual = inputs.normal(rows, shape.hidden), inputs.normal(rows, shape.hidden)
    weight = inputs.normal(shape.hidden)

    def run(backend: Any, x: torch.Tensor) -> Tensors:
        return (backend.add_rms_norm(x, residual, weight, EPS), x)

    return _overwriting(name, shape.name, 4 * x.nbytes, x, run)


def silu_and_mul(shape: Shape, rows: int, dtype: torch.dtype, device: str, *, name: str) -> Case:
    x = Inputs(dtype, device).normal(rows, 2 * shape.inner)
    return _rows(name, shape.name, 1.5 * x.nbytes, lambda backend: (backend.silu_and_mul(x),))


def rotate(shape: Shape, rows: int, dtype: torch.dtype, device: str, *, name: str) -> Case:
    inputs, half = Inputs(dtype, device), shape.head_dim // 2
    heads = shape.heads + shape.kv_heads
    x = inputs.normal(rows, heads + shape.kv_heads, shape.head_dim)[:, :heads]
    angles = inputs.normal(rows, 1, half, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    return _rows(name, shape.name, 2 * x.nbytes, lambda backend: (backend.rotate(x, cos, sin),))


def keep_top_k(shape: Shape, rows: int, device: str, *, name: str) -> Case:
    inputs = Inputs(torch.float32, device)
    probs, top_k = inputs.normal(rows, shape.vocab).softmax(-1), inputs.integers(50, rows)

    def run(backend: Any, probs: torch.Tensor) -> Tensors:
        backend.keep_top_k(probs, top_k)
        return (probs,)

    return _overwriting(name, shape.name, 2 * probs.nbytes, probs, run)


def keep_top_p(shape: Shape, rows: int, device: str, *, name: str) -> Case:
    """What is kept is told as its sum: which of two elements that are hardly likely is the last one depends
    on how a sum was rounded."""
    inputs = Inputs(torch.float32, device)
    probs, top_p = inputs.normal(rows, shape.vocab).softmax(-1), torch.full((rows,), 0.9, device=device)

    def run(backend: Any, probs: torch.Tensor) -> Tensors:
        backend.keep_top_p(probs, top_p)
        return (probs.sum(1),)

    return _overwriting(name, shape.name, 2 * probs.nbytes, probs, run)


def _rows(name: str, shape: str, num_bytes: float, run: Callable[[Any], Tensors]) -> Case:
    def bind(backend: Any) -> Bound:
        return Bound(lambda: run(backend))

    return Case("pointwise", name, shape, num_bytes, 0, "float32", bind)


def _overwriting(
    name: str, shape: str, num_bytes: float, x: torch.Tensor, run: Callable[[Any, torch.Tensor], Tensors]
) -> Case:
    """Of an operator that writes to x."""

    def bind(backend: Any) -> Bound:
        own = x.clone()
        return Bound(lambda: run(backend, own))

    return Case("pointwise", name, shape, num_bytes, 0, "float32", bind)
