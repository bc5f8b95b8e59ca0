"""Models divided over real processes: the logits of one process and, put together, its states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.models.config import load_hf_config
from tests.distributed import work
from tests.harness.models import load_runner, random_ids
from tests.harness.tp import joined_states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.distributed.harness import RankPool

TOLERANCE = 1e-4
IDS = random_ids(0, 24, vocab_size=500)
NAMES = ("jamba", "jamba-dense", "bamba-1", "bamba-2", "bamba-8", "mamba", "llama", "llama-tied")
TOPOLOGIES = [(2, 1), (4, 1), (1, 2), (2, 2)]  # tensor, pipeline
EIGHT = [pytest.param((8, 1), marks=pytest.mark.slow), pytest.param((4, 2), marks=pytest.mark.slow)]


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def assert_equals_one(
    ranks: RankPool, path: Path, topology: tuple[int, int], chunk: int | None = None, **options: Any
) -> None:
    single = load_runner(path)
    want = single.run(IDS)
    tensor, pipeline = topology
    results = ranks.run(tensor, pipeline, work.run_model, path, IDS, chunk=chunk, **options)
    for rank, result in enumerate(results):
        if rank != (pipeline - 1) * tensor:
            assert not result["logits"].numel(), "only one rank has logits"
    logits = results[(pipeline - 1) * tensor]["logits"]
    assert max_abs(logits, want) <= TOLERANCE
    assert torch.equal(logits.argmax(-1), want.argmax(-1))
    gathered, config = [], load_hf_config(path)
    for stage in range(pipeline):
        members = results[stage * tensor : (stage + 1) * tensor]
        gathered += joined_states([member["states"] for member in members], config)
    for mine, theirs in zip(gathered, single.states(), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert max_abs(a, b) <= TOLERANCE


@pytest.mark.parametrize("topology", [*TOPOLOGIES, *EIGHT], ids=lambda t: f"tp{t[0]}-pp{t[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_ranks_equal_one(
    ranks: RankPool, model: Callable[[str], Path], name: str, topology: tuple[int, int]
) -> None:
    assert_equals_one(ranks, model(name), topology)


@pytest.mark.parametrize("topology", [(2, 1), (4, 1), (2, 2)], ids=lambda t: f"tp{t[0]}-pp{t[1]}")
def test_whole_experts_on_each_rank(
    ranks: RankPool, model: Callable[[str], Path], topology: tuple[int, int]
) -> None:
    assert_equals_one(ranks, model("jamba"), topology, chunk=5, expert_parallel=True)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("jamba", "f065"),
        ("bamba-2", "f065"),
        ("bamba-1", "f066"),
        ("jamba", "j4"),
        ("bamba-2", "j4"),
        ("jamba", "j5"),
    ],
)
def test_faults_are_seen(ranks: RankPool, model: Callable[[str], Path], name: str, fault: str) -> None:
    """F065, F066, J4, J5: right without the fault, in two chunks, and far off with it."""
    assert_equals_one(ranks, model(name), (2, 1), chunk=12)
    want = load_runner(model(name)).run(IDS)
    broken = ranks.run(2, 1, work.run_model, model(name), IDS, chunk=12, fault=fault)[0]["logits"]
    assert max_abs(broken, want) > 100 * TOLERANCE
