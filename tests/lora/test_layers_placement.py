"""How an adapter is laid out for a rank: cut, packed, put into a slot. Ranks are threads of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.distributed.tp import TPGroup
from hybridserve.lora.layers import ALIGNMENT, device_bytes, place_adapter, remove
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
from tests.harness.tp import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.kernels.lora.interface import LoraPair
    from hybridserve.lora.layers import PlacedAdapter

TOLERANCE = 1e-4
IDS = random_ids(2, 20, 128)
EVERYTHING = (*ATTENTION, *MAMBA, *DENSE, *ENDS)


@pytest.fixture(scope="module")
def runner(kit: Kit) -> AdaptedRunner:
    return AdaptedRunner(kit.base)


def pairs_of(placed: PlacedAdapter) -> list[LoraPair]:
    return [pair for _, _, pairs in placed.pairs for pair in pairs]


# ---- one rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["A", "B", "E", "F", "dora"])
def test_bytes_are_told_before_and_owned_by_the_buffers(
    kit: Kit, runner: AdaptedRunner, name: str, dtype: torch.dtype
) -> None:
    adapter = runner.read(kit.adapter(name))
    placed = place_adapter(adapter, runner.modules, dtype, torch.device("cpu"), TPGroup.single())
    assert placed.identity == adapter.identity
    assert placed.num_bytes == sum(buffer.nbytes for buffer in placed.buffers)
    assert placed.num_bytes == device_bytes(adapter, runner.modules, dtype)
    assert len({buffer.dtype for buffer in placed.buffers}) == len(placed.buffers)
    owned = {buffer.untyped_storage().data_ptr() for buffer in placed.buffers}
    total = 0
    for pair in pairs_of(placed):
        for tensor in (pair.A, pair.B, pair.bias, pair.gain):
            if tensor is not None:
                assert tensor.untyped_storage().data_ptr() in owned
                assert tensor.is_contiguous()
                assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0
                total += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        assert pair.A.dtype == pair.B.dtype == dtype
    assert placed.num_bytes == total


def test_l064_bytes_grow_with_the_true_rank(kit: Kit, runner: AdaptedRunner) -> None:
    sizes = []
    for rank in (4, 8, 16):
        path = kit.adapter(f"size-{rank}", AdapterSpec(1, rank, ("in_proj", "o_proj"), EXPERTS))
        sizes.append(device_bytes(runner.read(path, max_rank=64), runner.modules, torch.float32))
    assert sizes == [sizes[0], 2 * sizes[0], 4 * sizes[0]]
    one = runner.read(kit.adapter("B"))
    assert device_bytes(one, runner.modules, torch.bfloat16) == 2 * 2 * (32 + 32)


def test_slices_that_share_an_a_are_one_pair(kit: Kit, runner: AdaptedRunner) -> None:
    """Both halves of in_proj, gate and up of experts that were trained as one; not those with an A each."""
    placed = runner.place(kit.adapter("A"))
    by_table = {(id(table), group): pairs for table, group, pairs in placed.pairs}

    def pairs(name: str) -> tuple[LoraPair, ...]:
        module = runner.modules[name]
        return by_table[id(module.table), module.group]

    assert [(p.start, p.B.shape[1]) for p in pairs("model.layers.0.mamba.in_proj")] == [(0, 128)]
    assert [(p.start, p.B.shape[1]) for p in pairs("model.layers.1.feed_forward.experts.3.up_proj")] == [
        (0, 128)
    ]
    assert [(p.start, p.B.shape[1]) for p in pairs("model.layers.0.feed_forward.up_proj")] == [
        (0, 64),
        (64, 64),
    ]
    qkv = [(p.start, p.B.shape[1]) for p in pairs("model.layers.2.self_attn.k_proj")]
    assert qkv == [(0, 32), (32, 16), (48, 16)]
    A = pairs("model.embed_tokens")[0].A
    assert A.shape == (128, 4)
    assert torch.equal(A, runner.read(kit.adapter("A")).deltas["model.embed_tokens"].A.T)


@pytest.mark.parametrize("modules", [("gate_proj",), ("up_proj",), ("k_proj",), ("q_proj", "v_proj")])
def test_l030_fewer_parts_than_slices(kit: Kit, runner: AdaptedRunner, modules: tuple[str, ...]) -> None:
    name = f"parts-{'-'.join(modules)}"
    runner.install(1, kit.adapter(name, AdapterSpec(3, 4, modules)))
    assert (runner.logits(IDS, 1) - kit.logits(name, IDS)).abs().max() <= TOLERANCE


def test_slots_are_filled_and_emptied(kit: Kit, runner: AdaptedRunner) -> None:
    remove(2, runner.registry.tables)
    first, second = runner.place(kit.adapter("A")), runner.place(kit.adapter("B"))
    first.install(2)
    with pytest.raises(RuntimeError, match="slot 2 still holds"):
        second.install(2)
    remove(2, runner.registry.tables)
    for table in runner.registry.tables:
        assert not any(table.pairs(2, group) for group in range(table.num_groups))
    second.install(2)
    used = [table for table in runner.registry.tables if table.pairs(2, 0)]
    assert used == [runner.modules["model.layers.2.self_attn.q_proj"].table]


def test_poison_reaches_everything(kit: Kit, runner: AdaptedRunner) -> None:
    placed = runner.install(3, kit.adapter("dora"))
    placed.poison()
    for pair in pairs_of(placed):
        assert pair.A.isnan().all()
        assert pair.B.isnan().all()
        assert pair.gain is not None
        assert pair.gain.isnan().all()
    assert runner.logits(IDS, 3).isnan().all()
    remove(3, runner.registry.tables)
    assert not runner.logits(IDS, 3).isnan().any()


# ---- several ranks


def tp_logits(kit: Kit, path: Path, size: int, chunk: int | None = None) -> list[torch.Tensor]:
    def rank(tp: TPGroup) -> torch.Tensor:
        runner = AdaptedRunner(kit.base, tp=tp)
        runner.install(1, path)
        return runner.logits(IDS, 1, chunk=chunk)

    return run_ranks(size, rank)


def tp_modules(kit: Kit, path: Path, size: int, name: str) -> list[tuple[LoraPair, ...]]:
    """What each rank has for a module."""

    def rank(tp: TPGroup) -> tuple[LoraPair, ...]:
        runner = AdaptedRunner(kit.base, tp=tp)
        runner.install(1, path)
        module = runner.modules[name]
        return module.table.pairs(1, module.group)

    return run_ranks(size, rank)


def assert_ranks_equal_one(kit: Kit, path: Path, size: int) -> None:
    single = AdaptedRunner(kit.base)
    single.install(1, path)
    want = single.logits(IDS, 1)
    assert (want - single.logits(IDS)).abs().mean() > 0.01
    assert (tp_logits(kit, path, size)[0] - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["A", "C", "E", "dora"])
def test_all_modules_over_ranks(kit: Kit, name: str, size: int) -> None:
    assert_ranks_equal_one(kit, kit.adapter(name), size)
    assert (tp_logits(kit, kit.root / name, size, 3)[0] - kit.logits(name, IDS)).abs().max() <= TOLERANCE


def test_l025_halves_of_in_proj_are_cut_separately(kit: Kit, tmp_path: Path) -> None:
    kit.adapter("in-proj", AdapterSpec(4, 4, ("in_proj", "gate_proj", "up_proj")))
    path = kit.copy("in-proj", tmp_path / "adapter")

    def louder(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if "in_proj.lora_B" in key:
                tensor[64:] *= 10

    edit_tensors(path, louder)
    assert_ranks_equal_one(kit, path, 2)
    B = AdaptedRunner(kit.base).read(path).deltas["model.layers.0.mamba.in_proj"].B
    for rank, pairs in enumerate(tp_modules(kit, path, 2, "model.layers.0.mamba.in_proj")):
        rows = torch.cat([B[32 * rank : 32 * rank + 32], B[64 + 32 * rank : 96 + 32 * rank]])
        assert torch.equal(torch.cat([pair.B for pair in pairs], 1), rows.T)


def test_l026_ranks_of_pairs_are_not_cut_nor_gathered(kit: Kit) -> None:
    for name, inputs in (("mamba.in_proj", 32), ("mamba.out_proj", 32), ("mamba.x_proj", 32)):
        for pairs in tp_modules(kit, kit.adapter("C"), 2, f"model.layers.0.{name}"):
            assert all(pair.A.shape == (8, inputs) and len(pair.B) == 8 for pair in pairs)


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_l028_ranks_smaller_than_the_group(kit: Kit, rank: int) -> None:
    path = kit.adapter(f"small-{rank}", AdapterSpec(5, rank, EVERYTHING, (*EXPERTS, *ROUTER), alpha=2 * rank))
    assert_ranks_equal_one(kit, path, 4)


def test_l029_kv_heads_that_ranks_share(kit: Kit) -> None:
    path = kit.adapter("D")
    assert_ranks_equal_one(kit, path, 4)
    deltas = AdaptedRunner(kit.base).read(path).deltas
    for rank, pairs in enumerate(tp_modules(kit, path, 4, "model.layers.2.self_attn.k_proj")):
        head = slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        assert torch.equal(pairs[1].B, deltas["model.layers.2.self_attn.k_proj"].B[head].T)
        assert torch.equal(pairs[2].B, deltas["model.layers.2.self_attn.v_proj"].B[head].T)
        query = slice(8 * rank, 8 * rank + 8)
        assert torch.equal(pairs[0].B, deltas["model.layers.2.self_attn.q_proj"].B[query].T)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_l032_a_vocabulary_that_does_not_divide(tied: bool, dora: bool, tmp_path: Path) -> None:
    kit = Kit(tmp_path, vocab_size=131, tie_word_embeddings=tied)
    path = kit.adapter("ends", AdapterSpec(6, 4, ENDS, config={"use_dora": dora}))
    for size in (2, 4):
        assert_ranks_equal_one(kit, path, size)
    assert (tp_logits(kit, path, 2)[0] - kit.logits("ends", IDS)).abs().max() <= TOLERANCE


BIASED: dict[str, tuple[str, dict[str, Any], AdapterSpec]] = {
    "jamba": (
        "jamba",
        {"mamba_proj_bias": True},
        AdapterSpec(7, 4, ("in_proj", "dt_proj", "out_proj"), config={"lora_bias": True}),
    ),
    "llama": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        AdapterSpec(8, 4, (*ATTENTION, *DENSE), config={"lora_bias": True}),
    ),
    "llama-dora": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        AdapterSpec(9, 4, (*ATTENTION, *DENSE), config={"use_dora": True}),
    ),
}


@pytest.mark.parametrize("name", BIASED)
def test_biases_are_added_once(name: str, tmp_path: Path) -> None:
    family, overrides, spec = BIASED[name]
    kit = Kit(tmp_path, family, **overrides)
    path = kit.adapter(name, spec)
    assert_ranks_equal_one(kit, path, 2)
    assert (tp_logits(kit, path, 2)[0] - kit.logits(name, IDS)).abs().max() <= TOLERANCE


def test_ranks_together_hold_each_cut_tensor_once(kit: Kit) -> None:
    """Of what is cut; A of column-parallel and B of row-parallel modules are on every rank."""
    path = kit.adapter("E")

    def rank(tp: TPGroup) -> int:
        runner = AdaptedRunner(kit.base, tp=tp)
        return device_bytes(runner.read(path), runner.modules, torch.float32)

    whole, parts = run_ranks(1, rank)[0], run_ranks(2, rank)
    replicated = 2 * 4 * 4 * 5 * (32 + 32)  # layers, experts, bytes, rank: A of gate and up, B of down
    assert sum(parts) == whole + replicated
