"""What is kept of prefixes, for models with all kinds of memory: cold and warm are the same, and the same as
transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.engine import Guarded, Oracle, make_prompts
from tests.harness.models import save_model
from tests.harness.pairwise import pairwise
from tests.invariance.prefix_recipes import audit, greedy

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("jamba", "bamba", "mamba", "llama", "mistral")
AXES: dict[str, list[Any]] = {
    "chunk": [1, 3, 8, 64],
    "delay": [0, 1],
    "preempt_every": [None, 3],
    "preemption": ["recompute", "swap"],
    "poison": ["nan", "large"],
    "slot_order": ["forward", "shuffled"],
    "row_order": ["forward", "shuffled"],
    "interval": ["auto", 8],
    "memory": ["1MiB", "tight"],
}
TIGHT = {"jamba": "420KiB", "bamba": "260KiB", "mamba": "200KiB", "llama": "120KiB", "mistral": "120KiB"}


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Oracle]:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path, seed=0)
    return request.param, path, Oracle(path)


@pytest.mark.parametrize("cell", pairwise(AXES)[::2], ids=str)
def test_off_cold_and_warm(served: tuple[str, Path, Oracle], cell: dict[str, Any]) -> None:
    family, path, oracle = served
    cell = dict(cell)
    has_state = family in ("jamba", "bamba", "mamba")
    interval, memory = cell.pop("interval"), cell.pop("memory")
    options = {
        "prefix_caching": True,
        "block_size": 4,
        "host_swap_bytes": "1MiB",
        "checkpoint_interval": interval if has_state else "auto",
        "memory": TIGHT[family] if memory == "tight" else memory,
        "max_model_len": 48,
        **cell,
    }
    engine = Guarded(path, **options)
    shared = make_prompts([18], seed=1)[0]
    prompts = [
        shared[: 18 - 3 * index] + own for index, own in enumerate(make_prompts([2, 9, 5, 12], seed=2))
    ]
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            engine.add(f"t{turn}r{index}", prompt, greedy(6))
            if index % 2:
                engine.step()
        while engine.core.has_work:
            engine.step()
        if has_state and memory != "tight":
            assert audit(engine, oracle) > 0
    gauges = engine.core.gauges()
    assert gauges["prefix_num_hit_tokens"] > (0 if memory == "tight" else 30)
    if not has_state:
        assert gauges["prefix_num_checkpoints"] == 0
    oracle.check_all(engine.run())
