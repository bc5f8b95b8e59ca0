"""What a model's layers remember, and how much memory one unit of it takes.

Knows bytes and shapes; does not know tensors, requests or how many units there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

ALIGNMENT = 64
"""Strides of blocks and slots are multiples of this many bytes (one cache line, one widest vector)."""


@dataclass(frozen=True, slots=True)
class PagedKVSpec:
    """A layer that remembers by growing: one K and one V entry a token.

    Sizes are those of one rank: already divided by the tensor-parallel size.
    `window` is the number of most recent tokens that are attended to; None attends to all.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent state, `shape` without the leading slot axis (channel first, D16)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A layer that remembers by overwriting: a fixed set of tensors a sequence."""

    tensors: tuple[StateTensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


CacheSpec = PagedKVSpec | StateSpec


MIN_SLABS = 16
"""A slab is never so large that the arena holds fewer than this many, if smaller ones exist."""

MAX_PADDING = 0.01

STATE_ALIGNMENT = 16
"""Each tensor of a slot starts at a multiple of this many bytes: whole elements, and whole short vectors."""

_MAX_LARGE_UNITS = 64
"""Units of the larger kind tried in one slab: enough to bring any ratio of the two sizes below 1 %
padding."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How one arena is cut into slabs, and a slab into blocks or slots (D1, D2).

    `slots_per_slab * slot_stride == blocks_per_slab * block_stride == slab_bytes`, so block and slot ids are
    linear in their strides: block b starts at byte `b * block_stride`, slot s at `s * slot_stride`. Slab 0,
    and so block 0 and slot 0, is never handed out (D8). A model without recurrent layers has `slots_per_slab`
    0, one without attention `blocks_per_slab` 0. Sizes are bytes of one rank.

    A pipeline stage has the numbers of the whole model, which ids are about, and bytes of its own (D17): one
    without attention has blocks of no bytes.
    """

    specs: tuple[CacheSpec, ...]
    block_size: int
    bytes_per_block: int
    bytes_per_slot: int
    block_stride: int
    slot_stride: int
    slab_bytes: int
    blocks_per_slab: int
    slots_per_slab: int
    num_slabs: int

    @classmethod
    def build(
        cls, specs: Sequence[CacheSpec], block_size: int, arena_bytes: int, num_tokens: int = 0
    ) -> CacheLayout:
        """Choose the slab: the smallest with at most 1 % padding that leaves 16 slabs, else the one with
        least padding. Where one sequence of `num_tokens` tokens would not fit then, another in which it does;
        if there is none, the one that holds the longest sequence.

        What fits in an arena fits in every larger one. `block_size` is in tokens. Raises ValueError, with the
        numbers, if the arena can't hold the null slab and one more.
        """
        block, slot = _unit_bytes(specs, block_size)
        return cls._choose(tuple(specs), block, slot, block_size, arena_bytes, num_tokens)

    @classmethod
    def build_stages(
        cls, stages: Sequence[Sequence[CacheSpec]], block_size: int, arena_bytes: int, num_tokens: int = 0
    ) -> tuple[CacheLayout, tuple[CacheLayout, ...]]:
        """One cut for all stages of a pipeline, each of which has `arena_bytes`: (what the scheduler goes by,
        each stage's own).

        The first is chosen like `build`'s, for the largest block and the largest slot that any stage has, so
        it holds as many of either as any cut could; it has the sizes of those and no specs. With one stage
        the two are the same.
        """
        if len(stages) == 1:
            layout = cls.build(stages[0], block_size, arena_bytes, num_tokens)
            return layout, (layout,)
        sizes = [_unit_bytes(specs, block_size) for specs in stages]
        block, slot = (max(column) for column in zip(*sizes, strict=True))
        whole = cls._choose((), block, slot, block_size, arena_bytes, num_tokens)
        return whole, tuple(whole._of_stage(specs) for specs in stages)

    def _of_stage(self, specs: Sequence[CacheSpec]) -> CacheLayout:
        """The same ids over what one stage remembers: its slab is the larger of its two needs."""
        block, slot = _unit_bytes(specs, self.block_size)
        blocks, slots = self.blocks_per_slab if block else 0, self.slots_per_slab if slot else 0
        slab_bytes = max(blocks * _round_up(block, ALIGNMENT), slots * _round_up(slot, ALIGNMENT))
        slab_bytes = _round_up(slab_bytes, ALIGNMENT * math.lcm(blocks or 1, slots or 1))
        return replace(
            self,
            specs=tuple(specs),
            bytes_per_block=block,
            bytes_per_slot=slot,
            block_stride=slab_bytes // blocks if blocks else 0,
            slot_stride=slab_bytes // slots if slots else 0,
            slab_bytes=slab_bytes,
        )

    @classmethod
    def _choose(
        cls,
        specs: tuple[CacheSpec, ...],
        block: int,
        slot: int,
        block_size: int,
        arena_bytes: int,
        num_tokens: int,
    ) -> CacheLayout:
        if not block and not slot:
            raise ValueError("cache: no layer of this model remembers anything")
        smallest = max(_round_up(block, ALIGNMENT), _round_up(slot, ALIGNMENT))
        if arena_bytes < 2 * smallest:
            raise ValueError(
                f"cache: an arena of {arena_bytes:,} bytes is too small: the null slab and one more take "
                f"at least {2 * smallest:,} bytes (a block of {block_size} tokens {block:,}, a slot {slot:,})"
            )

        def layout(slab_bytes: int, blocks: int, slots: int) -> CacheLayout:
            return cls(
                specs=specs,
                block_size=block_size,
                bytes_per_block=block,
                bytes_per_slot=slot,
                block_stride=slab_bytes // blocks if blocks else 0,
                slot_stride=slab_bytes // slots if slots else 0,
                slab_bytes=slab_bytes,
                blocks_per_slab=blocks,
                slots_per_slab=slots,
                num_slabs=arena_bytes // slab_bytes,
            )

        if not block or not slot:
            return layout(smallest, int(block > 0), int(slot > 0))
        best = layout(*_cut_slab(block, slot, arena_bytes // min(MIN_SLABS, arena_bytes // smallest)))
        # The slabs that are tried for a larger arena include all that are tried for a smaller one, so what
        # fits does not depend on how the arena's size divides.
        limit = arena_bytes // 2
        while best._longest < num_tokens and limit >= smallest:
            tried = layout(*_cut_slab(block, slot, limit))
            best = max(best, tried, key=lambda each: each._longest)
            limit = tried.slab_bytes - 1
        return best

    @property
    def num_usable_slabs(self) -> int:
        return self.num_slabs - 1

    @property
    def padding(self) -> float:
        """The larger share by which a unit's stride exceeds its raw bytes; 0.01 is 1 %."""
        sizes = ((self.block_stride, self.bytes_per_block), (self.slot_stride, self.bytes_per_slot))
        return max(stride / raw - 1 for stride, raw in sizes if raw)

    def kv_offset(self, index: int) -> int:
        """Byte offset, inside a block, of layer `index`'s K [block_size, num_kv_heads, head_dim]; V follows
        it."""
        if not isinstance(self.specs[index], PagedKVSpec):
            raise ValueError(f"cache: layer {index} has a state, no blocks")
        before = (spec for spec in self.specs[:index] if isinstance(spec, PagedKVSpec))
        return sum(spec.bytes_per_token for spec in before) * self.block_size

    def state_offsets(self, index: int) -> tuple[int, ...]:
        """Byte offset, inside a slot, of each of layer `index`'s state tensors."""
        spec = self.specs[index]
        if not isinstance(spec, StateSpec):
            raise ValueError(f"cache: layer {index} has blocks, no state")
        offset = sum(_state_end(spec) for spec in self.specs[:index] if isinstance(spec, StateSpec))
        offsets = []
        for tensor in spec.tensors:
            offsets.append(offset)
            offset += _round_up(tensor.num_bytes, STATE_ALIGNMENT)
        return tuple(offsets)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence; 0 for a model without attention."""
        return -(-num_tokens // self.block_size) if self.blocks_per_slab else 0

    def slabs_for(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Slabs that `num_sequences` sequences of `num_tokens` tokens each take."""
        blocks = self.blocks_for(num_tokens) * num_sequences
        slabs = -(-blocks // self.blocks_per_slab) if blocks else 0
        return slabs + (-(-num_sequences // self.slots_per_slab) if self.slots_per_slab else 0)

    def max_sequences(self, num_tokens: int) -> int:
        """How many sequences of `num_tokens` tokens fit at the same time."""
        low, high = 0, self.num_usable_slabs * max(self.blocks_per_slab, self.slots_per_slab)
        while low < high:
            middle = (low + high + 1) // 2
            if self.slabs_for(num_tokens, middle) <= self.num_usable_slabs:
                low = middle
            else:
                high = middle - 1
        return low

    def max_tokens_one_sequence(self) -> int | None:
        """The longest sequence that fits alone, in tokens; None where a sequence's memory does not grow."""
        return self._longest if self.blocks_per_slab else None

    @property
    def _longest(self) -> int:
        return (self.num_usable_slabs - (self.slots_per_slab > 0)) * self.blocks_per_slab * self.block_size


def _unit_bytes(specs: Sequence[CacheSpec], block_size: int) -> tuple[int, int]:
    """Raw bytes of a block and of a slot."""
    if block_size < 1:
        raise ValueError(f"block_size: {block_size} is below 1")
    block = sum(spec.bytes_per_token for spec in specs if isinstance(spec, PagedKVSpec)) * block_size
    return block, sum(_state_end(spec) for spec in specs if isinstance(spec, StateSpec))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _state_end(spec: StateSpec) -> int:
    return sum(_round_up(tensor.num_bytes, STATE_ALIGNMENT) for tensor in spec.tensors)


def _cut_slab(block: int, slot: int, limit: int) -> tuple[int, int, int]:
    """(slab bytes, blocks, slots) for units of `block` and `slot` raw bytes: see `CacheLayout.build`."""
    large, small = max(block, slot), min(block, slot)
    large_stride, small_stride = _round_up(large, ALIGNMENT), _round_up(small, ALIGNMENT)
    rank: tuple[int, float] = (
        1,
        math.inf,
    )  # least is best: (0, slab) with at most 1 % padding, else (1, padding)
    least = (1, max(large_stride / large, small_stride / small) - 1)
    best = (large_stride, 1, 1)
    for num_large in range(1, min(_MAX_LARGE_UNITS, limit // large_stride) + 1):
        if rank <= least and num_large * large_stride >= best[0]:
            break
        most = int(num_large * large * (1 + MAX_PADDING) / small_stride) + 1
        for num_small in range(1, most + 1):
            slab = max(num_large * large_stride, num_small * small_stride)
            slab = _round_up(slab, ALIGNMENT * math.lcm(num_large, num_small))
            padding = max(slab / (num_large * large), slab / (num_small * small)) - 1
            new_rank = (0, slab) if padding <= MAX_PADDING else (1, padding)
            if slab <= limit and new_rank < rank:
                rank, best = new_rank, (slab, num_small, num_large)
    slab, num_small, num_large = best
    return (slab, num_small, num_large) if large == slot else (slab, num_large, num_small)
