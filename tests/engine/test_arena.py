"""The arena's views: disjoint, all inside the buffer, right at the far end of a very large one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec, StateTensor
from hybridserve.engine.arena import Arena, HostArena, runs

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
    with pytest.raises(
        ValueError, match=r"cache.host_swap_bytes: host memory of .* can't be allocated; what"
    ):
        HostArena(CacheLayout.build([KV], 16, 1 << 20), 1 << 50, CPU)


def pairs(*copies: tuple[int, int]) -> np.ndarray:
    return np.array(copies, dtype=np.int64).reshape(-1, 2)


def some_copies(rng: random.Random, num_sources: int, num_destinations: int) -> np.ndarray:
    """Runs of one length and another, with unit 0 left alone: forward, backward, side by side, none."""
    sources, destinations = [], []
    while rng.random() < 0.8:
        length = rng.randint(1, 6)
        source = rng.randrange(1, num_sources - length)
        destination = rng.randrange(1, num_destinations - length)
        step = rng.choice([1, 1, -1])
        sources += range(source, source + length)
        destinations += range(destination, destination + length)[::step]
    taken: dict[int, int] = {}
    for source, destination in zip(sources, destinations, strict=True):
        taken.setdefault(destination, source)
    return pairs(*((source, destination) for destination, source in taken.items()))


def test_runs_are_the_copies() -> None:
    assert list(runs(pairs())) == []
    assert list(runs(pairs((3, 7)))) == [(3, 7, 1)]
    # one further on one side only, on both, and back
    assert list(runs(pairs((3, 7), (4, 8), (5, 9), (5, 10), (6, 10), (7, 11), (6, 10)))) == [
        (3, 7, 3), (5, 10, 1), (6, 10, 2), (6, 10, 1)
    ]  # fmt: skip
    rng = random.Random(0)
    longest = 0
    for _ in range(300):
        copies = some_copies(rng, 40, 40)
        found = list(runs(copies))
        spelled = [(s + i, d + i) for s, d, length in found for i in range(length)]
        assert spelled == [tuple(copy) for copy in copies.tolist()]
        for (s, d, length), (next_s, next_d, _) in itertools.pairwise(found):
            assert (s + length, d + length) != (next_s, next_d)
        longest = max([longest, *(length for _, _, length in found)])
    assert longest >= 6


@pytest.mark.parametrize("specs", [[MAMBA, KV, MAMBA], [KV], [MAMBA]], ids=["hybrid", "kv", "state"])
def test_swaps_are_the_plain_loop_s(specs: list[PagedKVSpec | StateSpec]) -> None:
    """Against copying one unit after the other, over many shapes; what is not copied stays."""
    layout = CacheLayout.build(specs, 16, 1 << 18)
    arena, host = Arena(layout, CPU), HostArena(layout, 9, CPU)
    assert host.buffer.numel() == 8 * layout.slab_bytes
    units = (
        (layout.blocks_per_slab, layout.block_stride),
        (layout.slots_per_slab, layout.slot_stride),
    )
    rng = random.Random(1)
    for _ in range(60):
        for buffer in (arena.buffer, host.buffer):
            buffer.random_(0, 256)
        # a slab is of one kind at a time: both kinds here write to different halves
        chosen = []
        for per_slab, _ in units:
            if per_slab:
                copies = some_copies(rng, 8 * per_slab, 8 * per_slab)
                copies[:, 1] = copies[:, 1] % (4 * per_slab) + per_slab * (1 if not chosen else 5)
                copies = copies[np.unique(copies[:, 1], return_index=True)[1]]
                copies = copies[copies[:, 1] < 9 * per_slab]
            else:
                copies = pairs()
            chosen.append(copies)
        out = [copy[:: rng.choice([1, -1])] for copy in chosen]
        expected = host.buffer.clone()
        for copies, (per_slab, stride) in zip(out, units, strict=True):
            for source, unit in copies.tolist():
                place = (unit - per_slab) * stride
                expected[place : place + stride] = arena.buffer[source * stride : (source + 1) * stride]
        before = arena.buffer.clone()
        host.swap_out(arena, *out)
        assert torch.equal(host.buffer, expected)
        assert torch.equal(arena.buffer, before)
        back = [copies[:, ::-1] for copies in out]  # may write a unit twice, to the same end only if in order
        back = [copies[np.unique(copies[:, 1], return_index=True)[1]] for copies in back]
        expected = arena.buffer.clone()
        for copies, (per_slab, stride) in zip(back, units, strict=True):
            for unit, destination in copies.tolist():
                place = (unit - per_slab) * stride
                expected[destination * stride : (destination + 1) * stride] = host.buffer[
                    place : place + stride
                ]
        host.swap_in(arena, *back)
        assert torch.equal(arena.buffer, expected)


def test_the_host_s_slab_0_takes_nothing_and_is_no_place_to_copy_to() -> None:
    layout = CacheLayout.build([MAMBA, KV], 16, 1 << 18)
    arena, host = Arena(layout, CPU), HostArena(layout, 3, CPU)
    first, last = layout.blocks_per_slab, 3 * layout.blocks_per_slab - 1
    arena.buffer.fill_(1)
    host.buffer.fill_(0)
    host.swap_out(arena, pairs((4, first), (5, last)), pairs())
    assert host.buffer[: layout.block_stride].all()
    assert host.buffer[-layout.block_stride :].all()
    assert host.buffer.sum() == 2 * layout.block_stride
    for wrong in (first - 1, last + 1):
        with pytest.raises(IndexError):
            host.swap_out(arena, pairs((4, wrong)), pairs())
        with pytest.raises(IndexError):
            host.swap_in(arena, pairs((wrong, 4)), pairs())


def test_moves_read_all_sources_of_both_kinds_before_they_write() -> None:
    """A slab of slots becomes one of blocks, another the reverse, in one step; and units change places."""
    layout = CacheLayout.build([MAMBA, KV], 16, 1 << 18)
    arena = Arena(layout, CPU)
    blocks, slots = layout.blocks_per_slab, layout.slots_per_slab
    arena.buffer.random_(0, 256)
    before_blocks, before_slots = arena.blocks.clone(), arena.slots.clone()
    block_moves = [(2 * blocks + i, 1 * blocks + i) for i in range(blocks)]  # onto slots that move away
    slot_moves = [(1 * slots + i, 2 * slots + i) for i in range(slots)]  # onto blocks that move away
    block_moves += [(5 * blocks, 5 * blocks + 1), (5 * blocks + 1, 5 * blocks)]
    arena.move(pairs(*block_moves), pairs(*slot_moves))
    for source, destination in block_moves:
        assert torch.equal(arena.blocks[destination], before_blocks[source])
    for source, destination in slot_moves:
        assert torch.equal(arena.slots[destination], before_slots[source])
    untouched = torch.ones(len(arena.buffer), dtype=torch.bool)
    untouched[layout.slab_bytes : 3 * layout.slab_bytes] = False
    untouched[5 * layout.slab_bytes : 5 * layout.slab_bytes + 2 * layout.block_stride] = False
    assert torch.equal(arena.buffer[untouched], before_blocks.flatten()[untouched])
