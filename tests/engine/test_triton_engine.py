"""The whole engine with Triton's kernels for every operator, in the interpreter: what the CPU's kernels
write."""

from __future__ import annotations

from typing import Any

import pytest

from hybridserve import LLM, SamplingParams
from hybridserve.kernels.registry import candidates
from hybridserve.models.hub import resolve_model
from tests.harness.triton_interpreter import require_triton

require_triton()

OPERATORS = ("attention", "ssm", "gemm", "moe", "pointwise", "lora")
PROMPTS = ["The people of the", "It"]
NAMES = ["scripture", None]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("interpreted")]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one obstacle on a CPU is that nobody would want to wait for it."""
    for operator in OPERATORS:
        (backend,) = (backend for backend in candidates(operator) if backend.name == "triton")
        monkeypatch.setattr(backend, "why_not", classmethod(lambda cls, capabilities: None))


def written(kernels: str, **options: Any) -> tuple[list[list[int]], list[float]]:
    """Tokens and log-probabilities. A prompt is cut into chunks, another decodes beside it, one has an
    adapter."""
    params = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, seed=1, max_tokens=3, ignore_eos=True, logprobs=0
    )
    path = resolve_model("demo")
    adapters = {name: str(path / "adapters" / name) for name in NAMES if name}
    with LLM(
        "demo",
        memory_bytes="64MiB",
        max_model_len=64,
        max_num_batched_tokens=4,
        dtype="float32",
        check_integrity=True,
        kernels=dict.fromkeys(OPERATORS, kernels),
        lora={"adapters": adapters},
        **options,
    ) as llm:
        assert {choice.name for choice in llm.plan.backends.values()} == {kernels}
        outputs = [each for output in llm.generate(PROMPTS, params, adapter=NAMES) for each in output.outputs]
    return [each.token_ids for each in outputs], [each.cumulative_logprob for each in outputs]


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_equals_the_engine_on_a_cpu(weights: str) -> None:
    quantization = {"quantization": {"format": weights}}
    tokens, logprobs = written("triton", **quantization)
    expected_tokens, expected_logprobs = written("torch_native", **quantization)
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
