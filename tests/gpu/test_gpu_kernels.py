"""Every Triton kernel on the device at the widths of real models, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.gpu import cases, weighted_cases
from benchmarks.gpu.checks import assert_same, backend_of
from tests.harness.gpu import DEVICE, DRY, DTYPES, SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.cases import Case
    from benchmarks.gpu.shapes import Shape

pytestmark = pytest.mark.gpu

WIDTHS = [(shape, DTYPES[0]) for shape in SHAPES] + [(SHAPES[0], dtype) for dtype in DTYPES[1:]]
"""All shapes as they are served, and all dtypes at one."""

LENGTHS = [(20, 1), (0, 5), (7, 2)] if DRY else [(1300, 1), (0, 70), (33, 5), (511, 1), (0, 1)]
"""Tokens before and in the step: several splits of a decode, a prompt, what verifies drafts."""

LENS = [5, 1, 2] if DRY else [600, 1, 33, 5]
"""A sequence of several chunks, one token, a few."""

ROWS = (3,) if DRY else (1, 17, 130)
"""One tile of few rows, several, and a tile of many."""

HEADS = (128, 64, 1, 128) if not DRY else (4, 8, 2, 16)


def check(case: Case, dtype: torch.dtype, weights: str = "none") -> None:
    with torch.inference_mode():
        references = backend_of(case.operator, "reference")
        assert_same(case, backend_of(case.operator), references, dtype, weights)


@pytest.fixture(params=WIDTHS, ids=lambda width: f"{width[0].name}-{cases.kind_of(width[1])}")
def width(request: pytest.FixtureRequest) -> tuple[Shape, torch.dtype]:
    return request.param


@pytest.mark.parametrize("window", [None, 9], ids=["all", "window"])
def test_attention(width: tuple[Shape, torch.dtype], window: int | None) -> None:
    shape, dtype = width
    check(cases.attention(shape, LENGTHS, dtype, DEVICE, name="attention", window=window), dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_with_heads_of_every_size(head_dim: int) -> None:
    shape = replace(SHAPES[0], head_dim=head_dim)
    check(cases.attention(shape, LENGTHS, torch.bfloat16, DEVICE, name="attention"), torch.bfloat16)


@pytest.mark.parametrize("operator", [cases.convolution, cases.scan], ids=["convolution", "scan"])
@pytest.mark.parametrize("single", [False, True], ids=["ragged", "single"])
def test_recurrences(width: tuple[Shape, torch.dtype], operator: Callable[..., Case], single: bool) -> None:
    shape, dtype = width
    lens = [1] * len(LENS) if single else LENS
    check(operator(shape, lens, dtype, DEVICE, name=operator.__name__), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("single", [False, True], ids=["ragged", "single"])
def test_scan_of_mamba2(dtype: torch.dtype, single: bool) -> None:
    lens = [1] * len(LENS) if single else LENS
    check(cases.ssd(HEADS, lens, dtype, DEVICE, name="ssd", shape="bamba-9b"), dtype)


@pytest.mark.parametrize("weights", weighted_cases.FORMATS)
def test_projections(width: tuple[Shape, torch.dtype], weights: str) -> None:
    shape, dtype = width
    for rows in ROWS:
        for name, size in weighted_cases.projections(shape).items():
            case = weighted_cases.linear(shape.name, size, rows, weights, dtype, DEVICE, name=name)
            check(case, dtype, weights)


@pytest.mark.parametrize("weights", weighted_cases.FORMATS)
def test_experts(width: tuple[Shape, torch.dtype], weights: str) -> None:
    shape, dtype = width
    if shape.experts == 1:
        shape = replace(shape, experts=8, top_k=2)
    for rows in ROWS[:2]:
        check(weighted_cases.experts(shape, rows, weights, dtype, DEVICE, name="experts"), dtype, weights)


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(renormalize: bool) -> None:
    for dtype in DTYPES:
        shape = replace(SHAPES[0], experts=16, top_k=2)
        case = weighted_cases.route(shape, ROWS[-1], dtype, DEVICE, name="routing", renormalize=renormalize)
        check(case, torch.float32)


def test_adapters(width: tuple[Shape, torch.dtype]) -> None:
    shape, dtype = width
    for rows in ROWS:
        check(weighted_cases.adapters(shape, rows, 8, dtype, DEVICE, name="adapters"), dtype)


def test_rows(width: tuple[Shape, torch.dtype]) -> None:
    shape, dtype = width
    parts = (shape.dt_rank, shape.states, shape.states)
    for rows in ROWS:
        for sizes in ((shape.hidden,), parts):
            check(cases.rms_norm(sizes, rows, dtype, DEVICE, name="norm", shape=shape.name), dtype)
        for operator in (cases.add_rms_norm, cases.silu_and_mul, cases.rotate):
            check(operator(shape, rows, dtype, DEVICE, name=operator.__name__), dtype)


@pytest.mark.parametrize("operator", [cases.keep_top_k, cases.keep_top_p], ids=["top_k", "top_p"])
def test_what_of_a_distribution_may_be_drawn(operator: Callable[..., Case]) -> None:
    for rows in ROWS:
        check(operator(SHAPES[0], rows, DEVICE, name=operator.__name__), torch.float32)
