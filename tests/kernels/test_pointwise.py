"""Every backend of operators on rows against the reference: odd sizes, segments, views, poison, threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels.pointwise import BACKENDS, Native, Reference
from hybridserve.kernels.registry import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.pointwise.interface import PointwiseBackend

EPS = 1e-3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def made(backend: type[PointwiseBackend]) -> PointwiseBackend:
    if reason := backend.why_not(Capabilities("cpu", "float32")):
        pytest.skip(f"{backend.name} {reason}")
    return backend()


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> PointwiseBackend:
    return made(request.param)


@pytest.fixture
def native() -> Native:
    return made(Native)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, size], as a view of a wider tensor of NaN, and a weight."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.full((num_rows, size + 5), float("nan"), dtype=dtype)
    wide[:, 2:-3] = 5 * torch.randn(num_rows, size, generator=generator)
    return wide[:, 2:-3], torch.rand(size, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1,), (7,), (64,), (513,), (32, 16, 16), (1, 40, 3)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 200])
def test_rms_norm(
    backend: PointwiseBackend, num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight = rows(num_rows, sum(sizes), dtype)
    expected = Reference().rms_norm(x.float(), weight.float(), EPS, sizes).to(dtype)
    actual = backend.rms_norm(x, weight, EPS, sizes)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_reference_is_the_definition() -> None:
    x, weight = rows(4, 9)
    first, second = x[:, :4].double(), x[:, 4:].double()
    parts = [v / (v.pow(2).sum(1, keepdim=True) / v.shape[1] + EPS).sqrt() for v in (first, second)]
    expected = (torch.cat(parts, 1) * weight).float()
    torch.testing.assert_close(Reference().rms_norm(x, weight, EPS, (4, 5)), expected)


def test_the_weight_may_have_another_dtype(backend: PointwiseBackend) -> None:
    x, weight = rows(3, 40)
    for sizes in ((40,), (30, 10)):
        expected = Reference().rms_norm(x, weight.bfloat16().float(), EPS, sizes)
        actual = backend.rms_norm(x, weight.bfloat16(), EPS, sizes)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_any_strides(backend: PointwiseBackend) -> None:
    x, weight = rows(6, 33)
    expected = backend.rms_norm(x, weight, EPS, (33,))
    strided = torch.stack([weight, torch.full_like(weight, torch.nan)], 1)[:, 0]
    torch.testing.assert_close(backend.rms_norm(x.t().contiguous().t(), strided, EPS, (33,)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(77,), (512,), (32, 16, 16)], ids=str)
@pytest.mark.usefixtures("threads")
def test_bits_of_a_native_row_depend_on_itself(
    native: Native, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Alone and among enough others for several threads; a row of NaN is alone too."""
    x, weight = rows(1500, sum(sizes), dtype)
    torch.set_num_threads(1)
    expected = torch.cat([native.rms_norm(x[i : i + 1], weight, EPS, sizes) for i in range(len(x))])
    x[7] = float("nan")
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        actual = native.rms_norm(x, weight, EPS, sizes)
        assert actual[7].isnan().all()
        assert torch.equal(actual[:7], expected[:7])
        assert torch.equal(actual[8:], expected[8:])


def test_inside_and_outside_of_inference_mode(backend: PointwiseBackend) -> None:
    x, weight = rows(3, 8)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            backend.rms_norm(x, weight, EPS, (5, 3))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_add_rms_norm(backend: PointwiseBackend, num_rows: int, dtype: torch.dtype) -> None:
    """The sum has the bits of torch's, and the norm is that of the rounded sum."""
    (x, weight), (residual, _) = rows(num_rows, 70, dtype), rows(num_rows, 70, dtype)
    total = x + residual * 0.37
    expected = Reference().rms_norm(total, weight, EPS, (70,))
    actual = backend.add_rms_norm(x, residual * 0.37, weight, EPS)
    assert torch.equal(x, total)
    assert torch.equal(actual, backend.rms_norm(total, weight, EPS, (70,)))
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_add_rms_norm_of_columns_that_lie_apart(backend: PointwiseBackend) -> None:
    (x, weight), (residual, _) = rows(4, 9), rows(4, 9)
    total = x + residual
    expected = Reference().rms_norm(total, weight, EPS, (9,))
    apart = x.t().contiguous().t()
    actual = backend.add_rms_norm(apart, residual.t().contiguous().t(), weight, EPS)
    assert torch.equal(apart, total)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("size", [1, 33])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_silu_and_mul(backend: PointwiseBackend, num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, _ = rows(num_rows, 2 * size, dtype)
    expected = Reference().silu_and_mul(x)
    torch.testing.assert_close(
        backend.silu_and_mul(x), expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "half"), [(1, 2, 1), (5, 24, 12), (3, 20, 5)])
def test_rotate(backend: PointwiseBackend, heads: int, head_dim: int, half: int, dtype: torch.dtype) -> None:
    """Whole heads and a part of them, of a view of what a projection gives."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, heads + 2, head_dim, generator=generator).to(dtype)[:, :heads]
    angles = 9 * torch.randn(4, 1, half, generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    within = 4 * TOLERANCE[dtype]
    for num in (4, 0):
        expected = Reference().rotate(x[:num], cos[:num], sin[:num])
        torch.testing.assert_close(
            backend.rotate(x[:num], cos[:num], sin[:num]), expected, rtol=within, atol=within
        )


def distributions(num_rows: int, size: int) -> torch.Tensor:
    """Sharp and flat ones, some with ties and zeros."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(num_rows, size, generator=generator) * torch.linspace(0.01, 9, num_rows)[:, None]
    logits[1::2] = logits[1::2].round()
    logits[2::3, ::4] = -torch.inf
    logits[2::3, 0] = 0
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("size", [1, 7, 700])
def test_keep_top_k(backend: PointwiseBackend, size: int) -> None:
    probs = distributions(9, size)
    for top_k in ([0] * 9, [0, 1, 2, 3, 5, 6, 7, 300, 10_000], [4] * 9):
        actual, expected = probs.clone(), probs.clone()
        backend.keep_top_k(actual, torch.tensor(top_k))
        Reference().keep_top_k(expected, torch.tensor(top_k))
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("size", [1, 7, 700])
def test_keep_top_p(backend: PointwiseBackend, size: int) -> None:
    """Among rows that keep all, and of what another filter left."""
    probs = distributions(9, size)
    for top_p in ([1.0] * 9, [1.0, 0.9, 0.31, 0.999, 0.0, 0.5, 1e-30, 1.0, 0.9999], [0.41] * 9):
        for start in (probs, torch.where(probs < 0.01, 0.0, probs)):
            actual, expected = start.clone(), start.clone()
            backend.keep_top_p(actual, torch.tensor(top_p))
            Reference().keep_top_p(expected, torch.tensor(top_p))
            assert torch.equal(actual, expected)
    backend.keep_top_p(probs[:0], torch.zeros(0))
