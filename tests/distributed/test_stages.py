"""What each stage of a pipeline is given: its own layers' memory, whatever kinds of layers it has (D17, F070,
F072), and sizes that a model can't be divided by, refused before anything is loaded (F068)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.config.loader import load_config
from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec
from hybridserve.distributed.pipeline import PipelineStage
from hybridserve.distributed.tp import TPGroup
from hybridserve.engine import arena_plan
from hybridserve.engine.arena import Arena
from hybridserve.engine.planner import build_context, make_plan
from hybridserve.engine.worker import Worker
from hybridserve.models.config import load_hf_config
from hybridserve.models.registry import build_model
from tests.distributed.work import replaced
from tests.harness.models import save_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hybridserve.engine.plan import EnginePlan

ATTENTION_LAYERS = (2, 6)  # of 8


def plan_of(path: Path, tensor: int, pipeline: int, **options: Any) -> EnginePlan:
    settings = {"max_model_len": 256, "memory_bytes": "1MiB", "cache.block_size": 4, **options}
    parallel = {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
    return make_plan(load_config(str(path), None, {**settings, **parallel}), path)


def check_stages(plan: EnginePlan, tensor: int) -> None:
    """Bytes are those of local layers, ids those of the whole, padding is what it says."""
    whole = plan.layout
    for stage in plan.stages:
        layout, (first, last) = stage.layout, stage.layers
        num_attention = sum(first <= layer <= last for layer in ATTENTION_LAYERS)
        num_mamba = last - first + 1 - num_attention
        head_dim, num_kv_heads, channels = 8, max(2 // tensor, 1), 128 // tensor
        block = num_attention * 2 * 4 * num_kv_heads * head_dim * 4
        slot = num_mamba * channels * (3 + 16) * 4
        assert (layout.bytes_per_block, layout.bytes_per_slot) == (block, slot)
        assert sum(isinstance(spec, PagedKVSpec) for spec in layout.specs) == num_attention
        assert sum(isinstance(spec, StateSpec) for spec in layout.specs) == num_mamba
        counts = (layout.blocks_per_slab, layout.slots_per_slab, layout.num_slabs, layout.block_size)
        assert counts == (whole.blocks_per_slab, whole.slots_per_slab, whole.num_slabs, whole.block_size)
        needs = (whole.blocks_per_slab * block, whole.slots_per_slab * slot)
        assert max(needs) <= layout.slab_bytes <= whole.slab_bytes <= (1 << 20) // whole.num_slabs
        assert layout.slab_bytes <= max(needs) * 1.01 + 64 * whole.blocks_per_slab * whole.slots_per_slab
        strides = [
            (count, stride, raw)
            for count, stride, raw in (
                (layout.blocks_per_slab, layout.block_stride, block),
                (layout.slots_per_slab, layout.slot_stride, slot),
            )
            if raw
        ]
        assert all(count * stride == layout.slab_bytes for count, stride, _ in strides)
        assert layout.padding == max(stride / raw - 1 for _, stride, raw in strides)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 4), (2, 8)])
def test_f070_f072_a_stage_counts_its_own_layers(
    model: Callable[[str], Path], tensor: int, pipeline: int
) -> None:
    """Among them stages without attention (of 4), and without Mamba (of 8)."""
    path = model("jamba")
    plan = plan_of(path, tensor, pipeline)
    check_stages(plan, tensor)
    kinds = {(bool(s.layout.bytes_per_block), bool(s.layout.bytes_per_slot)) for s in plan.stages}
    if pipeline == 4:
        assert (False, True) in kinds
    if pipeline == 8:
        assert kinds == {(False, True), (True, False)}
    for index, stage in enumerate(plan.stages):
        worker = Worker(path, plan, TPGroup(0, tensor), PipelineStage(index, pipeline))
        assert worker.arena.buffer.nbytes == plan.layout.num_slabs * stage.layout.slab_bytes
        assert worker._context.weights.num_bytes == stage.weight_bytes
        for rank in range(1, tensor):  # no bias of what is summed
            context = build_context(
                plan, torch.device("meta"), TPGroup(rank, tensor), PipelineStage(index, pipeline)
            )
            build_model(load_hf_config(path), context)
            assert 0.99 * stage.weight_bytes <= context.weights.num_bytes <= stage.weight_bytes
        assert len(worker.arena.views) == stage.layers[1] - stage.layers[0] + 1
        assert worker.arena.blocks.shape[0] == plan.layout.num_slabs * plan.layout.blocks_per_slab
        assert worker.arena.slots.shape[0] == plan.layout.num_slabs * plan.layout.slots_per_slab


def test_copies_of_blocks_that_have_no_bytes(model: Callable[[str], Path]) -> None:
    """On a stage without attention, they and those of slots don't touch each other."""
    plan = plan_of(model("jamba"), 1, 4)
    (index,) = [i for i, stage in enumerate(plan.stages) if not stage.layout.bytes_per_block][:1]
    arena = Arena(plan.stages[index].layout, torch.device("cpu"))
    arena.buffer.copy_(torch.arange(arena.buffer.numel()) % 251)
    before = arena.buffer.clone()
    arena.copy_blocks(torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert torch.equal(arena.buffer, before)
    arena.copy_slots(torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(arena.slots[2], arena.slots[1])
    changed = (arena.buffer != before).nonzero()
    stride = plan.stages[index].layout.slot_stride
    assert 2 * stride <= changed.min() <= changed.max() < 3 * stride


@pytest.mark.parametrize("fault", ["all layers", "all kinds"])
def test_f070_f072_the_faults_are_seen(model: Callable[[str], Path], fault: str) -> None:
    plain = CacheLayout._of_stage
    everything = plan_of(model("jamba"), 1, 1).layout.specs

    def broken(whole: CacheLayout, specs: Any) -> CacheLayout:
        if fault == "all layers":  # the pools of a stage sized for all layers
            return plain(whole, everything)
        one_of_each = [
            next(s for s in everything if isinstance(s, kind)) for kind in (PagedKVSpec, StateSpec)
        ]
        return plain(whole, [*specs, *one_of_each])

    with replaced(CacheLayout, "_of_stage", broken), pytest.raises(AssertionError):
        check_stages(plan_of(model("jamba"), 1, 4), 1)


def test_parameters_are_those_of_the_whole_model(model: Callable[[str], Path]) -> None:
    """A head tied to the embedding has a copy of it on the last stage, which is no parameter."""
    for name in ("jamba", "jamba-dense", "llama-tied", "bamba-2", "mamba"):
        one = plan_of(model(name), 1, 1)
        for tensor, pipeline in ((2, 1), (1, 2), (2, 4)):
            plan = plan_of(model(name), tensor, pipeline)
            assert plan.parameters_total == one.parameters_total
            assert plan.parameters_active == one.parameters_active
    tied = plan_of(model("llama-tied"), 1, 2)
    assert tied.stages[0].weight_bytes == pytest.approx(tied.stages[1].weight_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        (
            "jamba",
            {"parallel.tensor": 3},
            "parallel.tensor: 3 doesn't divide 128 inner channels of a Mamba layer; "
            "sizes that work here: 1, 2, 4, 8",
        ),
        (
            "llama",
            {"parallel.tensor": 16},
            "parallel.tensor: 16 doesn't divide 8 attention heads; sizes that work here: 1, 2, 4, 8",
        ),
        (
            "bamba-8",
            {"parallel.tensor": 16},
            "parallel.tensor: 16 doesn't divide 8 heads of a Mamba-2 layer; sizes that work here: 1, 2, 4, 8",
        ),
        ("mamba", {"parallel.tensor": 256}, "sizes that work here: 1, 2, 4, 8, 16, 32, 64, 128"),
        (
            "jamba",
            {"parallel.tensor": 8, "parallel.expert": True},
            "parallel.tensor: 8 doesn't divide 4 experts; sizes that work here: 1, 2, 4",
        ),
        (
            "llama",  # F068: 128 inputs are two blocks of 64, and o_proj's 64 one
            {"parallel.tensor": 2, "quantization.format": "bnb-nf4"},
            "parallel.tensor: 2 doesn't divide 1 blocks of 64 inputs (bnb-nf4); sizes that work here: 1",
        ),
        (
            "llama",
            {"parallel.tensor": 2, "parallel.expert": True},
            "parallel.expert: True: this model has no experts",
        ),
        ("jamba-dense", {"parallel.expert": True}, "parallel.expert: True: this model has no experts"),
        (
            "llama",
            {"parallel.pipeline": 5},
            "parallel.pipeline: 5 stages can't share 4 layers: sizes that work here: 1 to 4",
        ),
        (
            "llama",
            {"parallel.pipeline": 2, "quantization.format": "int8", "quantization.targets": ["q_prog"]},
            "quantization.targets: 'q_prog' names no module of this model",
        ),
    ],
)
def test_f068_impossible_sizes_are_refused(
    model: Callable[[str], Path], name: str, options: dict[str, Any], rule: str
) -> None:
    settings = {"memory_bytes": "4MiB", "max_model_len": 64, **options}
    with pytest.raises(ValueError, match=re.escape(rule)):
        make_plan(load_config(str(model(name)), None, settings), model(name))


def test_kv_heads_that_are_neither_divided_nor_shared(tmp_path: Path) -> None:
    save_model("llama", tmp_path, 0, hidden_size=96, num_attention_heads=12, num_key_value_heads=6)
    rule = (
        "parallel.tensor: 4 neither divides 6 KV heads nor is a multiple of them; sizes that work here: 1, 2"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        plan_of(tmp_path, 4, 1)


def test_targets_on_any_stage_are_known(model: Callable[[str], Path]) -> None:
    options = {"quantization.format": "int8", "quantization.targets": ["layers.3.mlp.down_proj"]}
    plan = plan_of(model("llama"), 1, 2, **options)
    assert plan.quantization is not None
    assert plan.quantization.quantized_kinds == ("down_proj",)
    one = plan_of(model("llama"), 1, 1, **options)
    assert one.quantization is not None
    assert plan.quantization.share == one.quantization.share


def test_ranks_on_a_cpu_share_its_memory(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_plan, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(arena_plan, "total_memory", lambda: 1 << 30)
    options = {"memory_bytes": None, "max_num_seqs": 100_000}
    one, four = (plan_of(model("jamba"), 1, stages, **options) for stages in (1, 4))
    assert 0.85 * (1 << 30) < one.stages[0].arena_bytes < 0.9 * (1 << 30)
    assert 0.85 * (1 << 28) < max(stage.arena_bytes for stage in four.stages) < 0.9 * (1 << 28)
    with pytest.raises(
        ValueError,
        match=r"cache.memory_bytes: 300.0 MiB x 4 ranks, beside .* of weights, is more than the 1.0 GiB",
    ):
        plan_of(model("jamba"), 4, 1, memory_bytes="300MiB")
