"""Models cut over ranks, here threads of one process: the same logits and, put together, the same states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridserve.layers import linear, mamba1
from hybridserve.models.config import load_hf_config
from tests.harness.models import load_runner, random_ids, save_model
from tests.harness.tp import joined_states, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

TOLERANCE = 1e-4
IDS = random_ids(0, 24, vocab_size=500)


def run_tp(path: Path, size: int, chunk: int | None = None):
    def rank(tp):
        runner = load_runner(path, tp=tp)
        return runner.run(IDS, chunk), runner.states()

    return run_ranks(size, rank)


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def assert_states_join(path: Path, ranks: list, whole: list) -> None:
    states = joined_states(ranks, load_hf_config(path))
    for mine, theirs in zip(states, whole, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert max_abs(a, b) <= TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("jamba", {}),
        ("jamba", {"num_experts": 1, "mamba_proj_bias": True, "tie_word_embeddings": True}),
        ("mamba", {"use_bias": True, "vocab_size": 509}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 510}),
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 509}),
        ("qwen2", {}),
    ],
)
def test_ranks_agree_with_one(family: str, overrides: dict, size: int, tmp_path: Path) -> None:
    save_model(family, tmp_path, 0, **overrides)
    single = load_runner(tmp_path)
    want = single.run(IDS)
    results = run_tp(tmp_path, size)
    assert max_abs(results[0][0], want) <= TOLERANCE
    assert_states_join(tmp_path, [states for _, states in results], single.states())


def test_j4_halves_of_in_proj_are_cut_separately(tmp_path: Path, monkeypatch) -> None:
    save_model("jamba", tmp_path, 0)
    want = load_runner(tmp_path).run(IDS)
    assert max_abs(run_tp(tmp_path, 2)[0][0], want) <= TOLERANCE

    class OneSlice(linear.OutputSlices):
        """The fault: the merged weight cut as if it were one."""

        def __init__(self, name, slices, tp) -> None:
            if slices[0].module == "in_proj":
                rows = sum(s.num_rows for s in slices)
                slices = [linear.OutputSlice("in_proj", rows)]
            super().__init__(name, slices, tp)

    monkeypatch.setattr(linear, "OutputSlices", OneSlice)
    assert max_abs(run_tp(tmp_path, 2)[0][0], want) > 100 * TOLERANCE


def test_j5_x_proj_is_reduced_before_the_norms(tmp_path: Path, monkeypatch) -> None:
    save_model("jamba", tmp_path, 0)
    want = load_runner(tmp_path).run(IDS)
    assert max_abs(run_tp(tmp_path, 2, chunk=12)[0][0], want) <= TOLERANCE

    class NormedPart(linear.RowParallelLinear):
        """The fault: each rank norms its own partial sums."""

        def __call__(self, x, lora):
            part = self.projection(x, lora)
            if self.projection.outputs.placements[0].module != "x_proj":
                return self.tp.all_reduce(part)
            return self.tp.all_reduce(part / part.pow(2).mean(-1, keepdim=True).sqrt())

    monkeypatch.setattr(mamba1, "RowParallelLinear", NormedPart)
    assert max_abs(run_tp(tmp_path, 2)[0][0], want) > 100 * TOLERANCE


def test_number_of_collectives_is_as_designed(tmp_path: Path) -> None:
    """A mixer and a feed-forward block reduce once each, x_proj once more, the embedding once."""
    save_model("jamba", tmp_path, 0)

    def rank(tp):
        load_runner(tmp_path, tp=tp).run(IDS)
        return tp.meeting.num_reduced

    assert run_ranks(2, rank)[0] == 8 * 2 + 6 + 1


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    save_model("jamba", tmp_path, 0)
    with pytest.raises(
        ValueError, match=r"parallel.tensor: 3 doesn't divide 128 inner channels of a Mamba layer"
    ):
        run_ranks(3, lambda tp: load_runner(tmp_path, tp=tp))
