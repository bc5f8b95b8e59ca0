"""One-byte weights in C: to the bit against the arithmetic that integers.h describes, and in any company."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels import gemm, moe
from hybridserve.kernels.gemm import native as gemm_native
from hybridserve.kernels.gemm.interface import INT8_MAX, ScaledWeight
from hybridserve.kernels.gemm.native import LARGEST, Native, NativeExact
from hybridserve.kernels.gemm.products import Products
from hybridserve.kernels.moe import native as moe_native
from hybridserve.kernels.registry import Capabilities, select
from tests.harness.native_libraries import load_anew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.moe.interface import ExpertGroups

pytestmark = pytest.mark.skipif(
    Native.why_not(Capabilities("cpu", "float32")) is not None, reason="no C compiler"
)

PIECE = 1024
"""Inputs whose products are added up in whole numbers."""

KINDS = {"int8": (torch.int8, False), "int8-w8a8": (torch.int8, True), "fp8": (torch.float8_e4m3fn, False)}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def scaled(*shape: int, kind: str = "int8") -> ScaledWeight:
    generator = torch.Generator().manual_seed(sum(shape))
    dtype, int8_rows = KINDS[kind]
    codes = torch.randint(-128, 128, shape, generator=generator)
    scales = torch.rand(shape[:-1], generator=generator) / 1000
    return ScaledWeight((codes if dtype == torch.int8 else codes.float() / 9).to(dtype), scales, int8_rows)


def rows(num: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num, size, generator=torch.Generator().manual_seed(num + size)).to(dtype)


def whole_numbers(x: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
    """The product as integers.h has it: rounded rows, exact sums of pieces, added up as floats."""
    x = x.float()
    limit = INT8_MAX if weight.int8_rows else LARGEST
    row_scales = (x.abs().amax(1, keepdim=True) / limit).clamp(min=torch.finfo(torch.float32).tiny)
    rounded = (x / row_scales).round().long()
    total = torch.zeros(len(x), len(weight.codes))
    for some, codes in zip(rounded.split(PIECE, 1), weight.codes.long().split(PIECE, 1), strict=True):
        sums = some @ codes.t()
        assert sums.abs().amax() < 2**31, "what the kernel adds up in 32 bits"
        total += sums.float()
    return total * weight.scales * row_scales


@pytest.mark.parametrize("kind", ["int8", "int8-w8a8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 63), (7, 64), (64, 65), (31, 700), (5, 1024), (5, 1030), (4, 3210)], ids=str
)
@pytest.mark.parametrize("num", [1, 2, 3, 7, 200])
def test_bits_are_those_of_whole_numbers(
    num: int, shape: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    x, weight = rows(num, shape[1], dtype), scaled(*shape, kind=kind)
    assert torch.equal(Native().linear(x, weight, None), whole_numbers(x, weight).to(dtype))
    bias = rows(1, shape[0], dtype)[0]
    with_bias = (whole_numbers(x, weight) + bias.float()).to(dtype)
    assert torch.equal(Native().linear(x, weight, bias), with_bias)


@pytest.mark.parametrize("num_inputs", [1023, 1024, 2048, 9999])
@pytest.mark.parametrize("code", [127, -127, -128])
def test_no_sum_overflows(num_inputs: int, code: int) -> None:
    """Every product as large as it can be; a piece of all 1,024 is 163,840 below 2^31."""
    weight = ScaledWeight(torch.full((4, num_inputs), code, dtype=torch.int8), torch.ones(4))
    for sign in (1.0, -1.0):
        x = torch.full((5, num_inputs), sign)
        y = Native().linear(x, weight, None)
        torch.testing.assert_close(y, torch.full((5, 4), sign * code * num_inputs), rtol=1e-6, atol=0)


def test_denormal_rows_do_not_overflow() -> None:
    """A scale that is itself denormal, and 1.4 units of it, would make whole numbers of 22,936."""
    x = torch.full((3, 1024), 22936 * 2.0**-149)
    weight = ScaledWeight(torch.full((4, 1024), -128, dtype=torch.int8), torch.full((4,), 2.0**100))
    assert (Native().linear(x, weight, None) <= 0).all()


def test_rounding_is_bounded_by_the_largest_of_a_row() -> None:
    """One element a thousand times the others: no element is off by more than half a step of the row."""
    x, weight = rows(9, 1000), scaled(30, 1000)
    x[3, 77] = 5000
    exact = (x.double() @ weight.codes.double().t()) * weight.scales
    step = x.abs().amax(1, keepdim=True) / LARGEST
    bound = step / 2 * weight.codes.float().abs().sum(1) * weight.scales
    error = (Native().linear(x, weight, None) - exact).abs()
    assert (error < bound).all()
    assert (error < bound / 5).all(), "errors of elements cancel: a truncation would not"
    assert error[3].max() > 20 * error[2].max()


def test_rows_have_15_bits() -> None:
    """From -16383 to 16383: beside an element of 1, what is read of another says how fine a step is. With a
    bit less, 0.6 steps would be none; with a bit more, 0.4 would not."""
    assert Native.rounding == moe.Native.rounding == "to 15 bits a row"
    step = 1 / (2**14 - 1)
    x = torch.tensor([[1.0, 0.6 * step], [1.0, 0.4 * step], [1.0, 1.4 * step], [-1.0, -0.6 * step]])
    expected = torch.tensor([step, 0, step, -step])
    second = ScaledWeight(torch.tensor([[0, 1]], dtype=torch.int8), torch.ones(1))
    torch.testing.assert_close(Native().linear(x, second, None)[:, 0], expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(NativeExact().linear(x, second, None)[:, 0], x[:, 1], rtol=1e-5, atol=0)

    gate_up = ScaledWeight(torch.tensor([[[100, 0], [0, 1]]], dtype=torch.int8), torch.ones(1, 2))
    down = ScaledWeight(torch.tensor([[[1], [1]]], dtype=torch.int8), torch.ones(1, 2))
    routing = torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int64)
    y = moe.Native().experts(x, *routing, gate_up, down)[:, 0]  # silu(100) is 100
    torch.testing.assert_close(y[:3], 100 * expected[:3], rtol=1e-4, atol=0)
    y = moe.NativeExact().experts(x, *routing, gate_up, down)[:, 0]
    torch.testing.assert_close(y[:3], 100 * x[:3, 1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("backend", [Native(), NativeExact()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (37, 200), (130, 1057)], ids=str)
@pytest.mark.usefixtures("threads")
def test_bits_depend_on_no_company(
    backend: Native, shape: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    x, weight, bias = rows(20, shape[1], dtype), scaled(*shape, kind=kind), rows(1, shape[0], dtype)[0]
    many = x.repeat(10, 1)  # enough rows for threads to divide them, not the outputs
    torch.set_num_threads(1)
    expected = torch.cat([backend.linear(row[None], weight, bias) for row in x])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num in range(1, 21):
            assert torch.equal(backend.linear(x[20 - num :], weight, bias), expected[20 - num :])
        assert torch.equal(backend.linear(many, weight, bias), expected.repeat(10, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 3, 8])
def test_reads_only_its_own(num: int, kind: str) -> None:
    """Rows lie apart, with NaN and the largest codes around."""
    x, weight = rows(num, 45), scaled(23, 45, kind=kind)
    for backend in (Native(), NativeExact()):
        expected = backend.linear(x, weight, None)
        wide_x = torch.full((num + 2, 45 + 12), float("nan"))
        wide_x[1:-1, 7:-5] = x
        wide = torch.full((25, 45 + 4), 127.0).to(weight.codes.dtype)
        wide[1:-1, 1:-3] = weight.codes
        apart = weight._replace(codes=wide[1:-1, 1:-3])
        assert torch.equal(backend.linear(wide_x[1:-1, 7:-5], apart, None), expected)
        packed = backend.pack_scaled(apart)
        assert packed.codes.is_contiguous()
        assert torch.equal(backend.linear(x, packed, None), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_fault_stays_in_its_row_and_is_seen(fault: float, kind: str) -> None:
    weight = scaled(5, 100, kind=kind)
    weight.codes.view(torch.int8)[:] = weight.codes.view(torch.int8).abs() | 1  # no code is 0
    for backend in (Native(), NativeExact()):
        x = rows(7, 100).abs()
        expected = backend.linear(x, weight, None)
        x[4, 3] = fault
        actual = backend.linear(x, weight, None)
        assert not actual[4].isfinite().any()
        others = torch.arange(7) != 4
        assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-39, 1e-30, 1e30, 3e38])
def test_rows_of_any_size(largest: float) -> None:
    x, weight = rows(2, 50).clamp_(-1, 1) * largest, scaled(6, 50)
    expected = ((x.double() @ weight.codes.double().t()) * weight.scales).float()
    actual = Native().linear(x, weight, None)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * largest + 1e-37)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_exact_is_exact(kind: str) -> None:
    x, weight = rows(9, 2048), scaled(70, 2048, kind=kind)
    x[0, 0] = 1e4
    exact = ((x.double() @ weight.codes.double().t()) * weight.scales).float()
    torch.testing.assert_close(NativeExact().linear(x, weight, None), exact, rtol=1e-5, atol=1e-4)


def test_every_float8() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = ScaledWeight(codes[:, None], torch.ones(256))
    for num in (1, 3):
        y = Native().linear(torch.ones(num, 1), weight, None)
        assert torch.equal(y.isnan(), codes.float().isnan().expand(num, 256))
        assert torch.equal(y.nan_to_num(), codes.float().nan_to_num().expand(num, 256))


def test_what_does_not_fit_is_refused() -> None:
    x, (codes, scales, _) = rows(2, 8), scaled(4, 8)
    for wrong in (codes.short(), codes[:, 1:], codes.repeat(1, 2)[:, ::2]):
        with pytest.raises(ValueError, match="weight"):
            Native().linear(x, ScaledWeight(wrong, scales), None)
    with pytest.raises(ValueError, match="weight"):
        Native().linear(x, ScaledWeight(codes, scales.bfloat16()), None)
    gate_up, down = scaled(3, 12, 8), scaled(3, 8, 6)
    routing = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    for pair in ((gate_up, down._replace(int8_rows=True)), (gate_up, down.codes.float()), (down, gate_up)):
        with pytest.raises(ValueError, match="experts"):
            moe.Native().experts(x, *routing, *pair)


def test_exact_is_another_backend() -> None:
    here = Capabilities("cpu", "bfloat16", "int8")
    for op in ("gemm", "moe"):
        assert select(op, "auto", here).name == "native"
        choice = select(op, "exact", here)
        assert choice.name == "native_exact"
        assert dict(choice.rejected)["native"] == "rounds activations to 15 bits a row"


class Nothing:
    """A delta that adds nothing, and keeps what it was shown."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.inputs.append(x.clone())

    def add_down(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.inputs.append(x.clone())


HIDDEN, INTERMEDIATE = 200, 70


def experts(kind: str) -> tuple[ScaledWeight, ScaledWeight]:
    return scaled(5, 2 * INTERMEDIATE, HIDDEN, kind=kind), scaled(5, HIDDEN, INTERMEDIATE, kind=kind)


@pytest.mark.parametrize("backend", [moe.Native(), moe.NativeExact()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("threads")
def test_experts_keep_no_company(backend: moe.Native, dtype: torch.dtype, kind: str) -> None:
    """Nor do a delta's stages change a bit."""
    x, packed = rows(60, HIDDEN, dtype), backend.pack_scaled(*experts(kind))
    weights, ids = backend.route(rows(60, 5), 2, renormalize=False)
    torch.set_num_threads(1)
    expected = torch.cat(
        [backend.experts(x[t : t + 1], weights[t : t + 1], ids[t : t + 1], *packed) for t in range(60)]
    )
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num in (1, 2, 3, 7, 60):
            some = slice(60 - num, 60)
            for delta in (None, Nothing()):
                actual = backend.experts(x[some], weights[some], ids[some], *packed, delta)
                assert torch.equal(actual, expected[some])


@pytest.mark.parametrize("kind", ["int8", "int8-w8a8"])
def test_experts_are_products_of_whole_numbers(kind: str) -> None:
    """One expert a token and a delta that shows the activations: both products, bit by bit."""
    gate_up, down = experts(kind)
    x, delta = rows(1, HIDDEN), Nothing()
    ids, one = torch.tensor([[3]]), torch.ones(1, 1)
    y = moe.Native().experts(x, one, ids, gate_up, down, delta)
    shown, activations = delta.inputs
    assert torch.equal(shown, x)
    gate, up = whole_numbers(x, gate_up.expert(3)).chunk(2, 1)
    torch.testing.assert_close(activations, torch.nn.functional.silu(gate) * up)
    assert torch.equal(y, whole_numbers(activations, down.expert(3)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is x86's")
@pytest.mark.parametrize("kind", KINDS)
def test_portable_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine without AVX runs: whole numbers to the bit, floats to the reference's."""
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -mno-avx")
    backend, many = Native(), moe.Native()
    backend._gemm = load_anew(gemm_native.SOURCE, gemm_native.FUNCTIONS).gemm
    many._experts = load_anew(moe_native.SOURCE, moe_native.FUNCTIONS).experts
    backend._products = many._products = Products(load_anew)
    for num in (1, 4, 200):
        x, weight = rows(num, 1057), scaled(70, 1057, kind=kind)
        y = backend.linear(x, weight, None)
        if kind == "fp8":
            torch.testing.assert_close(y, gemm.Reference().linear(x, weight, None), rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(y, whole_numbers(x, weight))
    x, (weights, ids) = rows(9, HIDDEN), many.route(rows(9, 5), 2, renormalize=False)
    actual = many.experts(x, weights, ids, *experts(kind))
    expected = moe.Native().experts(x, weights, ids, *experts(kind))
    torch.testing.assert_close(actual, expected, rtol=2e-2 if kind == "int8-w8a8" else 1e-3, atol=1e-3)
