"""The differential matrix: the same requests must come out the same whatever happens around them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core.request import SamplingParams
from tests.harness.engine import Guarded, Oracle, make_prompts
from tests.harness.pairwise import pairwise
from tests.harness.quantized import QuantizedModel, dequantized_copy, everything

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
    "format": ["none", "int8", "fp8"],
}
LENGTHS = [1, 2, 3, 4, 5, 7, 9, 12, 16, 17, 23, 30]


def run_cell(
    t_model: Path, oracle: Oracle, company: str, cell: dict[str, Any], lengths: list[int]
) -> Guarded:
    """`oracle` has the numbers that the weights are in the cell's format."""
    options = {"quantization.format": cell.pop("format", "none"), "kernels.gemm": "exact"}
    engine = Guarded(t_model, **options, **cell)
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


class Oracles(dict[str, Oracle]):
    """By format: transformers with the numbers that this project's loader makes of the weights."""

    def __init__(self, t_model: Path, folder: Path, plain: Oracle) -> None:
        super().__init__(none=plain)
        self.t_model = t_model
        self.folder = folder

    def __missing__(self, name: str) -> Oracle:
        model = QuantizedModel(self.t_model, everything(name))
        self[name] = Oracle(dequantized_copy(model, self.t_model, self.folder / name))
        return self[name]


@pytest.fixture(scope="module")
def oracles(t_model: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    return Oracles(t_model, tmp_path_factory.mktemp("oracles"), oracle)


CELLS = pairwise(AXES)


@pytest.mark.parametrize("cell", CELLS[::4], ids=str)
def test_matrix_sample(t_model: Path, oracles: Oracles, cell: dict[str, Any]) -> None:
    cell = dict(cell)
    run_cell(t_model, oracles[cell["format"]], cell.pop("company"), cell, LENGTHS[::2])


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_matrix(t_model: Path, oracles: Oracles, cell: dict[str, Any]) -> None:
    cell = dict(cell)
    run_cell(t_model, oracles[cell["format"]], cell.pop("company"), cell, LENGTHS)


def test_pairs_are_covered() -> None:
    for one, other in itertools.combinations(AXES, 2):
        for a, b in itertools.product(AXES[one], AXES[other]):
            assert any(cell[one] == a and cell[other] == b for cell in CELLS)


def test_forced_preemption_preempts(t_model: Path, oracle: Oracle) -> None:
    engine = run_cell(t_model, oracle, "decodes", {"preempt_every": 3, "chunk": 8}, LENGTHS[:4])
    assert sum(result.metrics.num_preemptions for result in engine.results.values()) > 3
