"""How an arena is cut into slabs, blocks and slots (D1, D2, D8)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridserve.core.cache_spec import ALIGNMENT, CacheLayout, PagedKVSpec, StateSpec, StateTensor

KV = PagedKVSpec(num_kv_heads=8, head_dim=128, dtype="bfloat16")
STATE = StateSpec((StateTensor("conv", (8192, 3), "bfloat16"), StateTensor("ssm", (8192, 16), "float32")))
JAMBA_MINI = [KV if i % 8 == 4 else STATE for i in range(32)]


def check(layout: CacheLayout, arena_bytes: int) -> None:
    kinds = [
        (layout.blocks_per_slab, layout.block_stride, layout.bytes_per_block),
        (layout.slots_per_slab, layout.slot_stride, layout.bytes_per_slot),
    ]
    for count, stride, raw in kinds:
        assert (count > 0) == (raw > 0)
        if raw:
            assert count * stride == layout.slab_bytes
            assert stride >= raw
            assert stride % ALIGNMENT == 0
    assert layout.num_slabs == arena_bytes // layout.slab_bytes >= 2


def test_jamba_mini_in_a_large_arena() -> None:
    layout = CacheLayout.build(JAMBA_MINI, 16, 64 << 30)
    check(layout, 64 << 30)
    assert layout.bytes_per_block == 4 * 16 * 2 * 8 * 128 * 2
    assert layout.bytes_per_slot == 28 * (8192 * 3 * 2 + 8192 * 16 * 4)
    assert layout.slots_per_slab == 1  # the smallest slab that could be
    assert layout.padding <= 0.01


@given(
    kv_layers=st.integers(0, 4),
    state_layers=st.integers(0, 4),
    heads=st.integers(1, 8),
    head_dim=st.integers(1, 128),
    channels=st.integers(1, 300),
    block_size=st.sampled_from([1, 4, 16, 32]),
    scale=st.integers(2, 5000),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_model(
    kv_layers: int, state_layers: int, heads: int, head_dim: int, channels: int, block_size: int, scale: int
) -> None:
    specs = [PagedKVSpec(heads, head_dim, "float16")] * kv_layers
    specs += [
        StateSpec((StateTensor("c", (channels, 3), "float16"), StateTensor("h", (channels, 8), "float32")))
    ] * (state_layers)
    if not specs:
        with pytest.raises(ValueError, match="no layer"):
            CacheLayout.build(specs, block_size, 2**30)
        return
    with pytest.raises(ValueError, match="too small"):
        CacheLayout.build(specs, block_size, 64)
    smallest = CacheLayout.build(specs, block_size, 2**40)
    largest_unit = max(_align(smallest.bytes_per_block), _align(smallest.bytes_per_slot))
    arena = largest_unit * scale
    layout = CacheLayout.build(specs, block_size, arena)
    check(layout, arena)
    if scale >= 16:
        assert layout.num_slabs >= 16
    # No smaller slab pads at most 1 %; where none does that leaves 16 slabs, none pads less.
    found = _brute_force(layout, arena // min(16, scale))
    if found and found[0][1] <= 0.01:
        assert layout.slab_bytes == found[0][0]
    elif found:
        assert layout.padding <= min(padding for _, padding in found) + 1e-12


def _align(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def _brute_force(layout: CacheLayout, limit: int) -> list[tuple[int, float]]:
    """(slab bytes, padding) of slabs with few large units; the smallest with <= 1 % padding comes first."""
    if not layout.bytes_per_block or not layout.bytes_per_slot:
        return []
    large, small = sorted((layout.bytes_per_block, layout.bytes_per_slot), reverse=True)
    found = []
    for slab in range(_align(large), min(limit, 4 * _align(large)) + 1, ALIGNMENT):
        units = slab // ALIGNMENT
        best = None
        for num_large in range(1, 5):
            if units % num_large or slab // num_large < large:
                continue
            most = slab // _align(small)
            num_small = next((n for n in range(most, 0, -1) if units % n == 0), None)
            if num_small:
                padding = max(slab / (num_large * large), slab / (num_small * small)) - 1
                best = padding if best is None else min(best, padding)
        if best is not None:
            found.append((slab, best))
    return sorted(found, key=lambda item: (item[1] > 0.01, item[0]))


def test_one_kind_only() -> None:
    attention = CacheLayout.build([KV] * 3, 16, 2**30)
    assert (attention.blocks_per_slab, attention.slots_per_slab, attention.slot_stride) == (1, 0, 0)
    assert attention.max_tokens_one_sequence() == attention.num_usable_slabs * 16
    recurrent = CacheLayout.build([STATE] * 3, 16, 2**30)
    assert (recurrent.blocks_per_slab, recurrent.slots_per_slab, recurrent.block_stride) == (0, 1, 0)
    assert recurrent.blocks_for(1000) == 0
    assert recurrent.max_tokens_one_sequence() is None
    assert recurrent.max_sequences(10**6) == recurrent.num_usable_slabs


def test_parts_of_a_unit_are_disjoint_and_aligned() -> None:
    odd = StateSpec((StateTensor("a", (3, 3), "bfloat16"), StateTensor("b", (5,), "float32")))
    specs = [odd, KV, odd, KV, STATE]
    layout = CacheLayout.build(specs, 16, 2**28)
    slots = [
        (offset, offset + tensor.num_bytes)
        for index in (0, 2, 4)
        for tensor, offset in zip(specs[index].tensors, layout.state_offsets(index), strict=True)
    ]
    assert all(offset % 16 == 0 for offset, _ in slots)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(slots))
    assert slots[-1][1] <= layout.bytes_per_slot
    assert [layout.kv_offset(1), layout.kv_offset(3)] == [0, 16 * KV.bytes_per_token]
    assert layout.bytes_per_block == 2 * 16 * KV.bytes_per_token
    with pytest.raises(ValueError, match="layer 0"):
        layout.kv_offset(0)
    with pytest.raises(ValueError, match="layer 1"):
        layout.state_offsets(1)


def test_capacity() -> None:
    layout = CacheLayout.build(JAMBA_MINI, 16, 2 << 30)
    assert [layout.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    for num_tokens in (1, 16, 1000, 5000):
        count = layout.max_sequences(num_tokens)
        assert (
            layout.slabs_for(num_tokens, count)
            <= layout.num_usable_slabs
            < layout.slabs_for(num_tokens, count + 1)
        )
    longest = layout.max_tokens_one_sequence()
    assert longest is not None
    assert layout.slabs_for(longest) == layout.num_usable_slabs
    assert layout.slabs_for(longest + 1) > layout.num_usable_slabs


def test_arena_too_small_says_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"1,000,000 bytes is too small.*32,112,640.*16,056,320"):
        CacheLayout.build(JAMBA_MINI, 16, 1_000_000)


def holds(specs: list[PagedKVSpec | StateSpec], block_size: int, arena_bytes: int, num_tokens: int) -> bool:
    try:
        longest = CacheLayout.build(specs, block_size, arena_bytes, num_tokens).max_tokens_one_sequence()
    except ValueError:  # not even two slabs
        return False
    return longest is None or longest >= num_tokens


@given(
    kv_layers=st.integers(0, 2),
    state_layers=st.integers(0, 2),
    head_dim=st.integers(1, 64),
    channels=st.integers(1, 300),
    block_size=st.sampled_from([1, 4, 16, 64]),
    num_slabs=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_larger_arena_holds_what_a_smaller_one_does(
    kv_layers: int, state_layers: int, head_dim: int, channels: int, block_size: int, num_slabs: int
) -> None:
    specs: list[PagedKVSpec | StateSpec] = [PagedKVSpec(2, head_dim, "float32")] * kv_layers
    specs += [StateSpec((StateTensor("h", (channels, 7), "float32"),))] * state_layers
    if not specs:
        return
    layout = CacheLayout.build(specs, block_size, 2**30)
    unit = max(_align(layout.bytes_per_block), _align(layout.bytes_per_slot))
    num_tokens = num_slabs * unit // (layout.bytes_per_block or unit) * block_size  # about so many slabs full
    held = [holds(specs, block_size, quarters * unit // 4, num_tokens) for quarters in range(4, 180)]
    assert held == sorted(held)
    assert held[-1]


def test_one_sequence_matters_more_than_the_padding() -> None:
    state = StateSpec((StateTensor("c", (120, 2), "float32"), StateTensor("h", (120, 7), "float32")))
    specs = [state, PagedKVSpec(2, 10, "float32")] * 2
    held = [holds(specs, 4, size, 128) for size in range(50_000, 150_000, 64)]
    assert held == sorted(held)
    assert held[0] < held[-1]
    too_small = CacheLayout.build(specs, 4, 55_000, 128).max_tokens_one_sequence()
    assert too_small is not None
    assert 0 < too_small < 128
    assert holds(specs, 4, 55_000, too_small)
    # where it fits anyway, nothing changes
    assert CacheLayout.build(specs, 4, 2**24, 128) == CacheLayout.build(specs, 4, 2**24)


def test_stages_share_ids_and_not_bytes() -> None:
    """D17, on Jamba-Large in two stages of eight ranks: 4 and 5 attention layers, 32 and 31 Mamba layers."""
    kv = PagedKVSpec(num_kv_heads=1, head_dim=128, dtype="bfloat16")
    state = StateSpec((StateTensor("conv", (2048, 3), "bfloat16"), StateTensor("ssm", (2048, 16), "float32")))
    layers = [kv if i % 8 == 4 else state for i in range(72)]
    whole, stages = CacheLayout.build_stages([layers[:36], layers[36:]], 16, 20 << 30)
    for stage in stages:
        assert stage.slab_bytes == max(
            stage.blocks_per_slab * stage.bytes_per_block, stage.slots_per_slab * stage.bytes_per_slot
        )
        assert (stage.blocks_per_slab, stage.slots_per_slab) == (whole.blocks_per_slab, whole.slots_per_slab)
        assert stage.num_slabs == whole.num_slabs == (20 << 30) // whole.slab_bytes
    assert whole.bytes_per_block == stages[1].bytes_per_block == 5 * 16 * 2 * 128 * 2
    assert whole.bytes_per_slot == stages[0].bytes_per_slot == 32 * 2048 * (3 * 2 + 16 * 4)
    assert whole.padding <= 0.01
    # no cut holds more of either: 5 layers of blocks fill the second stage, 32 of slots the first
    assert [round(stage.padding, 2) for stage in stages] == [0.25, 0.03]


@given(
    stages=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    channels=st.integers(1, 300),
    head_dim=st.integers(1, 128),
    scale=st.integers(16, 3000),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_stages(stages: list[tuple[int, int]], channels: int, head_dim: int, scale: int) -> None:
    """Whatever layers each has: its memory is that of its own, and fits where the largest does."""
    kv = PagedKVSpec(2, head_dim, "float16")
    state = StateSpec((StateTensor("h", (channels, 8), "float32"),))
    specs = [[kv] * num_attention + [state] * num_recurrent for num_attention, num_recurrent in stages]
    if not any(specs):
        return
    arena_bytes = scale * 100_000
    whole, layouts = CacheLayout.build_stages(specs, 16, arena_bytes)
    check(whole, arena_bytes)
    for (num_attention, num_recurrent), layout in zip(stages, layouts, strict=True):
        assert layout.bytes_per_block == num_attention * 16 * 2 * 2 * head_dim * 2
        assert (layout.bytes_per_slot > 0) == (num_recurrent > 0)
        assert layout.slab_bytes <= whole.slab_bytes
        assert layout.num_slabs * layout.slab_bytes <= arena_bytes
        for count, stride, raw in (
            (layout.blocks_per_slab, layout.block_stride, layout.bytes_per_block),
            (layout.slots_per_slab, layout.slot_stride, layout.bytes_per_slot),
        ):
            assert count * stride == (layout.slab_bytes if raw else 0)
            assert stride >= raw
    ids = {(layout.num_slabs, layout.blocks_per_slab, layout.slots_per_slab) for layout in (whole, *layouts)}
    assert len(ids) == 1
