"""The arena's views: disjoint, all inside the buffer, right at the far end of a very large one."""

from __future__ import annotations

import pytest
import torch

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec, StateTensor
from hybridserve.engine.arena import Arena

CPU = torch.device("cpu")
KV = PagedKVSpec(num_kv_heads=2, head_dim=8, dtype="bfloat16")
MAMBA = StateSpec((StateTensor("conv", (32, 3), "bfloat16"), StateTensor("ssm", (32, 4), "float32")))
FOUR = StateSpec(
    tuple(
        StateTensor(f"t{i}", shape, dtype)
        for i, (shape, dtype) in enumerate(
            [((5,), "float32"), ((3, 2), "bfloat16"), ((7,), "float16"), ((1,), "float32")]
        )
    )
)


def leaves(arena: Arena) -> list[torch.Tensor]:
    return [t for view in arena.views for t in (view if isinstance(view, tuple) else (view,))]


@pytest.mark.parametrize(
    "specs",
    [[MAMBA, KV, MAMBA, KV], [KV, KV], [MAMBA, MAMBA], [FOUR], [FOUR, KV, MAMBA]],
    ids=["hybrid", "kv", "state", "four", "mixed"],
)
def test_f048_views_of_a_kind_are_disjoint(specs: list[PagedKVSpec | StateSpec]) -> None:
    """A tag for each (layer, tensor, unit) written into every view of a kind, then all read back."""
    arena = Arena(CacheLayout.build(specs, 16, 1 << 18), CPU)
    for kind in ("kv", "state"):
        views = [
            tensor
            for spec, view in zip(specs, arena.views, strict=True)
            for tensor in (view if isinstance(view, tuple) else (view,))
            if isinstance(spec, PagedKVSpec) == (kind == "kv")
        ]
        tags = {}
        for number, view in enumerate(views):
            for unit in range(len(view)):
                tags[number, unit] = float((number * 37 + unit * 11) % 200)
                view[unit] = tags[number, unit]
        for (number, unit), tag in tags.items():
            assert (views[number][unit] == tag).all()


def test_units_hold_exactly_their_layers() -> None:
    """What layers see of block or slot i lies inside the bytes of block or slot i."""
    layout = CacheLayout.build([MAMBA, KV, MAMBA, KV], 16, 1 << 18)
    arena = Arena(layout, CPU)
    for unit in (0, 3, layout.num_slabs * layout.slots_per_slab - 1):
        arena.buffer.zero_()
        arena.slots[unit] = 0xFF
        for view in leaves(arena):
            if view.shape[1:] != (2, 16, 2, 8):
                assert view[unit].isnan().all()
                assert view.isnan().flatten(1).any(1).sum() == 1
    for unit in (0, layout.num_slabs * layout.blocks_per_slab - 1):
        arena.buffer.zero_()
        arena.blocks[unit] = 0xFF
        for view in leaves(arena):
            if view.shape[1:] == (2, 16, 2, 8):
                assert view[unit].isnan().all()
                assert view.isnan().flatten(1).any(1).sum() == 1


def test_copies_read_all_sources_before_they_write() -> None:
    arena = Arena(CacheLayout.build([MAMBA, KV], 16, 1 << 18), CPU)
    for units, copy in ((arena.blocks, arena.copy_blocks), (arena.slots, arena.copy_slots)):
        units[:] = torch.arange(len(units))[:, None].to(torch.uint8)
        copy(torch.tensor([3, 4, 5]), torch.tensor([4, 5, 3]))
        assert units[[3, 4, 5], 0].tolist() == [5, 3, 4]
        assert units[6, 0] == 6


@pytest.mark.parametrize("num_elements", [2**31, 2**32], ids=["2^31", "2^32"])
def test_f073_offsets_beyond_32_bits(num_elements: int) -> None:
    """The highest slot and block of an arena of more elements than an int32 can count; only touched pages
    exist."""
    layout = CacheLayout.build([MAMBA, KV, MAMBA], 16, 4 * num_elements + (1 << 20))
    arena = Arena(layout, CPU)
    arena.slots[:4] = 7
    before = arena.slots[:4].clone()
    highest = layout.num_slabs * layout.slots_per_slab - 1
    assert highest * layout.slot_stride // 4 > num_elements - (1 << 20)
    for view in arena.views[::2]:
        for tensor in view:
            tensor[highest] = 5
            assert (tensor[torch.tensor([highest])] == 5).all()
    block = layout.num_slabs * layout.blocks_per_slab - 1
    arena.views[1][block, 1] = 3
    assert (arena.views[1][torch.tensor([block]), 1] == 3).all()
    arena.copy_slots(torch.tensor([highest]), torch.tensor([highest - layout.slots_per_slab]))
    assert (arena.views[0][1][highest - layout.slots_per_slab] == 5).all()
    assert torch.equal(arena.slots[:4], before)


def test_memory_that_is_not_to_be_had() -> None:
    message = r"cache.memory_bytes: an arena of .* can't be allocated; what would fit: cache.memory_bytes: "
    with pytest.raises(ValueError, match=message):
        Arena(CacheLayout.build([KV], 16, 1 << 60), CPU)
