"""A step on a GPU never waits for it: shown by a GPU that computes nothing, and so can't be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hybridserve import LLM, SamplingParams
from hybridserve.models.hub import resolve_model
from tests.harness.fake_cuda import fake_cuda
from tests.harness.triton_interpreter import require_triton

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tests.harness.fake_cuda import FakeGPU

require_triton()

OPTIONS: dict[str, Any] = {
    "memory_bytes": "64MiB",
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    with fake_cuda(monkeypatch) as gpu:
        yield gpu


@pytest.fixture
def llm(gpu: FakeGPU) -> Iterator[LLM]:
    adapter = resolve_model("demo") / "adapters" / "scripture"
    with LLM("demo", lora={"adapters": {"scripture": str(adapter)}}, **OPTIONS) as llm:
        assert {choice.name for choice in llm.plan.backends.values()} == {"triton"}
        assert llm.plan.graphs.sizes == (1, 2, 4)
        gpu.is_strict = True
        gpu.launched.clear()
        yield llm
        gpu.is_strict = False


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1},
    "penalties": {
        "temperature": 0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "biased": {"temperature": 0, "logit_bias": {5: 2.0}, "min_tokens": 3},
    "listed": {"temperature": 0.5, "allowed_token_ids": [0, 5, 7]},
    "scored": {"temperature": 1, "logprobs": 3, "prompt_logprobs": 2},
    "forked": {"temperature": 1, "n": 2, "seed": 3},
}


@pytest.mark.parametrize("names", [None, ["scripture", None, "scripture"]], ids=["base", "adapters"])
def test_a_step_waits_for_nothing(llm: LLM, gpu: FakeGPU, names: Any) -> None:
    """Chunks of prompts, decoding beside them, recordings, every way to draw, one beside another."""
    prompts = [[5] * 40, [6], [7] * 20]
    for index, more in enumerate(SAMPLING.values()):
        others = [*SAMPLING.values()][index - 1]
        params = [SamplingParams(max_tokens=5, ignore_eos=True, **each) for each in (more, others, more)]
        outputs = llm.generate(prompts, params, adapter=names, progress=False)
        assert {each.finish_reason for output in outputs for each in output.outputs} == {"length"}, outputs
    assert {"prefill", "decode", "scan", "causal_conv1d", "rms_norm", "keep_largest"} <= {*gpu.launched}
    assert ("shrink" in gpu.launched) == (names is not None)


def test_what_waits_is_seen(llm: LLM, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = llm._core.executor.worker.runner.model.logits

    def looks(*arguments: Any) -> torch.Tensor:
        result = logits(*arguments)
        return result * result.max().item()

    monkeypatch.setattr(llm._core.executor.worker.runner.model, "logits", looks)
    with pytest.raises(Exception, match="local_scalar_dense"):
        llm.generate([[5] * 3], SamplingParams(max_tokens=1), progress=False)
