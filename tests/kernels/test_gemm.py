"""Every projection backend against the reference, and against exact arithmetic where it can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels.gemm import BACKENDS, Reference
from hybridserve.kernels.gemm.torch_native import _widened

if TYPE_CHECKING:
    from hybridserve.kernels.gemm.interface import GemmBackend


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> GemmBackend:
    return request.param()


def operands(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(out_features, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 16, 33])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (96, 64), (700, 513)], ids=str)
def test_equals_reference(
    backend: GemmBackend, rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Sums in float32, one rounding of the result, and one more where torch adds the bias after rounding: two
    units in the last place of the largest addend."""
    x, weight, bias = operands(rows, *shape, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for some_bias in (None, bias):
        expected = Reference().linear(x, weight.clone(), some_bias)
        actual = backend.linear(x, backend.pack(weight.clone()), some_bias)
        assert actual.dtype == dtype
        assert actual.shape == (rows, shape[0])
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_strided_input(backend: GemmBackend, rows: int) -> None:
    """Half of a merged projection, as layers pass it on."""
    x, weight, bias = operands(rows, 12, 32, torch.float32)
    merged = torch.cat([torch.full_like(x, float("nan")), x], dim=1)
    torch.testing.assert_close(
        backend.linear(merged[:, 32:], backend.pack(weight), bias), Reference().linear(x, weight, bias)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(backend: GemmBackend, dtype: torch.dtype) -> None:
    """1 + 512 eps/2 a term at a time would be lost in the half dtype; a float32 sum keeps every bit of it."""
    eps = torch.finfo(dtype).eps
    weight = torch.full((3, 513), eps / 2, dtype=dtype)
    weight[:, 0] = 1
    x = torch.ones(8, 513, dtype=dtype)
    expected = torch.tensor(1 + 512 * eps / 2, dtype=dtype)
    assert torch.equal(backend.linear(x, backend.pack(weight), None), expected.expand(8, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slice_elements", [1, 100, 7 * 33, 1000, 1 << 20])
def test_widened_in_slices(dtype: torch.dtype, slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on machines whose backend never widens: slices of any size, exact to float32 rounding."""
    monkeypatch.setattr("hybridserve.kernels.gemm.torch_native._SLICE_ELEMENTS", slice_elements)
    x, weight, _ = operands(5, 70, 33, dtype)
    actual = _widened(x, weight)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-6)
