"""Sequences that give way are copied to the host's memory and back, somewhere else, and what is evicted falls
there: every answer is the oracle's, and nothing is computed twice for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.engine import Guarded, Oracle, make_prompts
from tests.harness.models import save_model
from tests.harness.pairwise import pairwise

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("jamba", "bamba", "mamba", "llama")
AXES: dict[str, list[Any]] = {
    "chunk": [3, 8, 64],
    "delay": [0, 1],
    "preempt_every": [2, 3],
    "poison": ["nan", "large"],
    "slot_order": ["forward", "shuffled"],
    "prefix_caching": [False, True],
    "memory": ["1MiB", "tight"],
}
TIGHT = {"jamba": "420KiB", "bamba": "260KiB", "mamba": "200KiB", "llama": "120KiB"}


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Oracle]:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path, seed=0)
    return request.param, path, Oracle(path)


def serve(path: Path, **options: Any) -> Guarded:
    return Guarded(path, **{"block_size": 4, "max_model_len": 48, **options})


@pytest.mark.parametrize("cell", pairwise(AXES), ids=str)
def test_swapped_is_as_if_nothing_had_been(served: tuple[str, Path, Oracle], cell: dict[str, Any]) -> None:
    family, path, oracle = served
    cell = {**cell, "memory": TIGHT[family] if cell["memory"] == "tight" else cell["memory"]}
    engine = serve(path, preemption="swap", host_swap_bytes="1MiB", **cell)
    prompts = make_prompts([17, 3, 9, 12, 5], seed=2)
    for index, prompt in enumerate(prompts):
        engine.add(f"r{index}", prompt)
    oracle.check_all(engine.run())
    gauges = engine.core.gauges()
    assert gauges["num_swaps_out"] >= 3
    assert gauges["num_swaps_in"] > 0
    if not cell["delay"]:  # else a step in flight may have drawn the last token of one that is out
        assert gauges["num_swaps_in"] == gauges["num_swaps_out"]
    assert gauges["num_swapped_out"] == 0
    assert gauges["host_bytes_sequences"] == 0
    if not gauges["num_recomputed_instead"] and not cell["prefix_caching"]:
        # each token once, but for the last that was drawn
        assert gauges["num_computed_tokens"] == sum(len(prompt) + 8 - 1 for prompt in prompts)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_host_that_is_full_costs_tokens_and_no_answer(served: tuple[str, Path, Oracle], delay: int) -> None:
    """It has room for one sequence: the others compute again."""
    _, path, oracle = served
    layout = serve(path).layout
    size = max(2, layout.slabs_for(28)) * layout.slab_bytes
    engine = serve(path, preemption="swap", host_swap_bytes=size, preempt_every=1, delay=delay)
    for index, prompt in enumerate(make_prompts([17, 13, 19, 12, 15, 11], seed=3)):
        engine.add(f"r{index}", prompt)
    oracle.check_all(engine.run())
    assert engine.core.gauges()["num_swaps_out"] > 0


def test_evicted_prefixes_are_found_on_the_host(served: tuple[str, Path, Oracle]) -> None:
    family, path, oracle = served
    options = {"prefix_caching": True, "host_swap_bytes": "1MiB", "chunk": 8, "memory": TIGHT[family]}
    if family == "jamba":
        options["checkpoint_interval"] = 8
    engine = serve(path, **options)
    prompts = make_prompts([18, 19, 17, 18, 19, 17, 18, 20], seed=4)
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            engine.add(f"t{turn}r{index}", prompt)
            while engine.core.has_work:
                engine.step()
    engine.check_drained()
    oracle.check_all(engine.results)
    gauges = engine.core.gauges()
    assert gauges["prefix_num_found_blocks"] + gauges["prefix_num_found_checkpoints"] > 0
    if family != "mamba":
        assert gauges["prefix_num_spilled_blocks"] > 0
    if family != "llama":
        assert gauges["prefix_num_found_checkpoints"] > 0
