"""Weights in one byte or less, divided over real processes: each rank's codes are a cut of one process's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.engine.convert import quantize_checkpoint
from hybridserve.quant.policy import Quantization
from tests.distributed import work
from tests.harness.models import load_runner, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.distributed.harness import RankPool

TOLERANCE = 1e-4
IDS = random_ids(0, 24, vocab_size=500)


def assert_codes_are_cut(
    ranks: RankPool,
    path: Path,
    topology: tuple[int, int],
    format_name: str | None,
    targets: Sequence[str] = ("all",),
    whole: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    whole = whole or work.codes_of(path, format_name, targets)
    results = ranks.run(*topology, work.codes, path, format_name, targets, **options)
    assert set().union(*results) == whole.keys()
    for found in results:
        for name, (codes, scales, rows, (first, last)) in found.items():
            all_codes, all_scales, _, (_, num_inputs) = whole[name]
            a_code = num_inputs // all_codes.shape[1]  # NF4 has two numbers a code
            assert codes.dtype == all_codes.dtype
            columns = slice(first // a_code, last // a_code)
            expected = torch.cat([all_codes[start:stop, columns] for start, stop in rows])
            assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)), name
            expected = torch.cat([all_scales[start:stop] for start, stop in rows])
            if scales.dim() == 2:
                block = num_inputs // all_scales.shape[1]
                expected = expected[:, first // block : last // block]
            assert torch.equal(scales, expected), name


@pytest.mark.parametrize("topology", [(2, 1), (2, 2)], ids=lambda t: f"tp{t[0]}-pp{t[1]}")
@pytest.mark.parametrize("format_name", ["int8", "int8-w8a8", "fp8", "bnb-int8"])
def test_codes_are_cuts_of_one_ranks(
    ranks: RankPool, model: Callable[[str], Path], format_name: str, topology: tuple[int, int]
) -> None:
    assert_codes_are_cut(ranks, model("jamba"), topology, format_name)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("tensor", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_f067_codes_of_shared_groups(
    ranks: RankPool, model: Callable[[str], Path], groups: int, tensor: int
) -> None:
    """B and C of a group that several ranks have: the same codes on each."""
    assert_codes_are_cut(ranks, model(f"bamba-{groups}"), (tensor, 1), "int8")


def test_nf4_is_cut_between_blocks(ranks: RankPool, model: Callable[[str], Path]) -> None:
    """Of 64 inputs; where a rank would have half of one, the plan refuses it (F068)."""
    assert_codes_are_cut(ranks, model("jamba"), (2, 1), "bnb-nf4", ("mlp", "in_proj"))


@pytest.mark.parametrize("format_name", ["int8", "fp8", "bnb-int8"])
def test_logits_are_those_of_one_process(
    ranks: RankPool, model: Callable[[str], Path], format_name: str
) -> None:
    quantization = Quantization(format_name, ("all",))
    want = load_runner(model("jamba"), quantization=quantization).run(IDS)
    plain = load_runner(model("jamba")).run(IDS)
    assert (want - plain).abs().max() > 100 * TOLERANCE, "quantized at all"
    for topology, expert_parallel in (((2, 1), False), ((4, 1), True), ((2, 2), False)):
        tensor, pipeline = topology
        results = ranks.run(
            *topology,
            work.run_model,
            model("jamba"),
            IDS,
            quantization=quantization,
            expert_parallel=expert_parallel,
        )
        logits = results[(pipeline - 1) * tensor]["logits"]
        assert (logits - want).abs().max() <= TOLERANCE


def test_whole_experts_have_the_same_codes(ranks: RankPool, model: Callable[[str], Path]) -> None:
    assert_codes_are_cut(ranks, model("jamba"), (4, 1), "int8", expert_parallel=True)


def test_a_checkpoint_that_is_quantized_already(
    ranks: RankPool, model: Callable[[str], Path], tmp_path: Path
) -> None:
    quantize_checkpoint(model("jamba"), tmp_path / "int8", "int8", None)
    online = work.codes_of(model("jamba"), "int8", ("all",))
    for topology in ((2, 1), (1, 2)):
        assert_codes_are_cut(ranks, tmp_path / "int8", topology, None, whole=online)


def test_scales_of_a_part_of_a_row_are_seen(ranks: RankPool, model: Callable[[str], Path]) -> None:
    with pytest.raises(AssertionError, match=r"down_proj|o_proj|out_proj"):
        assert_codes_are_cut(ranks, model("jamba"), (2, 1), "int8", fault="late")
