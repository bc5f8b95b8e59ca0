"""Whether two backends say the same. Knows tolerances; knows no operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hybridserve.kernels.registry import candidates

if TYPE_CHECKING:
    from benchmarks.gpu.cases import Case

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Of an element, and of the root mean square of all. In float32 it is too small for TF32, which would be four
times as far off in every tenth element."""

ROUNDED_ROWS = 1e-2
"""Where activations are rounded to int8: a row on an edge may go either way."""


def backend_of(operator: str, name: str = "triton") -> Any:
    """A backend by its name, whether or not the registry would take it here."""
    return next(backend for backend in candidates(operator) if backend.name == name)()


def assert_same(case: Case, backend: Any, reference: Any, dtype: torch.dtype, weights: str = "none") -> None:
    """AssertionError unless both return and overwrite the same, and all of it finite."""
    tolerance = max(TOLERANCE[dtype], ROUNDED_ROWS if weights == "int8-w8a8" else 0)
    for actual, expected in zip(case.results(backend), case.results(reference), strict=True):
        assert expected.isfinite().all(), f"{case.name}: the reference itself is not finite"
        if not expected.is_floating_point():
            assert torch.equal(actual, expected), f"{case.name}: other numbers"
            continue
        size = expected.double().square().mean().sqrt().item()
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(size, 1e-6))
