"""The whole engine with Triton's kernels for every operator, in the interpreter: what the CPU's kernels
write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hybridserve import LLM, SamplingParams
from hybridserve.engine import graph_plan
from hybridserve.kernels.registry import candidates
from hybridserve.models.hub import resolve_model
from tests.harness.adapter_engine import AdapterEngine, Oracles
from tests.harness.adapters import Kit
from tests.harness.engine import Guarded, Oracle, make_prompts
from tests.harness.models import save_model
from tests.harness.recorder import StandInRecorder
from tests.harness.triton_interpreter import require_triton

if TYPE_CHECKING:
    from pathlib import Path

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


def test_decode_steps_are_recorded_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `prepare` gave when a step was recorded does for every step that is replayed: a row goes, another
    grows from one recorded length to the next and over blocks, and each is the oracle's."""
    monkeypatch.setattr(graph_plan, "FIRST_LENGTH", 16)
    save_model("jamba", tmp_path, seed=0)
    recorder = StandInRecorder()
    kernels = {f"kernels.{op}": "triton" for op in OPERATORS if op != "lora"}
    engine = Guarded(tmp_path, recorder=recorder, delay=1, max_num_seqs=2, max_model_len=32, **kernels)
    for index, (length, num_tokens) in enumerate([(14, 5), (3, 3)]):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        engine.add(f"r{index}", make_prompts([length], seed=index)[0], params)
    Oracle(tmp_path).check_all(engine.run())
    assert recorder.num_recorded == 2 * len((16, 32))
    assert recorder.num_replays == 4


def test_l014_adapters_come_to_what_was_recorded(tmp_path: Path) -> None:
    """One slot, for adapters of ranks 8 and 4 that change other modules, with the base model beside them:
    what was recorded before there was any finds each in its table."""
    kit, recorder = Kit(tmp_path), StandInRecorder()
    engine = AdapterEngine(
        kit,
        ["A", "C"],
        lora={"max_loaded": 1, "max_rank": 16},
        recorder=recorder,
        delay=1,
        max_num_seqs=2,
        max_model_len=32,
        **{f"kernels.{op}": "triton" for op in OPERATORS},
    )
    for index, (name, length, num_tokens) in enumerate([("C", 4, 3), (None, 3, 2), ("A", 1, 3)]):
        engine.ask(f"r{index}", make_prompts([length], seed=index, vocab_size=128)[0], name, num_tokens)
    engine.run()
    assert recorder.num_recorded == 2 * len((1, 2))
    assert recorder.num_replays >= 4
    engine.check_all(Oracles(kit))
