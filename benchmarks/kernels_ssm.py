"""Recurrences: microseconds a call of each backend's convolution and scan, and of preparing a step.

Knows shapes and backends; `benchmarks/kernels.py` runs it and prints the report.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from timing import microseconds

from hybridserve.kernels.registry import Capabilities
from hybridserve.kernels.ssm import BACKENDS
from hybridserve.kernels.ssm.interface import SSMMetadata
from hybridserve.kernels.ssm.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.ssm.interface import SSMBackend

LAYERS = 2
WIDTH = 4

SHAPES = {"jamba-100m": (1024, 16)}
"""Mamba: channels, states a channel."""

HEADS = {"mamba2-100m": (16, 64, 1, 64), "bamba-9b": (128, 64, 1, 128)}
"""Mamba-2: heads, channels of a head, groups, states a channel."""

BATCHES = {
    "decode 1": [1],
    "decode 16": [1] * 16,
    "decode 64": [1] * 64,
    "prompt 2048": [2048],
    "prompts 16 x 128": [128] * 16,
    "prompts 16 x 32..256": [32 + 224 * i // 15 for i in range(16)],
    "15 decodes and a chunk": [*[1] * 15, 256],
}


class Batch:
    """One layer's arguments, with states in a slot-major arena of several layers."""

    def __init__(self, shape: tuple[int, int], lens: list[int], dtype: torch.dtype) -> None:
        channels, states = shape
        total = sum(lens)
        generator = torch.Generator().manual_seed(0)

        def rand(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        slots = torch.randperm(len(lens), generator=generator) + 1
        self.metadata = SSMMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(lens)]),
            state_slots=slots,
            has_state=torch.ones(len(lens), dtype=torch.bool),
            query_lens=lens,
        )
        self.conv_state = rand(len(lens) + 1, LAYERS, channels, WIDTH - 1).to(dtype)[:, 1]
        self.ssm_state = rand(len(lens) + 1, LAYERS, channels, states)[:, 1]
        self.weight, self.bias = rand(channels, WIDTH).to(dtype), rand(channels).to(dtype)
        self.x, self.z = rand(total, 2 * channels).to(dtype).chunk(2, dim=1)
        self.B, self.C = rand(total, 2 * states).to(dtype).chunk(2, dim=1)
        self.dt, self.dt_bias = rand(total, channels).to(dtype), rand(channels) - 4
        self.A, self.D = -torch.arange(1.0, states + 1).repeat(channels, 1), torch.ones(channels)

    def conv(self, backend: SSMBackend, metadata: SSMMetadata) -> torch.Tensor:
        return backend.causal_conv1d(self.x, self.weight, self.bias, self.conv_state, metadata)

    def scan(self, backend: SSMBackend, metadata: SSMMetadata) -> torch.Tensor:
        return backend.selective_scan(
            self.x, self.dt, self.A, self.B, self.C, self.D, self.z, self.dt_bias, self.ssm_state, metadata
        )


class HeadsBatch(Batch):
    """The same for Mamba-2, whose convolution is over x, B and C together."""

    def __init__(self, shape: tuple[int, int, int, int], lens: list[int], dtype: torch.dtype) -> None:
        heads, size, groups, states = shape
        total, shared = sum(lens), groups * states
        super().__init__((heads * size + 2 * shared, 1), lens, dtype)
        generator = torch.Generator().manual_seed(1)

        def rand(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        self.ssm_state = rand(len(lens) + 1, LAYERS, heads, size, states)[:, 1]
        x, B, C = self.x.split([heads * size, shared, shared], 1)
        self.u, self.gate = x.unflatten(1, (heads, size)), rand(total, heads, size).to(dtype)
        self.B, self.C = B.unflatten(1, (groups, states)), C.unflatten(1, (groups, states))
        self.dt, self.dt_bias = rand(total, heads).to(dtype), rand(heads) - 4
        self.A, self.D = -torch.arange(1.0, heads + 1), torch.ones(heads)

    def scan(self, backend: SSMBackend, metadata: SSMMetadata) -> torch.Tensor:
        inputs = (self.u, self.dt, self.A, self.B, self.C, self.D, self.gate, self.dt_bias)
        return backend.ssd_scan(*inputs, self.ssm_state, metadata)


def check(backend: SSMBackend) -> None:
    """No speed of what is wrong: raises AssertionError if the backend differs from the reference."""
    for kind, shape, operator in (
        (Batch, (24, 16), Batch.conv),
        (Batch, (24, 16), Batch.scan),
        (HeadsBatch, (4, 16, 2, 24), HeadsBatch.scan),
    ):
        ours, theirs = (kind(shape, [1, 70, 1, 5], torch.float32) for _ in range(2))
        result = operator(ours, backend, backend.prepare(ours.metadata))
        torch.testing.assert_close(
            result, operator(theirs, Reference(), theirs.metadata), atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(ours.conv_state, theirs.conv_state)
        torch.testing.assert_close(ours.ssm_state, theirs.ssm_state, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def measure(dtype: str, seconds: float = 0.5) -> Iterator[dict[str, Any]]:
    """One record a backend, model and batch; the reference is the definition: its speed is of no interest."""
    for candidate in BACKENDS:
        if candidate is Reference:
            continue
        if reason := candidate.why_not(Capabilities("cpu", dtype)):
            yield {"backend": candidate.name, "skipped": reason}
            continue
        backend = candidate()
        check(backend)
        models = [
            *((model, partial(Batch, shape)) for model, shape in SHAPES.items()),
            *((model, partial(HeadsBatch, shape)) for model, shape in HEADS.items()),
        ]
        for (model, kind), (name, lens) in itertools.product(models, BATCHES.items()):
            batch = kind(lens, getattr(torch, dtype))
            prepared = backend.prepare(batch.metadata)
            yield {
                "backend": backend.name,
                "model": model,
                "batch": name,
                "prepare_us": microseconds(partial(backend.prepare, batch.metadata), seconds / 5),
                "conv_us": microseconds(partial(batch.conv, backend, prepared), seconds),
                "scan_us": microseconds(partial(batch.scan, backend, prepared), seconds),
            }
