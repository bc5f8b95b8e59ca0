"""How often states of a long prompt are kept, and what is refused."""

from __future__ import annotations

import pytest

from hybridserve.config.schema import CacheConfig
from hybridserve.engine.prefix_plan import LEAST_TOKENS, STATE_ONLY_TOKENS, plan_checkpoint_interval
from tests.harness.scripted import toy_layout


def interval(kind: str = "hybrid", **settings: object) -> int:
    cache = CacheConfig(block_size=4, **settings)
    return plan_checkpoint_interval(cache, toy_layout(8, kind=kind))


def test_auto_weighs_a_state_against_tokens() -> None:
    layout = toy_layout(8)
    assert layout.bytes_per_slot < LEAST_TOKENS * layout.bytes_per_block / 4
    assert interval() == LEAST_TOKENS
    assert interval("state") == STATE_ONLY_TOKENS
    assert interval("kv") == 0
    assert interval(prefix_caching=False) == 0


def test_what_is_set_is_kept_or_refused() -> None:
    assert interval(checkpoint_interval=12) == 12
    assert interval(checkpoint_interval=0) == 0
    for kind, settings, message in (
        ("hybrid", {"checkpoint_interval": 6}, "6 is no multiple of cache.block_size"),
        ("hybrid", {"checkpoint_interval": 8, "prefix_caching": False}, "prefix_caching is false"),
        ("kv", {"checkpoint_interval": 8}, "no layer of this model has a state"),
    ):
        with pytest.raises(ValueError, match=f"cache.checkpoint_interval: .*{message}"):
            interval(kind, **settings)
