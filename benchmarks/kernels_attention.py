"""Paged attention: microseconds of each backend's `forward`, and of a step's plan (made in its first call).

Knows shapes and backends; `benchmarks/kernels.py` runs it and prints the report.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from timing import microseconds

from hybridserve.kernels.attention import BACKENDS
from hybridserve.kernels.attention.interface import AttentionMetadata
from hybridserve.kernels.attention.reference import Reference
from hybridserve.kernels.registry import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.attention.interface import AttentionBackend

BLOCK_SIZE = 16
LAYERS = 2

HEADS = {"jamba-100m": (8, 4, 64), "jamba-mini": (32, 8, 128)}
"""Query heads, KV heads, size of a head."""

Lengths = list[tuple[int, int]]  # (context, query) of each sequence

BATCHES: dict[str, Lengths] = {
    "decode 1 x 100": [(100, 1)],
    "decode 1 x 4096": [(4096, 1)],
    "decode 16 x 32..332": [(32 + 20 * i, 1) for i in range(16)],
    "decode 64 x 512": [(512, 1)] * 64,
    "prompt 2048": [(0, 2048)],
    "prompts 16 x 32..256": [(0, 32 + 224 * i // 15) for i in range(16)],
    "chunk 512 after 1536": [(1536, 512)],
    "15 decodes and a chunk": [*[(32 + 20 * i, 1) for i in range(15)], (256, 256)],
}


class Batch:
    """One step's arguments of `forward`, on random blocks of an arena with several layers to a block."""

    def __init__(self, heads: tuple[int, int, int], lengths: Lengths, dtype: torch.dtype) -> None:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(0)
        need = [-(-(context + rows) // BLOCK_SIZE) for context, rows in lengths]
        ids = torch.split(torch.randperm(sum(need), generator=generator) + 1, need)
        table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
        positions = [torch.arange(context, context + rows) for context, rows in lengths]
        slots = [
            row[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, p in zip(ids, positions, strict=True)
        ]
        rows = [rows for _, rows in lengths]
        self.metadata = AttentionMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(rows)]),
            seq_lens=torch.tensor([context + rows for context, rows in lengths]),
            block_table=table,
            slot_mapping=torch.cat(slots),
            query_lens=rows,
            context_lens=[context for context, _ in lengths],
        )
        shape = (sum(need) + 1, LAYERS, 2, BLOCK_SIZE, num_kv_heads, head_dim)
        self.cache = torch.randn(shape, generator=generator).to(dtype)[:, 1]
        packed = torch.randn(sum(rows), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
        self.query, self.key, self.value = torch.split(packed, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        self.scale = head_dim**-0.5

    def run(self, backend: AttentionBackend, metadata: AttentionMetadata) -> torch.Tensor:
        return backend.forward(self.query, self.key, self.value, self.cache, metadata, scale=self.scale)

    def run_first(self, backend: AttentionBackend) -> torch.Tensor:
        """As the first layer of a step does."""
        return self.run(backend, backend.prepare(self.metadata))


def check(backend: AttentionBackend) -> None:
    """No speed of what is wrong: raises AssertionError if the backend differs from the reference."""
    batch = Batch((4, 2, 16), [(33, 1), (0, 20), (18, 5), (7, 1)], torch.float32)
    result, expected = (batch.run_first(each) for each in (backend, Reference()))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def measure(dtype: str, seconds: float = 0.5) -> Iterator[dict[str, Any]]:
    """One record a backend, model and batch. The reference is a definition: its speed is of no interest."""
    for candidate in BACKENDS:
        if candidate is Reference:
            continue
        if reason := candidate.why_not(Capabilities("cpu", dtype)):
            yield {"backend": candidate.name, "skipped": reason}
            continue
        backend = candidate()
        check(backend)
        for (model, heads), (name, lengths) in itertools.product(HEADS.items(), BATCHES.items()):
            batch = Batch(heads, lengths, getattr(torch, dtype))
            prepared = backend.prepare(batch.metadata)
            batch.run(backend, prepared)
            forward = microseconds(partial(batch.run, backend, prepared), seconds)
            first = microseconds(partial(batch.run_first, backend), seconds)
            yield {
                "backend": backend.name,
                "model": model,
                "batch": name,
                "forward_us": forward,
                "plan_us": round(max(0.0, first - forward), 1),
            }
