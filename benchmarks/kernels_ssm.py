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
"""Channels, states a channel."""

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


def check(backend: SSMBackend) -> None:
    """No speed of what is wrong: raises AssertionError if the backend differs from the reference."""
    for operator in (Batch.conv, Batch.scan):
        ours, theirs = (Batch((24, 16), [1, 20, 1, 5], torch.float32) for _ in range(2))
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
        for (model, shape), (name, lens) in itertools.product(SHAPES.items(), BATCHES.items()):
            batch = Batch(shape, lens, getattr(torch, dtype))
            prepared = backend.prepare(batch.metadata)
            yield {
                "backend": backend.name,
                "model": model,
                "batch": name,
                "prepare_us": microseconds(partial(backend.prepare, batch.metadata), seconds / 5),
                "conv_us": microseconds(partial(batch.conv, backend, prepared), seconds),
                "scan_us": microseconds(partial(batch.scan, backend, prepared), seconds),
            }
