"""Adapters divided over real processes, as lora.md's table says: one process's logits, and peft's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.lora.layers import device_bytes
from tests.distributed import work
from tests.harness.adapters import (
    ATTENTION,
    DENSE,
    ENDS,
    EXPERTS,
    MAMBA,
    ROUTER,
    AdaptedRunner,
    AdapterSpec,
    Kit,
    edit_tensors,
)
from tests.harness.models import random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from tests.distributed.harness import RankPool

TOLERANCE = 1e-4
IDS = random_ids(2, 20, 128)
EVERYTHING = (*ATTENTION, *MAMBA, *DENSE, *ENDS)
K_PROJ, IN_PROJ = "model.layers.2.self_attn.k_proj", "model.layers.0.mamba.in_proj"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("adapters"))


def run(
    ranks: RankPool, kit: Kit, adapter: Path, topology: tuple[int, int], **options: Any
) -> list[dict[str, Any]]:
    return ranks.run(*topology, work.run_adapter, kit.base, adapter, IDS, **options)


def assert_equals_one(
    ranks: RankPool, kit: Kit, adapter: Path, topology: tuple[int, int], **options: Any
) -> list[dict[str, Any]]:
    single = AdaptedRunner(kit.base)
    single.install(1, adapter)
    want, plain = single.logits(IDS, 1), single.logits(IDS)
    assert (want - plain).abs().mean() > 0.01
    results = run(ranks, kit, adapter, topology, **options)
    mine = results[(topology[1] - 1) * topology[0]]
    assert (mine["logits"] - want).abs().max() <= TOLERANCE
    assert (mine["base"] - plain).abs().max() <= TOLERANCE
    return results


@pytest.mark.parametrize("topology", [(2, 1), (4, 1), (1, 2), (2, 2)], ids=lambda t: f"tp{t[0]}-pp{t[1]}")
@pytest.mark.parametrize("name", ["A", "C", "E", "dora"])
def test_all_modules(ranks: RankPool, kit: Kit, name: str, topology: tuple[int, int]) -> None:
    """Stages apply what they have of it; a sum of DoRA's norms over ranks is one collective of its own."""
    results = assert_equals_one(ranks, kit, kit.adapter(name), topology, chunk=3)
    logits = results[(topology[1] - 1) * topology[0]]["logits"]
    assert (logits - kit.logits(name, IDS)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("topology", [(2, 1), (4, 1), (2, 2)], ids=lambda t: f"tp{t[0]}-pp{t[1]}")
@pytest.mark.parametrize("name", ["A", "E"])
def test_whole_experts(ranks: RankPool, kit: Kit, name: str, topology: tuple[int, int]) -> None:
    """The expert axis is cut, the inner one isn't; what is planned for is what the fullest rank takes."""
    adapter = kit.adapter(name)
    shown = [f"model.layers.1.feed_forward.experts.{expert}.down_proj" for expert in range(4)]
    results = assert_equals_one(ranks, kit, adapter, topology, expert_parallel=True, shown=shown)
    tensor, pipeline = topology
    deltas = AdaptedRunner(kit.base).read(adapter).deltas
    for rank, result in enumerate(results[:tensor]):
        mine = [
            f"model.layers.1.feed_forward.experts.{e}.down_proj" for e in range(4) if e * tensor // 4 == rank
        ]
        assert list(result["pairs"]) == mine
        for module, ((_, A, B),) in result["pairs"].items():
            assert torch.equal(A, deltas[module].A)
            assert torch.equal(B, deltas[module].B.T)
    modules = work.all_modules(kit.base, tensor, pipeline, True)
    planned = device_bytes(AdaptedRunner(kit.base).read(adapter), modules, torch.float32)
    assert planned == max(result["num_bytes"] for result in results)


@pytest.mark.parametrize("topology", [(2, 1), (1, 2), (2, 2)], ids=lambda t: f"tp{t[0]}-pp{t[1]}")
def test_bytes_are_those_of_the_fullest_rank(ranks: RankPool, kit: Kit, topology: tuple[int, int]) -> None:
    adapter = kit.adapter("A")
    results = run(ranks, kit, adapter, topology)
    modules = work.all_modules(kit.base, *topology, False)
    read = AdaptedRunner(kit.base).read(adapter)
    assert device_bytes(read, modules, torch.float32) == max(r["num_bytes"] for r in results)


@pytest.fixture(scope="module")
def loud_half(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of in_proj and gate_up whose second half of in_proj's B is ten times the first."""
    kit.adapter("in-proj", AdapterSpec(4, 4, ("in_proj", "gate_proj", "up_proj")))
    path = kit.copy("in-proj", tmp_path_factory.mktemp("loud") / "adapter")

    def louder(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if "in_proj.lora_B" in key:
                tensor[64:] *= 10

    edit_tensors(path, louder)
    return path


def test_l025_halves_of_in_proj_are_cut_separately(ranks: RankPool, kit: Kit, loud_half: Path) -> None:
    results = assert_equals_one(ranks, kit, loud_half, (2, 1), shown=[IN_PROJ])
    B = AdaptedRunner(kit.base).read(loud_half).deltas[IN_PROJ].B
    for rank, result in enumerate(results):
        rows = torch.cat([B[32 * rank : 32 * rank + 32], B[64 + 32 * rank : 96 + 32 * rank]])
        assert torch.equal(torch.cat([each for _, _, each in result["pairs"][IN_PROJ]], 1), rows.T)


def test_l026_ranks_of_pairs_are_neither_cut_nor_gathered(ranks: RankPool, kit: Kit) -> None:
    """Rank activations are r wide; A has this rank's inputs, all of them where the input is whole."""
    inputs = {f"model.layers.0.mamba.{name}": size for name, size in (("in_proj", 32), ("out_proj", 32))}
    for result in assert_equals_one(ranks, kit, kit.adapter("C"), (2, 1), shown=list(inputs)):
        for name, pairs in result["pairs"].items():
            assert all(A.shape == (8, inputs[name]) and len(B) == 8 for _, A, B in pairs)


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_l028_ranks_smaller_than_the_group(ranks: RankPool, kit: Kit, rank: int) -> None:
    spec = AdapterSpec(5, rank, EVERYTHING, (*EXPERTS, *ROUTER), alpha=2 * rank)
    assert_equals_one(ranks, kit, kit.adapter(f"small-{rank}", spec), (4, 1))


def test_l029_kv_heads_that_ranks_share(ranks: RankPool, kit: Kit) -> None:
    path = kit.adapter("D")
    deltas = AdaptedRunner(kit.base).read(path).deltas
    for rank, result in enumerate(assert_equals_one(ranks, kit, path, (4, 1), shown=[K_PROJ])):
        head = slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        _, (_, _, k), _ = result["pairs"][K_PROJ]
        assert torch.equal(k, deltas[K_PROJ].B[head].T)


@pytest.mark.parametrize(
    "modules", [("gate_proj",), ("up_proj",), ("v_proj",), ("k_proj",), ("q_proj", "v_proj")]
)
def test_l030_fewer_parts_than_slices(ranks: RankPool, kit: Kit, modules: tuple[str, ...]) -> None:
    name = f"parts-{'-'.join(modules)}"
    assert_equals_one(ranks, kit, kit.adapter(name, AdapterSpec(3, 4, modules)), (2, 1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_l032_a_vocabulary_that_does_not_divide(
    ranks: RankPool, tied: bool, dora: bool, tmp_path: Path
) -> None:
    kit = Kit(tmp_path, vocab_size=131, tie_word_embeddings=tied)
    path = kit.adapter("ends", AdapterSpec(6, 4, ENDS, config={"use_dora": dora}))
    for topology in ((2, 1), (2, 2)):
        results = assert_equals_one(ranks, kit, path, topology)
        logits = results[(topology[1] - 1) * topology[0]]["logits"]
        assert logits.shape == (len(IDS), 131)
        assert (logits - kit.logits("ends", IDS)).abs().max() <= TOLERANCE


def test_biases_are_added_once(ranks: RankPool, tmp_path: Path) -> None:
    kit = Kit(tmp_path, mamba_proj_bias=True)
    spec = AdapterSpec(7, 4, ("in_proj", "dt_proj", "out_proj"), config={"lora_bias": True})
    for topology in ((2, 1), (2, 2)):
        assert_equals_one(ranks, kit, kit.adapter("biased", spec), topology)


@pytest.mark.parametrize(
    ("fault", "tensor", "name"),
    [("l025", 2, "loud"), ("l026", 2, "C"), ("l026", 4, "one"), ("l029", 4, "D"), ("l032", 2, "A")],
)
def test_faults_are_seen(
    ranks: RankPool, kit: Kit, loud_half: Path, fault: str, tensor: int, name: str
) -> None:
    """L025, L026, L028 (r = 1), L029, L032."""
    one = AdapterSpec(5, 1, EVERYTHING)
    adapter = loud_half if name == "loud" else kit.adapter(name, one if name == "one" else None)
    assert_equals_one(ranks, kit, adapter, (tensor, 1))
    right = run(ranks, kit, adapter, (tensor, 1))[0]["logits"]
    wrong = run(ranks, kit, adapter, (tensor, 1), fault=fault)[0]["logits"]
    assert (right - wrong).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_groups_that_ranks_share(ranks: RankPool, tmp_path: Path, groups: int, use_dora: bool) -> None:
    """Mamba-2's in_proj is cut in five: B and C of a group have the same rows on each rank that shares it."""
    shared = Kit(tmp_path, "bamba", mamba_n_groups=groups)
    spec = AdapterSpec(9, 4, ("in_proj", "out_proj"), config={"use_dora": use_dora})
    results = assert_equals_one(ranks, shared, shared.adapter("bamba", spec), (4, 1), chunk=3)
    assert (results[0]["logits"] - shared.logits("bamba", IDS)).abs().max() <= TOLERANCE
