"""How often the state of a long prompt is kept for others. Knows sizes; does not know requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridserve.config.schema import CacheConfig
    from hybridserve.core.cache_spec import CacheLayout

LEAST_TOKENS = 512
"""Of `auto`: prompts are computed in chunks that end there, and a short one takes longer a token."""

STATE_ONLY_TOKENS = 2048
"""Of `auto`, where there is no K and V to compare a state with."""


def plan_checkpoint_interval(cache: CacheConfig, layout: CacheLayout) -> int:
    """Tokens between two checkpoints of one prompt; 0: none. ValueError for a setting that can't be
    honoured."""
    wanted, key = cache.checkpoint_interval, "cache.checkpoint_interval"
    if wanted != "auto" and wanted:
        if wanted % cache.block_size:
            raise ValueError(f"{key}: {wanted} is no multiple of cache.block_size ({cache.block_size})")
        if not cache.prefix_caching:
            raise ValueError(f"{key}: {wanted} has no effect, cache.prefix_caching is false")
        if not layout.slots_per_slab:
            raise ValueError(f"{key}: {wanted} has no effect, no layer of this model has a state to keep")
    if not cache.prefix_caching or not layout.slots_per_slab:
        return 0
    if wanted != "auto":
        return wanted
    if not layout.blocks_per_slab:
        return -(-STATE_ONLY_TOKENS // cache.block_size) * cache.block_size
    blocks = -(-layout.bytes_per_slot // layout.bytes_per_block)
    return max(blocks, -(-LEAST_TOKENS // cache.block_size)) * cache.block_size
