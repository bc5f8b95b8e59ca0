"""T-mamba2, the T-model's sibling, whose state is a matrix a head: recipes, their faults, and cells of the
matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core.slabs import IntegrityError
from tests.harness.engine import Oracle
from tests.harness.models import save_model
from tests.invariance import prefix_recipes, recipes
from tests.invariance.test_matrix import CELLS, LENGTHS, Oracles, run_cell
from tests.mutations import MUTATIONS
from tests.prefix_mutations import PREFIX_MUTATIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ABOUT_STATES = [
    "f001_first_chunk_of_one_token",
    "f004_preempted_slot",
    "f013_chunks_of_11_3_1_5",
    "f014_every_split_of_a_prompt",
    "f019_short_prompts",
    "f021_interleavings",
    "f025_more_rows_than_the_budget",
    "f026_padding_and_slot_0",
    "f027_padding_and_the_lowest_slot",
    "f029_scratch_memory_is_nan",
    "f031_trailing_padding_changes_nothing",
    "f032_padding_on_any_side",
    "f034_twice_as_many_requests_as_slots",
    "f057_freed_under_a_running_step",
    "fork_n",
]
ABOUT_CHECKPOINTS = [
    "f005_kv_without_a_state",
    "f009_what_a_tenant_left",
    "f011_short_chunks_after_a_hit",
    "f015_checkpoints_of_a_batch",
    "f016_chunks_smaller_than_the_interval",
    "f022_a_checkpoint_beside_decodes",
    "f051_checkpoints_are_what_they_say",
    "f053_saved_after_the_step",
]
RECIPES: dict[str, Callable[[Path, Oracle], None]] = {
    **{name: getattr(recipes, name) for name in ABOUT_STATES},
    **{name: getattr(prefix_recipes, name) for name in ABOUT_CHECKPOINTS},
}
FAULTS = MUTATIONS | PREFIX_MUTATIONS
ONE_GROUP = ["f014_every_split_of_a_prompt", "f015_checkpoints_of_a_batch", "f032_padding_on_any_side"]


@pytest.fixture(scope="module")
def t_mamba2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t-mamba2")
    save_model("bamba", path, seed=0)
    return path


@pytest.fixture(scope="module")
def mamba2_oracle(t_mamba2: Path) -> Oracle:
    return Oracle(t_mamba2)


@pytest.fixture(scope="module")
def mamba2_oracles(
    t_mamba2: Path, mamba2_oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Oracles:
    return Oracles(t_mamba2, tmp_path_factory.mktemp("mamba2-oracles"), mamba2_oracle)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridserve.kernels.ssm.torch_native._BLOCK_TOKENS", 4)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, t_mamba2: Path, mamba2_oracle: Oracle) -> None:
    RECIPES[name](t_mamba2, mamba2_oracle)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_sees_its_fault(
    name: str, t_mamba2: Path, mamba2_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, IntegrityError)):
        RECIPES[name](t_mamba2, mamba2_oracle)


@pytest.mark.parametrize("name", ONE_GROUP)
def test_recipe_with_one_group(name: str, tmp_path: Path) -> None:
    save_model("bamba", tmp_path, seed=0, mamba_n_groups=1)
    RECIPES[name](tmp_path, Oracle(tmp_path))


@pytest.mark.parametrize("cell", CELLS[1::12], ids=str)
@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_matrix_sample(t_mamba2: Path, mamba2_oracles: Oracles, cell: dict[str, Any], backend: str) -> None:
    cell = {**cell, "kernels.ssm": backend}
    run_cell(t_mamba2, mamba2_oracles[cell["format"]], cell.pop("company"), cell, LENGTHS[::2])


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_matrix(t_mamba2: Path, mamba2_oracles: Oracles, cell: dict[str, Any]) -> None:
    cell = dict(cell)
    run_cell(t_mamba2, mamba2_oracles[cell["format"]], cell.pop("company"), cell, LENGTHS)
