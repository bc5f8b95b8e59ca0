"""What is recorded on a CPU, and why not."""

from __future__ import annotations

from typing import Any

import pytest

from hybridserve.config.loader import load_config
from hybridserve.engine.graph_plan import LARGEST_SIZE, GraphPlan
from hybridserve.engine.planner import EnginePlan, make_plan
from hybridserve.kernels import native
from hybridserve.kernels.attention.native import SOURCE
from hybridserve.models.hub import resolve_model
from tests.harness.required import need


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    reason = native.obstacle(SOURCE)
    need(reason is None, str(reason))


def plan(**options: Any) -> EnginePlan:
    config = load_config("demo", None, {"device": "cpu", "memory_bytes": "32MiB", **options})
    return make_plan(config, resolve_model("demo"))


def test_one_recording_for_each_number_of_sequences() -> None:
    made = plan(max_num_seqs=64)
    assert made.graphs.on_demand
    assert made.graphs.sizes == tuple(range(1, 65)) == made.graphs.adapter_sizes
    assert made.graphs.lengths == (made.max_model_len,)
    assert "decode steps of up to 64 sequences, once they come often" in made.table()
    assert plan(max_num_seqs=3).graphs.sizes == (1, 2, 3)
    assert plan(max_num_seqs=300, memory_bytes="256MiB").graphs.sizes[-1] == LARGEST_SIZE
    assert not plan(max_num_seqs=3, lora={"max_loaded": 1}).graphs.adapter_reason


def test_what_memory_holds_is_said() -> None:
    made = plan(memory_bytes="2304KiB", max_num_seqs=64)
    room = made.layout.max_sequences(1)
    assert room < 64
    assert made.graphs.sizes[-1] == room
    assert f"max_num_seqs is 64, but memory holds {room}" in made.table()


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"parallel": {"tensor": 2}}, "ranks on CPUs wait for each other between two calls"),
    "stages": ({"parallel": {"pipeline": 2}}, "ranks on CPUs wait for each other between two calls"),
    "backend": ({"kernels": {"attention": "torch_native"}}, "what attention torch_native launches"),
    "bitsandbytes": ({"format": "bnb-nf4"}, "what bnb-nf4 computes depends on more than shapes"),
}


@pytest.mark.parametrize("case", REASONS)
def test_why_nothing_is_recorded(case: str) -> None:
    options, reason = REASONS[case]
    made = plan(**options)
    assert not made.graphs.sizes
    assert reason in made.graphs.reason
    assert f"none ({reason}" in made.table()
    kernels = {**options.get("kernels", {}), "graphs": "always"}
    with pytest.raises(ValueError, match=rf"kernels\.graphs: always: {reason}"):
        plan(**{**options, "kernels": kernels})


def test_always_and_never() -> None:
    assert plan(kernels={"graphs": "always"}).graphs == plan().graphs
    assert plan(kernels={"graphs": "never"}).graphs == GraphPlan((), (), "kernels.graphs is never")


def test_steps_with_adapters_may_be_left_out() -> None:
    made = plan(kernels={"lora": "torch_native"})
    assert made.graphs.sizes
    assert not made.graphs.adapter_sizes
    assert "none with adapters (what lora torch_native launches depends on more than shapes)" in made.table()
