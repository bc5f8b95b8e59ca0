"""Projections: microseconds a call of each backend, for weights that alternate as the layers of a model do.

Knows shapes and backends; `benchmarks/kernels.py` runs it and prints the report.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from timing import microseconds

from hybridserve.kernels.gemm import BACKENDS
from hybridserve.kernels.gemm.interface import INT8_MAX, ScaledWeight
from hybridserve.kernels.gemm.reference import Reference
from hybridserve.kernels.registry import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.gemm.interface import GemmBackend, Weight

LAYERS = 8
ROWS = (1, 2, 4, 16, 64, 256, 2048)

SHAPES = {
    "jamba-100m": {
        "in_proj": (2048, 512),
        "x_proj": (64, 1024),
        "dt_proj": (1024, 32),
        "out_proj": (512, 1024),
        "lm_head": (8192, 512),
    }
}
"""Outputs, inputs of each projection."""

WEIGHTS = ("none", "int8")
"""Formats of weights: none is the dtype of the activations."""


def quantized(weight: torch.Tensor) -> ScaledWeight:
    """A weight [..., out, in] in int8, as the format of that name has it."""
    scales = weight.float().abs().amax(-1) / INT8_MAX
    return ScaledWeight((weight.float() / scales.unsqueeze(-1)).round().to(torch.int8), scales)


def loaded(backend: GemmBackend, weight: torch.Tensor, weights: str) -> Weight:
    return backend.pack(weight) if weights == "none" else backend.pack_scaled(quantized(weight))


def check(backend: GemmBackend, dtype: torch.dtype, weights: str) -> None:
    """No speed of what is wrong: raises AssertionError if the backend differs from the reference."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 33, generator=generator).to(dtype)
    plain = weight.clone() if weights == "none" else quantized(weight)
    tolerance = {} if weights == "none" else {"rtol": 1e-2, "atol": 5e-3}
    for rows in ROWS[:4]:
        x = torch.randn(rows, 33, generator=generator).to(dtype)
        actual = backend.linear(x, loaded(backend, weight.clone(), weights), None)
        torch.testing.assert_close(actual, Reference().linear(x, plain, None), **tolerance)


def linear_in_turn(backend: GemmBackend, x: torch.Tensor, turn: Iterator[Weight]) -> torch.Tensor:
    return backend.linear(x, next(turn), None)


@torch.inference_mode()
def measure(dtype: str, seconds: float = 0.2) -> Iterator[dict[str, Any]]:
    """One record a backend, format of weights, projection and number of rows; the reference's speed is of no
    interest."""
    torch_dtype = getattr(torch, dtype)
    for candidate, weights in itertools.product(BACKENDS, WEIGHTS):
        if candidate is Reference or candidate.why_not(Capabilities("cpu", dtype, weights)) is not None:
            continue
        backend = candidate()
        check(backend, torch_dtype, weights)
        for model, projections in SHAPES.items():
            for name, (num_outputs, num_inputs) in projections.items():
                layers = [
                    loaded(backend, torch.randn(num_outputs, num_inputs).to(torch_dtype), weights)
                    for _ in range(LAYERS)
                ]
                for rows in ROWS:
                    x = torch.randn(rows, num_inputs).to(torch_dtype)
                    turn = itertools.cycle(layers)
                    yield {
                        "backend": backend.name,
                        "weights": weights,
                        "model": model,
                        "projection": name,
                        "rows": rows,
                        "us": microseconds(partial(linear_in_turn, backend, x, turn), seconds),
                    }
