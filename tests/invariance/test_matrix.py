"""The differential matrix: the same requests must come out the same whatever happens around them."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core.request import SamplingParams
from tests.harness.engine import Guarded, Oracle, make_prompts

if TYPE_CHECKING:
    from pathlib import Path

AXES: dict[str, list[Any]] = {
    "chunk": [1, 2, 3, 4, 5, 7, 8, 16, 512],
    "company": ["alone", "decodes", "long prefill"],
    "row_order": ["forward", "reverse", "shuffled"],
    "slot_order": ["forward", "reverse", "shuffled"],
    "preempt_every": [None, 3],
    "poison": ["nan", "large"],
    "delay": [0, 1],
    "buckets": [(), (4, 8, 16)],
}
LENGTHS = [1, 2, 3, 4, 5, 7, 9, 12, 16, 17, 23, 30]


def pairwise(axes: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cells in which every pair of values of two axes stands together at least once."""
    rng = random.Random(seed)
    pairs = {
        (one, a, other, b)
        for one, other in itertools.combinations(axes, 2)
        for a in range(len(axes[one]))
        for b in range(len(axes[other]))
    }
    cells = []
    while pairs:
        best: tuple[int, dict[str, int]] = (-1, {})
        for _ in range(60):
            cell = {name: rng.randrange(len(values)) for name, values in axes.items()}
            covered = sum(
                (one, cell[one], other, cell[other]) in pairs
                for one, other in itertools.combinations(axes, 2)
            )
            best = max(best, (covered, cell), key=lambda found: found[0])
        cell = best[1]
        pairs -= {(one, cell[one], other, cell[other]) for one, other in itertools.combinations(axes, 2)}
        cells.append({name: axes[name][index] for name, index in cell.items()})
    return cells


def run_cell(
    t_model: Path, oracle: Oracle, company: str, cell: dict[str, Any], lengths: list[int]
) -> Guarded:
    engine = Guarded(t_model, **cell)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = make_prompts(lengths)
    if company == "alone":
        for index, prompt in enumerate(prompts):
            engine.add(f"r{index}", prompt, params)
            engine.run()
    else:
        if company == "decodes":
            lasting = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            for index, prompt in enumerate(make_prompts([5, 6, 7], seed=1)):
                engine.add(f"decode{index}", prompt, lasting)
            for _ in range(4):
                engine.step()
        else:
            engine.add("long", make_prompts([90], seed=2)[0], params)
            engine.step()
        for index, prompt in enumerate(prompts):
            engine.add(f"r{index}", prompt, params)
            if index % 3 == 2:
                engine.step()
    oracle.check_all(engine.run())
    return engine


CELLS = pairwise(AXES)


@pytest.mark.parametrize("cell", CELLS[::4], ids=str)
def test_matrix_sample(t_model: Path, oracle: Oracle, cell: dict[str, Any]) -> None:
    cell = dict(cell)
    run_cell(t_model, oracle, cell.pop("company"), cell, LENGTHS[::2])


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_matrix(t_model: Path, oracle: Oracle, cell: dict[str, Any]) -> None:
    cell = dict(cell)
    run_cell(t_model, oracle, cell.pop("company"), cell, LENGTHS)


def test_pairs_are_covered() -> None:
    for one, other in itertools.combinations(AXES, 2):
        for a, b in itertools.product(AXES[one], AXES[other]):
            assert any(cell[one] == a and cell[other] == b for cell in CELLS)


def test_forced_preemption_preempts(t_model: Path, oracle: Oracle) -> None:
    engine = run_cell(t_model, oracle, "decodes", {"preempt_every": 3, "chunk": 8}, LENGTHS[:4])
    assert sum(result.metrics.num_preemptions for result in engine.results.values()) > 3
