"""The whole engine over ranks that it starts itself: what one process says, whatever is asked of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve import LLM, SamplingParams
from hybridserve.engine.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOLERANCE = 1e-4
MEMORY = 24 * 80 * 1024
"""Of the arena of one process: 24 slabs of 5 blocks or a slot, so few that sequences are preempted."""
ADAPTERS = ("python", "scripture", "shakespeare")
TOPOLOGIES = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "pp3": {"pipeline": 3},
    "tp2-experts": {"tensor": 2, "expert": True},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "tp4": {"tensor": 4},
}
SLOW = ("pp2", "tp2-experts", "tp2-pp2", "tp4")


@dataclass
class Engines:
    """One engine over ranks at a time, the last that was asked for; and what one process answers."""

    key: str = ""
    llm: LLM | None = None
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    known: dict[str, list[Any]] = field(default_factory=dict)

    def over(self, name: str, **options: Any) -> LLM:
        key = f"{name} {options}"
        if key != self.key:
            self.close()
            self.llm = self.stack.enter_context(start(TOPOLOGIES[name], **options))
            self.key = key
        assert self.llm is not None
        return self.llm

    def one_process(self, ask: Callable[[LLM], list[Any]], **options: Any) -> list[Any]:
        key = f"{ask} {options}"
        if key not in self.known:
            with start({}, **options) as llm:
                self.known[key] = ask(llm)
        return self.known[key]

    def close(self) -> None:
        self.key = ""
        self.stack.close()


def start(parallel: dict[str, Any], **options: Any) -> LLM:
    num_ranks = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    return LLM(
        "demo",
        parallel={**parallel, "executor": "auto"},
        dtype="float32",
        memory_bytes=MEMORY // num_ranks,
        max_model_len=256,
        max_num_batched_tokens=48,
        check_integrity=True,
        **options,
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


PROMPTS = ["Once upon a time", "The king said", "def f(x):\n", "In the beginning " * 8, "a"]


def answers(llm: LLM) -> list[Any]:
    """Greedy and sampled, forks, log-probabilities, penalties, bias, adapters: more than fit at once."""
    prompts, params, adapters = [], [], []
    for index, prompt in enumerate(PROMPTS * 3):
        shared = {"max_tokens": 24 + index, "ignore_eos": True}
        kinds = [
            SamplingParams(temperature=0, logprobs=2, **shared),
            SamplingParams(temperature=0.9, seed=index, n=3, top_p=0.9, **shared),
            SamplingParams(temperature=0.7, seed=-index, top_k=20, min_p=0.02, prompt_logprobs=1, **shared),
            SamplingParams(
                temperature=0, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={65: 2.0}, **shared
            ),
        ]
        prompts.append(prompt)
        params.append(kinds[index % 4])
        adapters.append((None, *ADAPTERS)[index % 3])
    return llm.generate(prompts, params, adapter=adapters)


def compare(mine: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        assert [c.text for c in a.outputs] == [c.text for c in b.outputs]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            compare_logprobs(x.logprobs, y.logprobs)
        compare_logprobs(a.prompt_logprobs, b.prompt_logprobs)


def compare_logprobs(mine: Any, theirs: Any) -> None:
    assert (mine is None) == (theirs is None)
    for a, b in zip(mine or (), theirs or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.keys() == b.keys()
            for token_id, scored in a.items():
                assert scored.rank == b[token_id].rank
                assert scored.logprob == pytest.approx(b[token_id].logprob, abs=TOLERANCE)


def each(names: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", each(TOPOLOGIES))
def test_the_engine_answers_as_one(engines: Engines, name: str) -> None:
    """Preemption, copies of blocks and states for n > 1, sampling, log-probabilities and adapters."""
    want, got = engines.one_process(answers), answers(engines.over(name))
    compare(got, want)
    for outputs in (want, got):  # how many depends on when adapters were loaded
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if name == "pp3":  # layers 1 and 4 are attention
        assert [bool(stage.layout.bytes_per_block) for stage in engines.over(name).plan.stages] == [
            True,
            False,
            True,
        ]
    elif name != "tp4":  # two of its ranks share a KV head, so that its slabs are others
        assert engines.over(name).plan.layout.num_slabs == 24
    assert any(len({tuple(c.token_ids) for c in o.outputs}) > 1 for o in want), "forks that differ"


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("tp2-experts", "int8"),
        pytest.param("tp2", "fp8", marks=pytest.mark.slow),
        pytest.param("tp2-pp2", "int8", marks=pytest.mark.slow),
    ],
)
def test_weights_in_a_byte(engines: Engines, name: str, quantization: str) -> None:
    """With kernels that don't round activations: how those are rounded depends on what a rank has of them."""
    options = {"quantization": {"format": quantization}, "kernels": {"gemm": "exact"}}
    compare(answers(engines.over(name, **options)), engines.one_process(answers, **options))


def in_turns(llm: LLM) -> list[list[int]]:
    """Greedy tokens with A, B, A, C, A in the only slot."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    a, b, c = ADAPTERS
    outputs = [llm.generate("The king", params, adapter=name)[0] for name in (a, b, a, c, a)]
    assert llm.stats()["num_adapter_evictions"] == 4
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", ["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_f084_adapters_take_turns_in_one_slot(engines: Engines, name: str) -> None:
    """What comes back from host memory is, on each rank, its share of what had been there."""
    want = engines.one_process(in_turns, max_loaded=1)
    assert len({tuple(tokens) for tokens in want}) == 3
    engines.close()
    assert in_turns(engines.over(name, max_loaded=1)) == want


@pytest.mark.slow
def test_f084_a_rank_that_keeps_the_first_is_seen(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[Any] = []
    plain = Worker.stage_adapter

    def stale(self: Worker, adapter: Any, pause: Any) -> Any:
        staged.append(plain(self, adapter, pause))
        return staged[0]

    engines.close()
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "stage_adapter", stale)  # of rank 0, which is in this process
        got = in_turns(engines.over("tp2", max_loaded=1))
    engines.close()
    assert len(staged) >= 3
    assert got != engines.one_process(in_turns, max_loaded=1)


@pytest.mark.parametrize("name", each(TOPOLOGIES))
def test_f006_prefixes_over_ranks(name: str, engines: Engines) -> None:
    """States are copied to and from checkpoints on every rank. K and V without a state are no hit, however
    much of them there is: that is decided where steps are planned."""
    llm = engines.over(name)
    prompt = [*range(300, 340)]
    longer = [*prompt[:34], *range(400, 410)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)

    def ask(llm: LLM) -> list[Any]:
        outputs = [llm.generate([ids], params)[0] for ids in (prompt, prompt, longer, longer)]
        prefix = llm._core.scheduler.cache.prefix
        while prefix.evict_checkpoint():
            pass
        llm._core.scheduler.cache.host.clear()
        outputs.append(llm.generate([prompt], params)[0])
        return outputs

    outputs, expected = ask(llm), engines.one_process(ask)
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 32, 32, 32, 0]
    for mine, other in zip(outputs, expected, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        compare_logprobs(mine.outputs[0].logprobs, other.outputs[0].logprobs)
