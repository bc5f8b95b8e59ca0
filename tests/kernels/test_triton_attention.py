"""Paged attention in Triton's interpreter: the tests of all backends again, and what only these kernels
have."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels.attention import Reference, Triton, triton_backend
from hybridserve.kernels.registry import Capabilities
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels import test_attention as shared
from tests.kernels.test_attention import (  # noqa: F401 - collected again, with this module's fixtures
    MIXED,
    Case,
    Shape,
    assert_matches_reference,
    make_metadata,
    test_a_write_changes_its_slots_only,
    test_empty_batch,
    test_f031_a_padding_row_changes_no_bit,
)

if TYPE_CHECKING:
    from pathlib import Path

require_triton()

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def ours() -> Triton:
    return Triton()


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of many splits, at lengths that a test can afford."""
    monkeypatch.setattr(triton_backend, "SPLIT", 16)


@pytest.mark.slow
class TestWhatAllBackendsDo:
    """The long ones of the tests that are collected again."""

    test_a_window_reads_nothing_before_it = staticmethod(shared.test_a_window_reads_nothing_before_it)
    test_any_strides = staticmethod(shared.test_any_strides)
    test_half_precision = staticmethod(shared.test_half_precision)
    test_ragged_batches = staticmethod(shared.test_ragged_batches)
    test_the_cache_may_have_another_type = staticmethod(shared.test_the_cache_may_have_another_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_a_batch_of_every_kind(ours: Triton, window: int | None, dtype: torch.dtype) -> None:
    """A start, a chunk that goes on, one that verifies, and decodes; what they don't own is NaN."""
    assert_matches_reference([(0, 5), (9, 3), (13, 1), (0, 1)], Shape(dtype=dtype), window, backend=ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.usefixtures("short_splits")
def test_scores_are_capped(ours: Triton, window: int | None, dtype: torch.dtype) -> None:
    """In a prompt, in a decode of one split and of several."""
    shape = Shape(dtype=dtype)
    assert_matches_reference([(35, 1), (9, 3), (0, 4), (3, 1)], shape, window, backend=ours, softcap=0.5)


def test_a_high_cap_keeps_scores(ours: Triton) -> None:
    """What tanh is off by, times the cap, times what scores are worth."""
    lengths, softcap = [(9, 3), (13, 1)], 50.0
    expected = Case(lengths, Shape(), 0).run(Reference(), softcap=softcap)
    actual = Case(lengths, Shape(), 0).run(ours, softcap=softcap)
    torch.testing.assert_close(actual, expected, atol=softcap * 2e-7, rtol=softcap * 2e-7)


@pytest.mark.parametrize(
    "window", [None, *(pytest.param(window, marks=pytest.mark.slow) for window in (3, 17, 40))]
)
@pytest.mark.usefixtures("short_splits")
def test_splits_are_merged(ours: Triton, window: int | None) -> None:
    lengths = [(49, 1), (0, 1), (15, 1), (16, 1), (31, 1), (20, 3)]
    for block_size in (6,) if window is None else (1, 4, 6):
        assert_matches_reference(lengths, Shape(block_size=block_size), window, backend=ours)


@pytest.mark.parametrize(
    "group", [5, pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.usefixtures("short_splits")
def test_head_shapes(ours: Triton, group: int, head_dim: int) -> None:
    shape = Shape(heads=group, kv_heads=1, head_dim=head_dim)
    assert_matches_reference([(0, 3), (6, 2), (17, 1)], shape, backend=ours)


@pytest.mark.parametrize("window", [None, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("short_splits")
def test_a_sequence_has_the_same_bits_in_any_company(ours: Triton, window: int | None) -> None:
    """However long the others are, and so however many splits there are."""
    shape = Shape(block_size=16)
    mixed = [(50, 1), (0, 4), (20, 3), (31, 1), (15, 1)]
    case = Case(mixed, shape, 3)
    parts = torch.split(case.run(ours, window), [rows for _, rows in mixed])
    starts = [0, *itertools.accumulate(rows for _, rows in mixed)]
    for order in ([4, 3, 2, 1, 0], [4], [2, 1]):
        take = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
        metadata = make_metadata([mixed[i] for i in order], [case.tables[i] for i in order], 16)
        inputs = (x[take] for x in (case.query, case.key, case.value))
        actual = ours.forward(*inputs, case.cache, ours.prepare(metadata), scale=shape.scale, window=window)
        assert torch.equal(actual, torch.cat([parts[i] for i in order]))


def test_f014_a_prompt_cut_anywhere_is_the_same_prompt(ours: Triton) -> None:
    expected = Case([(0, 24)], Shape(), 0).run(Reference())
    for chunks in ([1, 23], [11, 1, 12], [9, 15]):
        actual = Case([(0, 24)], Shape(), 0).run_in_chunks(ours, chunks, None)
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-6)


def test_f026_padding_rows_are_harmless(ours: Triton) -> None:
    """Rows of length 1, and of length 0, at the null block, among live ones; only the null block changes."""
    shape, live = Shape(), [(9, 1), (6, 3)]
    expected = Case(live, shape, 0).run(Reference())
    for length in (1, 0):
        case = Case(live, shape, 0)
        guarded = torch.ones(len(case.cache), dtype=torch.bool)
        guarded[[0, *itertools.chain(*case.tables)]] = False
        before = case.cache[guarded].view(torch.uint8).clone()
        metadata = make_metadata([*live, (0, 1), (0, 1)], [*case.tables, [0], [0]], shape.block_size)
        metadata.seq_lens[2:] = length
        inputs = (torch.cat([x, x[:2]]) for x in (case.query, case.key, case.value))
        result = ours.forward(*inputs, case.cache, ours.prepare(metadata), scale=shape.scale)
        assert result.isfinite().all()
        torch.testing.assert_close(result[:4], expected, atol=2e-6, rtol=2e-6)
        assert torch.equal(case.cache[guarded].view(torch.uint8), before)


def test_f073_offsets_past_32_bits(ours: Triton, tmp_path: Path) -> None:
    """The last blocks of a sparse file lie past 2^31 elements, and 2^32 bytes more."""
    shape = Shape()
    small = Case([(6, 1), (0, 6)], shape, 0)
    stride = (1 << 28) + 64
    values = torch.from_file(str(tmp_path / "arena"), shared=True, size=9 * stride, dtype=shape.dtype)
    row = shape.kv_heads * shape.head_dim
    sizes = (9, 2, shape.block_size, shape.kv_heads, shape.head_dim)
    cache = values.as_strided(sizes, (stride, shape.block_size * row, row, shape.head_dim, 1), 64)
    tables = [[8, 7], [6, 5]]
    for far, near in zip(itertools.chain(*tables), itertools.chain(*small.tables), strict=True):
        cache[far] = small.cache[near]
    expected = Case([(6, 1), (0, 6)], shape, 0).run(Reference())
    small.cache, small.tables = cache, tables
    torch.testing.assert_close(small.run(ours), expected, atol=2e-6, rtol=2e-6)
    assert not cache[:5].any()


def test_tiles_depend_on_shapes_alone() -> None:
    for group, head_dim in itertools.product((1, 5, 8, 20, 71), (16, 64, 80, 96, 128, 256)):
        for element_bytes in (2, 4):
            for tile in (triton_backend.decode_tile, triton_backend.prefill_tile):
                rows, columns, *_ = tile(group, head_dim, element_bytes)
                assert rows >= group
                assert columns >= 16


def test_metadata_must_be_prepared(ours: Triton) -> None:
    case = Case(MIXED, Shape(), 0)
    with pytest.raises(TypeError, match="prepare"):
        ours.forward(case.query, case.key, case.value, case.cache, case.metadata(), scale=1.0)


def test_needs_a_gpu() -> None:
    assert Triton.why_not(Capabilities("cpu", "float32")) == "no CUDA device"
    assert Triton.why_not(Capabilities("cuda", "float16")) is None
