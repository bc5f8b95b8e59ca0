"""Products with one-byte weights in Triton's interpreter, against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybridserve.kernels.gemm import Reference, Triton, tiles
from hybridserve.kernels.gemm.interface import ScaledWeight, round_rows
from hybridserve.kernels.gemm.tiles import PROGRAMS, num_splits, tile_for
from hybridserve.kernels.gemm.triton_backend import operand
from hybridserve.kernels.registry import Capabilities
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels.test_scaled import KINDS, random, scaled

require_triton()

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(7, 5), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 1), (40, 2100)))],
    ids=str,
)
def test_equals_the_reference(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Few rows and many, one split and several; rows of x and of the codes lie apart."""
    weight, bias = scaled(*shape, kind=kind), random(shape[0]).to(dtype)
    wide = torch.cat([weight.codes.view(torch.int8)] * 2, 1).view(weight.codes.dtype)
    weight = weight._replace(codes=wide[:, shape[1] :])
    within = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for rows, some_bias in ((0, None), (3, None), (70, bias)):
        x = random(rows, 2 * shape[1]).to(dtype)[:, shape[1] :]
        actual = Triton().linear(x, weight, some_bias)
        assert actual.dtype == dtype
        expected = Reference().linear(x, weight, some_bias)
        torch.testing.assert_close(actual, expected, rtol=within, atol=4 * within)


def test_every_code_has_its_value() -> None:
    """All finite numbers of e4m3, subnormal ones too, and all of int8."""
    every = torch.arange(256, dtype=torch.uint8)
    floats = every.view(torch.float8_e4m3fn)
    for codes in (every.view(torch.int8), floats[~floats.float().isnan()]):
        weight = ScaledWeight(codes[:, None], torch.ones(len(codes)))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            actual = Triton().linear(torch.ones(1, 1, dtype=dtype), weight, None)
            assert torch.equal(actual[0].float(), codes.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_the_format_says(dtype: torch.dtype) -> None:
    x = random(9, 77).to(dtype)
    x[3], x[4, 0] = 0, 1e4
    weight = scaled(2, 77, kind="int8-w8a8")
    codes, scales = operand(Triton()._kernels, x, weight)
    expected, expected_scales = round_rows(x)
    assert torch.equal(codes.float(), expected)
    assert torch.equal(scales, expected_scales[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row(kind: str) -> None:
    x, weight = random(5, 40), scaled(6, 40, kind=kind)
    expected = Triton().linear(x, weight, None)
    x[1, 3], x[3, 0] = float("nan"), float("inf")
    actual = Triton().linear(x, weight, None)
    assert not actual[[1, 3]].isfinite().any()
    assert torch.equal(actual[[0, 2, 4]], expected[[0, 2, 4]])


@pytest.mark.parametrize("kind", KINDS)
def test_splits_are_added(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_INPUTS", 128)
    weight, bias, x = scaled(9, 300, kind=kind), random(9), random(2, 300)
    assert num_splits(2, 9, 300, tile_for(2, 4)) == 2
    expected = Reference().linear(x, weight, bias)
    torch.testing.assert_close(Triton().linear(x, weight, bias), expected, rtol=1e-5, atol=4e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_others(kind: str) -> None:
    x, weight = random(16, 300), scaled(40, 300, kind=kind)
    expected = Triton().linear(x, weight, None)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Triton().linear(x[order], weight, None), expected[order])


def test_other_weights_are_the_vendors() -> None:
    x, weight, bias = random(3, 20), random(7, 20), random(7)
    torch.testing.assert_close(Triton().linear(x, weight, bias), Reference().linear(x, weight, bias))


def test_tiles_fill_a_gpu_and_split_no_more_than_they_must() -> None:
    for rows, outputs, inputs in itertools.product((1, 16, 17, 64, 65, 4096), (32, 1280, 65536), (20, 8192)):
        tile = tile_for(rows, 2)
        assert tile.rows >= min(rows, 128)
        splits = num_splits(rows, outputs, inputs, tile)
        assert splits == 1 or splits * -(-outputs // tile.outputs) <= PROGRAMS
    assert num_splits(1, 1280, 8192, tile_for(1, 2)) > 1


def test_needs_a_gpu() -> None:
    assert Triton.why_not(Capabilities("cpu", "float32")) == "no CUDA device"
    assert Triton.why_not(Capabilities("cuda", "bfloat16", "int8")) is None
