"""The whole engine on the device writes what it writes on a CPU: with graphs and without, in any company,
when sequences give way to others, and when prompts have been seen before."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve import LLM, SamplingParams
from hybridserve.models.hub import resolve_model
from tests.harness.gpu import DEVICE, DRY

if TYPE_CHECKING:
    from hybridserve.outputs import RequestOutput

pytestmark = pytest.mark.gpu

PROMPTS = [[7 + (5 * i + j) % 900 for j in range(length)] for i, length in enumerate((37, 5, 1, 18, 64, 9))]

NAMES = ["scripture", None, None, "scripture", None, None]

NUM_TOKENS = 4 if DRY else 24

OPTIONS: dict[str, Any] = {
    "memory_bytes": "64MiB",
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
    "check_integrity": True,
}
"""Prompts are cut into chunks, others decode beside them."""


def engine(device: str = DEVICE, **options: Any) -> LLM:
    adapter = resolve_model("demo") / "adapters" / "scripture"
    return LLM(
        "demo", device=device, lora={"adapters": {"scripture": str(adapter)}}, **{**OPTIONS, **options}
    )


def sampling(**more: Any) -> SamplingParams:
    facts = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1, "logprobs": 0, "ignore_eos": True}
    return SamplingParams(**{**facts, "max_tokens": NUM_TOKENS, **more})


def written(
    llm: LLM, prompts: list[list[int]] = PROMPTS, names: Any = NAMES, **more: Any
) -> list[RequestOutput]:
    return llm.generate(prompts, sampling(**more), adapter=names, progress=False)


def assert_same(actual: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].cumulative_logprob == pytest.approx(
            theirs.outputs[0].cumulative_logprob, abs=1e-2
        )


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_writes_what_a_cpu_writes(weights: str) -> None:
    quantization = {"format": weights}
    with engine(quantization=quantization) as llm:
        if not DRY:
            assert {choice.name for choice in llm.plan.backends.values()} == {"triton"}
        outputs = written(llm)
    with engine("cpu", quantization=quantization, kernels=exact()) as llm:
        assert_same(outputs, written(llm))


def exact() -> dict[str, str]:
    """Backends of a CPU that take activations as they are."""
    return {"gemm": "exact", "moe": "exact"}


@pytest.mark.parametrize("names", [NAMES, None], ids=["adapters", "base"])
def test_graphs_change_nothing(names: Any) -> None:
    with engine(kernels={"graphs": "never"}) as llm:
        expected = written(llm, names=names)
    with engine(kernels={"graphs": "auto" if DRY else "always"}) as llm:
        assert DRY or llm.plan.graphs.sizes
        assert_same(written(llm, names=names), expected)
        assert_same(written(llm, names=names), expected)


def test_bfloat16_and_float16_are_finite_and_repeat() -> None:
    for dtype in ("bfloat16", "float16"):
        with engine(dtype=dtype, prefix_caching=False) as llm:
            if DRY:  # on a CPU torch's float16 products have other bits in the first calls of a process
                written(llm)
            first, second = written(llm), written(llm)
        assert_same(first, second)
        assert all(output.outputs[0].finish_reason == "length" for output in first)


def test_company_changes_no_token() -> None:
    with engine(prefix_caching=False) as llm:
        together = written(llm)
        for index in (0, 4):
            alone = written(llm, PROMPTS[index : index + 1], NAMES[index])
            assert_same(alone, together[index : index + 1])


def test_sequences_that_give_way_are_copied_to_pinned_memory_and_back() -> None:
    crowd = {"prefix_caching": False, "max_num_seqs": 6, "preemption": "swap", "host_swap_bytes": "64MiB"}
    prompts, count = [[9 + i] * 15 for i in range(6)], 36
    with engine(**crowd) as llm:
        expected = written(llm, prompts, None, max_tokens=count)
        assert llm.stats()["num_swaps_out"] == 0
    with engine(**crowd, memory_bytes="720KiB") as llm:
        outputs = written(llm, prompts, None, max_tokens=count)
        stats = llm.stats()
        host = llm._core.executor.worker.host
        assert host is not None
        assert host.buffer.is_pinned() == (not DRY)
    assert stats["num_swaps_out"] > 0
    assert stats["num_swaps_in"] > 0
    assert_same(outputs, expected)


def test_prompts_that_were_seen_are_not_computed_again() -> None:
    prompt = PROMPTS[4]
    with engine(prefix_caching=False) as llm:
        expected = written(llm, [prompt, [*prompt[:50], 9, 8]], None)
    with engine() as llm:
        first = written(llm, [prompt], None)
        again = written(llm, [prompt, [*prompt[:50], 9, 8]], None)
    assert again[0].metrics is not None
    assert again[0].metrics.num_cached_tokens >= 48
    assert_same(first, expected[:1])
    assert_same(again, expected)


def test_the_weights_and_the_arena_are_given_back() -> None:
    """All but what torch keeps for itself, which a first engine has made it do."""
    allocated = []
    for _ in range(2):
        with engine() as llm:
            written(llm)
            held = 0 if DRY else torch.cuda.memory_allocated()
        del llm
        gc.collect()
        allocated.append(0 if DRY else torch.cuda.memory_allocated())
    assert DRY or held > allocated[1] + 64 * 2**20
    assert allocated[1] <= allocated[0] + 2**20
