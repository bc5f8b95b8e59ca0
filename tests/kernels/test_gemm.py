"""Every projection backend against the reference, and against exact arithmetic where it can be had."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels.gemm import BACKENDS, Native, Reference
from hybridserve.kernels.gemm import native as native_module
from hybridserve.kernels.gemm.products import Products
from hybridserve.kernels.gemm.torch_native import _widened
from hybridserve.kernels.registry import Capabilities
from tests.harness.native_libraries import load_anew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.gemm.interface import GemmBackend


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> GemmBackend:
    """Skips where the backend can't run, or can't run with the dtype that the test asks for."""
    callspec = getattr(request.node, "callspec", None)
    dtype = callspec.params.get("dtype", torch.float32) if callspec else torch.float32
    return made(request.param, dtype)


@pytest.fixture
def native() -> Native:
    return made(Native)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(backend: type[GemmBackend], dtype: torch.dtype = torch.float32) -> GemmBackend:
    if reason := backend.why_not(Capabilities("cpu", str(dtype).removeprefix("torch."))):
        pytest.skip(f"{backend.name} {reason}")
    return backend()


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


@pytest.mark.parametrize("rows", [0, 2, 200])
def test_a_weight_may_have_no_outputs(backend: GemmBackend, rows: int) -> None:
    x, weight = torch.randn(rows, 16), torch.empty(0, 16)
    assert backend.linear(x, backend.pack(weight), None).shape == (rows, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slice_elements", [1, 100, 7 * 33, 1000, 1 << 20])
def test_widened_in_slices(dtype: torch.dtype, slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on machines whose backend never widens: slices of any size, exact to float32 rounding."""
    monkeypatch.setattr("hybridserve.kernels.gemm.torch_native._SLICE_ELEMENTS", slice_elements)
    x, weight, _ = operands(5, 70, 33, dtype)
    actual = _widened(x, weight)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (64, 32), (37, 200), (130, 1057)], ids=str)
@pytest.mark.usefixtures("threads")
def test_bits_depend_on_no_company(native: Native, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A row has the same bits alone and among any others, in any place, on one thread and on several."""
    x, weight, bias = operands(70, *shape, dtype)
    many = x.repeat(5, 1)  # enough rows for threads to divide them, not the outputs
    torch.set_num_threads(1)
    expected = torch.cat([native.linear(row[None], weight, bias) for row in x])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for rows in range(1, 71):
            assert torch.equal(native.linear(x[:rows], weight, bias), expected[:rows])
            assert torch.equal(native.linear(x[70 - rows :], weight, bias), expected[70 - rows :])
        assert torch.equal(native.linear(x[order], weight, bias), expected[order])
        assert torch.equal(native.linear(many, weight, bias), expected.repeat(5, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 200])
def test_reads_and_writes_only_its_own(native: Native, rows: int, dtype: torch.dtype) -> None:
    """Rows of x and of the weight lie apart, begin at any element, with NaN around; a row of NaN is alone."""
    x, weight, bias = operands(rows, 23, 45, dtype)
    expected = native.linear(x, weight, bias)
    wide_x = torch.full((rows + 2, 45 + 12), float("nan"), dtype=dtype)
    wide_x[1:-1, 7:-5] = x
    wide_weight = torch.full((25, 45 + 4), float("nan"), dtype=dtype)
    wide_weight[1:-1, 1:-3] = weight
    wide_bias = torch.full((30,), float("nan"), dtype=dtype)
    wide_bias[3:26] = bias
    actual = native.linear(wide_x[1:-1, 7:-5], wide_weight[1:-1, 1:-3], wide_bias[3:26])
    assert torch.equal(actual, expected)
    columns = x.t().contiguous().t()
    assert torch.equal(native.linear(columns, weight, bias), expected)
    x[0] = float("nan")
    actual = native.linear(x, weight, bias)
    assert actual[0].isnan().all()
    assert torch.equal(actual[1:], expected[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_and_nan_arrive(native: Native, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, float("inf")], [float("-inf"), 1.0], [float("nan"), 0.0]], dtype=dtype)
    actual = native.linear(x, torch.tensor([[2.0, 1.0]], dtype=dtype), None)
    torch.testing.assert_close(
        actual, torch.tensor([[float("inf")], [float("-inf")], [float("nan")]], dtype=dtype), equal_nan=True
    )


def test_float32_is_close_to_exact_sums(native: Native) -> None:
    x, weight, _ = operands(9, 300, 2048, torch.float32)
    exact = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(native.linear(x, weight, None), exact, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused(native: Native) -> None:
    x, weight, _ = operands(2, 4, 8, torch.float32)
    for wrong in (weight.bfloat16(), weight[:, 1:], weight.repeat(1, 2)[:, ::2]):
        with pytest.raises(ValueError, match="weight"):
            native.linear(x, wrong, None)


def test_other_devices_and_dtypes_are_left_to_others() -> None:
    assert Native.why_not(Capabilities("cuda", "float32")) == "runs on CPUs only"
    assert "float16" in str(Native.why_not(Capabilities("cpu", "float16")))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is x86's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_portable_code_equals_reference(
    native: Native, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a machine without AVX runs: other vectors, no fused multiply-add."""
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -mno-avx")
    native._gemm = load_anew(native_module.SOURCE, native_module.FUNCTIONS).gemm
    native._products = Products(load_anew)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for rows in (1, 4, 9, 200):
        x, weight, bias = operands(rows, 70, 133, dtype)
        actual = native.linear(x, weight, bias)
        expected = Reference().linear(x, weight, bias)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=4 * tolerance)
        assert torch.equal(native.linear(x[-1:], weight, bias), actual[-1:])
