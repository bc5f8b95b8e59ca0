"""A real model in an arena that is compacted under load computes what it computes in an arena with room."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.core.request import SamplingParams
from tests.harness.engine import Guarded

if TYPE_CHECKING:
    from pathlib import Path


def drive(model: Path, memory: str, *, num_steps: int = 60, **options: object) -> Guarded:
    """Many short prompts for a while, then a few long ones, and so on."""
    rng = random.Random(0)
    engine = Guarded(model, memory=memory, block_size=4, poison="large", max_num_seqs=24, **options)
    for step in range(num_steps):
        is_long = step // 12 % 2
        for _ in range(rng.random() < 0.25 if is_long else rng.randint(0, 2)):
            length = rng.randrange(80, 170) if is_long else rng.randint(2, 16)
            max_tokens = rng.randint(1, 8) if is_long else rng.randint(4, 30)
            prompt = [rng.randrange(1, 60) for _ in range(length)]
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.add(f"r{len(engine.results)}", prompt, params)
        if engine.core.has_work:
            engine.step()
    engine.run()
    return engine


@pytest.mark.parametrize(
    ("caching", "delay", "host"), [(False, 0, 0), (True, 0, "1MiB"), (True, 1, 0), (True, 1, "1MiB")]
)
def test_an_arena_that_is_compacted_computes_the_same(
    t_model: Path, caching: bool, delay: int, host: int | str
) -> None:
    small = drive(t_model, "320KiB", prefix_caching=caching, delay=delay, host_swap_bytes=host)
    large = drive(t_model, "8MiB")
    assert small.core.gauges()["num_compacted_slabs"]
    assert not large.core.gauges()["num_compacted_slabs"]
    for key, expected in large.results.items():
        assert small.results[key].token_ids == expected.token_ids, key
        for state, other in zip(small.results[key].states, expected.states, strict=True):
            torch.testing.assert_close(state, other, atol=1e-4, rtol=1e-4)
