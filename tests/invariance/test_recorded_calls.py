"""Decode steps that are recorded on a CPU, as calls of C kernels and torch's operations: an engine that
replays them and one that does not have the same tokens, logits, log-probabilities and states, to the bit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.core.request import SamplingParams
from hybridserve.engine import graphs
from hybridserve.engine.call_recorder import CallRecorder
from hybridserve.engine.graphs import DecodeGraph, DecodeGraphs
from hybridserve.kernels import native
from hybridserve.kernels.attention.native import SOURCE
from tests.graph_mutations import padding_is_in_slot_1
from tests.harness.adapter_engine import AdapterEngine
from tests.harness.adapters import Kit
from tests.harness.engine import Guarded, make_prompts
from tests.harness.models import save_model
from tests.harness.required import need
from tests.invariance import recipes
from tests.invariance.graph_recipes import RANKS
from tests.invariance.test_recipes import RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness.engine import Oracle, Result

NATIVE = {
    **{f"kernels.{op}": "native" for op in ("attention", "ssm", "pointwise", "lora")},
    **{f"kernels.{op}": "native_exact" for op in ("gemm", "moe")},
}


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    reason = native.obstacle(SOURCE)
    need(reason is None, str(reason))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Of what is recorded, and replayed."""
    seen: dict[str, list[int]] = {"recorded": [], "replayed": []}
    record, replay = DecodeGraphs._record, DecodeGraph.replay

    def recorded(self: DecodeGraphs, key: Any, *more: Any) -> DecodeGraph:
        seen["recorded"].append(key.size)
        return record(self, key, *more)

    def replayed(self: DecodeGraph) -> torch.Tensor | None:
        seen["replayed"].append(self.size)
        return replay(self)

    monkeypatch.setattr(DecodeGraphs, "_record", recorded)
    monkeypatch.setattr(DecodeGraph, "replay", replayed)
    return seen


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more})


DRAWN = (
    {},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 1},
    {"logit_bias": {7: 4.0}, "prompt_logprobs": 1},
    {"temperature": 1.2, "min_p": 0.02, "seed": 9, "allowed_token_ids": list(range(40))},
)


def serve(model: Path, mode: str, **options: Any) -> dict[tuple[str, int], Result]:
    """Rows come and go, are preempted, fork, and find prefixes of each other."""
    engine = Guarded(model, **{"kernels.graphs": mode, **NATIVE, **options})
    prompts = make_prompts([3, 40, 1, 4, 24, 2, 17], seed=1)
    prompts.append(prompts[1][:32] + prompts[0])
    for index, prompt in enumerate(prompts):
        engine.add(f"r{index}", prompt, params(8 + 7 * (index % 4), **DRAWN[index % len(DRAWN)]))
        for _ in range(6 * (index % 3)):
            engine.step()
    engine.add("fork", prompts[4], params(9, n=3))
    results = engine.run()
    for turn in range(2):  # one at a time, too
        engine.add(f"alone-{turn}", prompts[1], params(12))
        results = engine.run()
    return results


def check_same(mine: dict[tuple[str, int], Result], theirs: dict[tuple[str, int], Result]) -> None:
    assert mine.keys() == theirs.keys()
    for key, result in mine.items():
        other = theirs[key]
        assert result.token_ids == other.token_ids, key
        assert [each.logprobs for each in result.logprobs] == [each.logprobs for each in other.logprobs]
        pairs = [
            *zip(result.logits, other.logits, strict=True),
            *zip(result.states, other.states, strict=True),
        ]
        assert all(torch.equal(a, b) for a, b in pairs), key


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefixes": {"prefix_caching": True, "poison": "large"},
    "preempted": {"preempt_every": 9, "delay": 1, "chunk": 7},
    "swapped": {"preempt_every": 9, "preemption": "swap", "host_swap_bytes": "1MiB"},
    "int8": {"format": "int8"},
    "states16": {"state_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def half_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half")
    save_model("jamba", path, seed=0, dtype=torch.bfloat16)
    return path


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_recorded_and_not_are_the_same(
    case: str, dtype: str, t_model: Path, half_model: Path, sizes: dict[str, list[int]]
) -> None:
    model = t_model if dtype == "float32" else half_model
    recorded = serve(model, "auto", **CASES[case])
    assert len(set(sizes["replayed"])) > 1
    assert len(sizes["replayed"]) > 20
    num_replayed = len(sizes["replayed"])
    check_same(recorded, serve(model, "never", **CASES[case]))
    assert len(sizes["replayed"]) == num_replayed


def test_other_backends_are_chosen_freely(
    half_model: Path, sizes: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Those that this machine's engine would take."""
    free = dict.fromkeys(NATIVE, "auto")
    with caplog.at_level(logging.WARNING, "hybridserve"):
        check_same(serve(half_model, "always", **free), serve(half_model, "never", **free))
    assert sizes["replayed"]
    assert not caplog.records


def test_only_what_comes_often_is_recorded(t_model: Path, sizes: dict[str, list[int]]) -> None:
    engine = Guarded(t_model, **NATIVE)
    engine.add("short", [5, 6, 7], params(1 + graphs.SEEN_BEFORE))
    engine.run()
    assert not sizes["recorded"]
    engine.add("more", [5, 6, 7], params(4))
    engine.run()
    assert sizes["recorded"] == [1]
    assert sizes["replayed"] == [1] * 3


# faults of recording, which a check sees, so that nothing is replayed


def not_noted(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The calls of one C function."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        plain = native.noting
        patch.setattr(
            native,
            "noting",
            lambda note: plain(
                lambda function, given: None if function.__name__ == name else note(function, given)
            ),
        )

    return mutate


FUNCTIONS = ("paged_attention", "causal_conv1d", "selective_scan", "gemm", "experts", "rms_norm")
FAULTS = {f"{name}_is_not_noted": not_noted(name) for name in FUNCTIONS}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_recording_is_seen(
    fault: str,
    t_model: Path,
    oracle: Oracle,
    sizes: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one warning, and the engine goes on call by call."""
    FAULTS[fault](monkeypatch)
    engine = Guarded(t_model, **NATIVE)
    for index, prompt in enumerate(make_prompts([4, 2])):
        engine.add(f"r{index}", prompt, params(12 + 10 * index))
    with caplog.at_level(logging.WARNING, "hybridserve"):
        oracle.check_all(engine.run())
    (message,) = (each.message for each in caplog.records if "decode steps" in each.message)
    assert "decode steps are not recorded any more" in message
    assert "replayed, had other" in message
    assert not sizes["replayed"]


def test_states_are_looked_at_too(t_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's own logits don't show that it leaves no state: the null slab does."""
    monkeypatch.setattr(graphs, "SEEN_BEFORE", 0)
    plain = CallRecorder.record

    def record(self: CallRecorder, call: Callable[[], None]) -> Callable[[], None]:
        replay, slab = plain(self, call), engine.executor.arena.buffer[: engine.layout.slab_bytes]

        def forgetful() -> None:
            replay()
            slab.zero_()

        return forgetful

    monkeypatch.setattr(CallRecorder, "record", record)
    engine = Guarded(t_model, **NATIVE)
    engine.add("r", [5, 6, 7], params(4))
    engine.run()
    demand = engine.executor.runner.graphs._on_demand
    assert demand.has_failed


def test_padding_in_a_live_slot_is_seen(
    t_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a recording is checked with lives in the null slot and the null block, or the harness sees it."""
    monkeypatch.setattr(graphs, "SEEN_BEFORE", 0)
    padding_is_in_slot_1(monkeypatch)
    engine = Guarded(t_model, poison="large", **NATIVE)
    for index, prompt in enumerate(make_prompts([4, 2, 3])):
        engine.add(f"r{index}", prompt, params(10))
    with pytest.raises(AssertionError):
        oracle.check_all(engine.run())


def test_threads_may_change(t_model: Path, sizes: dict[str, list[int]]) -> None:
    """Kernels are told how many there are: what was recorded for another number is recorded anew."""
    before = torch.get_num_threads()
    engine = Guarded(t_model, **NATIVE)
    try:
        for turn, num_threads in enumerate((before, before + 1, before)):
            torch.set_num_threads(num_threads)
            engine.add(f"r{turn}", [5, 6, 7], params(10))
            engine.run()
            assert sizes["recorded"] == [1] * (turn + 1)
    finally:
        torch.set_num_threads(before)
    first, *others = engine.results.values()
    for other in others:
        assert other.token_ids == first.token_ids
        assert torch.equal(torch.stack(other.logits), torch.stack(first.logits))


# adapters


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("adapters"))


NAMES = (*RANKS, "A", "dora", "E", "alora")


def serve_adapters(
    kit: Kit, mode: str, between: Callable[[AdapterEngine], None] = lambda engine: None
) -> Any:
    """Adapters of all kinds take each other's two slots between replays, and one is replaced by another."""
    for name in NAMES:
        kit.adapter(name, RANKS.get(name))
    engine = AdapterEngine(
        kit, NAMES, lora={"max_loaded": 2}, max_num_seqs=8, **{"kernels.graphs": mode, **NATIVE}
    )
    asked = [(None, 4), ("r8", 12), (None, 20), ("r64", 9), ("dora", 8), ("A", 12), ("E", 16), ("r16", 8)]
    for index, (name, num_tokens) in enumerate([*asked, ("alora", 9), *asked[::-1]]):
        prompt = make_prompts([3 + index], seed=index, vocab_size=128)[0]
        engine.ask(f"r{index}", [*prompt, 7, 8, 9] if name == "alora" else prompt, name, num_tokens)
        for _ in range(4 * (index % 2)):
            engine.step()
    engine.run()
    between(engine)
    for turn, name in enumerate(("A", "r8", "A", None, "dora", "A")):
        if turn == 4:
            engine.unload("r8")
            engine.load("r8", kit.adapter("r16"))
            engine.ask("replaced", [5, 6, 7], "r8", 9)
            engine.run()
        engine.ask(f"alone-{turn}", [5, 6, 7], name, 9)
        engine.run()
    return engine.run()


def test_l014_adapters_come_and_go(kit: Kit, sizes: dict[str, list[int]]) -> None:
    recorded = serve_adapters(kit, "auto")
    assert len(sizes["replayed"]) > 20
    check_same(recorded, serve_adapters(kit, "never"))


def stay_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeGraphs, "forget_adapters", lambda self: None)


def test_l014_sees_recordings_of_other_adapters(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = serve_adapters(kit, "never")
    stay_recorded(monkeypatch)
    with pytest.raises(AssertionError):
        check_same(serve_adapters(kit, "auto"), expected)


def fail(engine: AdapterEngine) -> None:
    """From here on nothing is recorded."""
    engine.executor.runner.graphs._on_demand.has_failed = True


def test_adapters_are_forgotten_when_nothing_is_recorded_any_more(
    kit: Kit, sizes: dict[str, list[int]]
) -> None:
    """What was recorded before holds addresses all the same."""
    recorded = serve_adapters(kit, "auto", fail)
    assert sizes["replayed"]
    check_same(recorded, serve_adapters(kit, "never"))


def test_adapters_calls_are_checked(
    kit: Kit, sizes: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A recording with adapters is checked with those of the step."""
    not_noted("lora_add")(monkeypatch)
    engine = AdapterEngine(kit, ["A"], **NATIVE)
    engine.ask("r", [5, 6, 7], "A", 10)
    engine.run()
    assert not sizes["replayed"]
    assert any("had other logits" in each.message for each in caplog.records)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [*RECIPES.values(), recipes.fork_n], ids=lambda recipe: recipe.__name__)
def test_every_recipe_over_recorded_calls(
    recipe: Callable[[Path, Oracle], None], t_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size is recorded when it first comes."""
    monkeypatch.setattr(graphs, "SEEN_BEFORE", 0)

    def made(path: Path, **options: Any) -> Guarded:
        return Guarded(path, **{**NATIVE, **options})

    monkeypatch.setattr(recipes, "Guarded", made)
    recipe(t_model, oracle)
