"""What is planned, and refused, where there is a GPU: with one that is made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.config.loader import load_config
from hybridserve.engine import arena_plan, gpus
from hybridserve.engine.gpus import GPU, rank_device
from hybridserve.engine.graph_plan import GraphPlan, adapter_graph_sizes, graph_lengths, graph_sizes
from hybridserve.engine.plan_codec import decode_plan, encode_plan
from hybridserve.engine.planner import OPERATORS, EnginePlan, make_plan
from hybridserve.engine.workspace import GRAPH_BYTES
from hybridserve.kernels.registry import candidates
from hybridserve.models.hub import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

H200 = GPU("NVIDIA H200", 143_771 << 20, 140_000 << 20, 2)
TORCH = dict.fromkeys(OPERATORS, "torch_native")


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[[GPU | None], None]:
    def put(gpu: GPU | None) -> None:
        monkeypatch.setattr(gpus, "find_gpu", lambda: gpu)

    return put


@pytest.fixture
def recordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that run here stand for those that need a GPU."""
    for op in OPERATORS:
        (backend,) = (each for each in candidates(op) if each.name == "torch_native")
        monkeypatch.setattr(backend, "can_be_recorded", True)


def plan(**options: Any) -> EnginePlan:
    options = {"max_model_len": 4096, "kernels": TORCH, **options}
    return make_plan(load_config("demo", None, options), resolve_model("demo"))


def test_auto_is_the_gpu_where_there_is_one(at_hand: Callable, recordable: None) -> None:
    at_hand(H200)
    made = plan()
    assert made.device == "cuda"
    assert made.hardware.name == "h200-141gb"
    assert made.hardware.is_here
    assert made.graphs.sizes == graph_sizes(256)
    assert made.graphs.lengths == (2048, 4096)
    assert "decode steps of 1 to 256 sequences, 35 sizes, of up to 4,096 tokens" in made.table()
    assert decode_plan(encode_plan(made)) == made
    assert made.to_dict()["graphs"]["sizes"] == graph_sizes(256)
    at_hand(None)
    assert plan().device == "cpu"
    assert plan().graphs.on_demand
    at_hand(H200)
    assert plan(device="cpu").device == "cpu"


def test_the_arena_is_what_weights_and_workspace_leave(at_hand: Callable) -> None:
    """Of a share of the whole device, less what is in use; and never more than it has."""
    at_hand(H200)
    made = plan(max_num_seqs=100_000)
    (stage,) = made.stages
    used = H200.total_bytes - H200.free_bytes
    share = int(0.9 * H200.total_bytes)
    assert stage.workspace.total > 1 << 30
    assert share - (32 << 20) < made.bytes_taken(stage) + used <= share
    with pytest.raises(
        ValueError, match=r"cache\.memory_bytes: 140\.0 GiB, beside .* that NVIDIA H200 has free"
    ):
        plan(memory_bytes="140GiB")
    at_hand(GPU("NVIDIA H200", H200.total_bytes, 1 << 30, 1))
    with pytest.raises(ValueError, match=r"0\.9 of the 140\.4 GiB of NVIDIA H200 is less than .* in use"):
        plan()


def test_a_gpu_that_is_not_there_is_refused(at_hand: Callable) -> None:
    at_hand(None)
    with pytest.raises(ValueError, match=r"device: cuda: torch .*say which: hardware: h100-80gb"):
        plan(device="cuda")
    with pytest.raises(ValueError, match=r"hardware: h100-80gb: torch .*`hybridserve plan` shows"):
        plan(hardware="h100-80gb")
    at_hand(H200)
    with pytest.raises(ValueError, match="hardware: h100-80gb: this machine has NVIDIA H200"):
        plan(hardware="h100-80gb")
    assert plan(hardware="h200-141gb").hardware.is_here
    with pytest.raises(ValueError, match="parallel: 4 ranks on this machine need a GPU each, and it has 2"):
        plan(parallel={"tensor": 2, "pipeline": 2})


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80gb"),
        ("NVIDIA L40S", 45, "l40s"),
        ("NVIDIA B200", 180, "auto"),
    ],
)
def test_gpus_by_their_names(at_hand: Callable, name: str, gib: int, known: str) -> None:
    at_hand(GPU(name, gib << 30, (gib - 1) << 30, 1))
    made = plan()
    assert made.hardware.name == known
    assert made.hardware.title.startswith(name)
    assert ("at the speeds of A100 80 GB" in made.hardware.title) == (known == "auto")


def test_why_nothing_is_recorded(at_hand: Callable) -> None:
    at_hand(H200)
    assert "attention torch_native, ssm torch_native" in plan().graphs.reason
    assert plan(kernels={**TORCH, "graphs": "never"}).graphs == GraphPlan((), (), "kernels.graphs is never")
    with pytest.raises(ValueError, match=r"kernels\.graphs: always: what attention torch_native"):
        plan(kernels={**TORCH, "graphs": "always"})
    at_hand(None)
    with pytest.raises(ValueError, match=r"kernels\.graphs: always: ranks on CPUs wait for each other"):
        plan(kernels={"graphs": "always"}, parallel={"tensor": 2})


def test_steps_with_adapters_are_recorded_apart(
    at_hand: Callable, recordable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the recordings but for sizes that are left out; and what they keep is set aside."""
    at_hand(H200)
    made, without = plan(), plan(lora={"adapters": {}})
    assert made.graphs.adapter_sizes == adapter_graph_sizes(256)
    assert made.graphs.num_adapter_slots == made.lora.num_slots
    assert made.graphs.num_recordings == 2 * (35 + 13)
    assert "of up to 4,096 tokens; with adapters, 13 sizes; 96 recordings" in made.table()
    assert without.graphs == GraphPlan(graph_sizes(256), (2048, 4096), "")
    assert "of up to 4,096 tokens; 70 recordings" in without.table()
    (with_them,), (without_them,) = made.stages, without.stages
    assert with_them.workspace.graphs - without_them.workspace.graphs == 13 * GRAPH_BYTES
    (backend,) = (each for each in candidates("lora") if each.name == "torch_native")
    monkeypatch.setattr(backend, "can_be_recorded", False)
    why = "what lora torch_native launches depends on more than shapes"
    assert plan().graphs == GraphPlan(graph_sizes(256), (2048, 4096), "", adapter_reason=why)
    assert f"none with adapters ({why})" in plan().table()
    with pytest.raises(ValueError, match=f"kernels.graphs: always: {why}"):
        plan(kernels={**TORCH, "graphs": "always"})


def test_stages_record_nothing(at_hand: Callable, recordable: None) -> None:
    at_hand(H200)
    assert plan(parallel={"pipeline": 2}).graphs.reason == "stages of a pipeline wait for each other"
    assert plan(parallel={"tensor": 2}).graphs.sizes


def test_ranks_with_whole_experts_record_nothing(at_hand: Callable, recordable: None) -> None:
    at_hand(H200)
    assert "experts" in plan(parallel={"tensor": 2, "expert": True}).graphs.reason


def test_what_this_process_gave_back_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second engine finds what the first one had, though torch has kept it."""
    kept = [10 << 30]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((100 << 30) - sum(kept), 100 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = gpus.find_gpu()
    assert found is not None
    assert found.free_bytes == 100 << 30


def test_pinned_memory_is_taken_in_powers_of_two(
    at_hand: Callable, recordable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_hand(H200)
    monkeypatch.setattr(arena_plan, "total_memory", lambda: 12 << 30)
    monkeypatch.setattr(arena_plan, "available_memory", lambda: 7 << 30)
    assert plan().host.num_bytes <= 2 << 30  # half of what is free would be 3.5, and 4 taken
    assert plan(host_swap_bytes="8GiB").host.num_slabs
    with pytest.raises(ValueError, match=r"9\.0 GiB, 16\.0 GiB where it is pinned.* 12\.0 GiB of memory"):
        plan(host_swap_bytes="9GiB")


def test_more_sequences_than_memory_holds(at_hand: Callable, recordable: None) -> None:
    at_hand(H200)
    made = plan(memory_bytes="4MiB", max_model_len=64)
    room = made.layout.max_sequences(1)
    assert made.graphs.sizes[-1] == room < 256
    assert f"sizes (max_num_seqs is 256, but memory holds {room})" in made.table()


def test_sizes_and_lengths() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert len(graph_sizes(256)) == len(graph_sizes(10_000)) == 35
    assert graph_lengths(100) == (100,)
    assert graph_lengths(2048) == (2048,)
    assert graph_lengths(262_144) == (2048, 16_384, 131_072, 262_144)
    assert adapter_graph_sizes(3) == (1, 2, 3)
    assert adapter_graph_sizes(40) == (1, 2, 4, 8, 16, 32, 40)
    assert adapter_graph_sizes(10_000) == (1, 2, 4, 8, 16, *range(32, 257, 32))
    made = GraphPlan(graph_sizes(256), graph_lengths(262_144), "")
    assert made.lengths_of(256) == (2048, 16_384)
    assert made.lengths_of(32) == (2048, 16_384, 131_072)
    assert made.lengths_of(16) == made.lengths


def test_a_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_device("cuda", 1) == torch.device("cuda", 1)
    assert rank_device("cpu", 5) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"rank 2 of this machine has no GPU, of which it has 2"):
        rank_device("cuda", 2)
