"""Norms: microseconds a call of each backend.

Knows shapes and backends; `benchmarks/kernels.py` runs it and prints the report.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from timing import microseconds

from hybridserve.kernels.pointwise import BACKENDS, Reference
from hybridserve.kernels.registry import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.pointwise.interface import PointwiseBackend

EPS = 1e-6

SEGMENTS = {"jamba-100m": (512,), "jamba-100m, dt B C": (32, 16, 16), "jamba-mini": (4096,)}

ROWS = (1, 16, 64, 2048)


def check(backend: PointwiseBackend) -> None:
    """No speed of what is wrong: raises AssertionError if the backend differs from the reference."""
    x, weight = torch.randn(5, 40), torch.rand(40)
    for sizes in ((40,), (20, 13, 7)):
        expected = Reference().rms_norm(x, weight, EPS, sizes)
        torch.testing.assert_close(backend.rms_norm(x, weight, EPS, sizes), expected)


@torch.inference_mode()
def measure(dtype: str, seconds: float = 0.2) -> Iterator[dict[str, Any]]:
    """One record a backend, shape and number of rows; the reference's speed is of no interest."""
    for candidate in BACKENDS:
        if candidate is Reference:
            continue
        if reason := candidate.why_not(Capabilities("cpu", dtype)):
            yield {"backend": candidate.name, "skipped": reason}
            continue
        backend = candidate()
        check(backend)
        for (shape, sizes), num_rows in itertools.product(SEGMENTS.items(), ROWS):
            x = torch.randn(num_rows, sum(sizes)).to(getattr(torch, dtype))
            weight = torch.rand(sum(sizes)).to(getattr(torch, dtype))
            call = partial(backend.rms_norm, x, weight, EPS, sizes)
            yield {
                "backend": backend.name,
                "shape": shape,
                "rows": num_rows,
                "rms_norm_us": microseconds(call, seconds),
            }
