"""Mixture of experts: microseconds a call of each backend's routing and experts.

Knows shapes and backends; `benchmarks/kernels.py` runs it and prints the report.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kernels_gemm import WEIGHTS, quantized
from timing import microseconds

from hybridserve.kernels.moe import BACKENDS
from hybridserve.kernels.moe.reference import Reference
from hybridserve.kernels.registry import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.gemm.interface import Weight
    from hybridserve.kernels.moe.interface import MoEBackend

LAYERS = 4
ROWS = (1, 2, 4, 16, 64, 512, 2048)

SHAPES = {"jamba-100m": (8, 2, 512, 1024)}
"""Experts, experts a token, hidden size, intermediate size."""


def _weights(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts, _, hidden, intermediate = shape
    gate_up = torch.randn(num_experts, 2 * intermediate, hidden) / hidden**0.5
    down = torch.randn(num_experts, hidden, intermediate) / intermediate**0.5
    return gate_up.to(dtype), down.to(dtype)


def loaded(
    backend: MoEBackend, gate_up: torch.Tensor, down: torch.Tensor, weights: str
) -> tuple[Weight, Weight]:
    if weights == "none":
        return backend.pack(gate_up, down)
    return backend.pack_scaled(quantized(gate_up), quantized(down))


def check(backend: MoEBackend, weights: str) -> None:
    """No speed of what is wrong: raises AssertionError if the backend differs from the reference."""
    pair = _weights((8, 2, 24, 20), torch.float32)
    plain = pair if weights == "none" else tuple(quantized(weight) for weight in pair)
    tolerance = {} if weights == "none" else {"rtol": 1e-3, "atol": 1e-3}
    for rows in (1, 9):
        x, logits = torch.randn(rows, 24), torch.randn(rows, 8)
        routing = Reference().route(logits, 2, renormalize=False)
        torch.testing.assert_close(backend.route(logits, 2, renormalize=False), routing)
        actual = backend.experts(x, *routing, *loaded(backend, *pair, weights))
        torch.testing.assert_close(actual, Reference().experts(x, *routing, *plain), **tolerance)


def experts_in_turn(
    backend: MoEBackend,
    x: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    turn: Iterator[tuple[Weight, Weight]],
) -> torch.Tensor:
    return backend.experts(x, *routing, *next(turn))


@torch.inference_mode()
def measure(dtype: str, seconds: float = 0.5) -> Iterator[dict[str, Any]]:
    """One record a backend, format of weights, model and number of rows; the reference's speed is of no
    interest."""
    torch_dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    for candidate, weights in itertools.product(BACKENDS, WEIGHTS):
        if candidate is Reference or candidate.why_not(Capabilities("cpu", dtype, weights)) is not None:
            continue
        backend = candidate()
        check(backend, weights)
        for model, shape in SHAPES.items():
            num_experts, top_k, hidden, _ = shape
            layers = [loaded(backend, *_weights(shape, torch_dtype), weights) for _ in range(LAYERS)]
            for rows in ROWS:
                x = torch.randn(rows, hidden).to(torch_dtype)
                logits = torch.randn(rows, num_experts).to(torch_dtype)
                turn = itertools.cycle(layers)
                routing = backend.route(logits, top_k, renormalize=False)

                yield {
                    "backend": backend.name,
                    "weights": weights,
                    "model": model,
                    "rows": rows,
                    "route_us": microseconds(
                        partial(backend.route, logits, top_k, renormalize=False), seconds / 5
                    ),
                    "experts_us": microseconds(partial(experts_in_turn, backend, x, routing, turn), seconds),
                }
