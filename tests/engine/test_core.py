"""The engine's loop on small models: exactness of every family, log-probabilities, errors, and what it
counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.core.request import SamplingParams
from hybridserve.engine.core import NOT_FINITE
from tests.harness.engine import Guarded, Oracle, make_prompts
from tests.harness.models import save_model

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def jamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jamba")
    save_model("jamba", path, seed=1)
    return path


@pytest.mark.parametrize("family", ["jamba", "bamba", "mamba", "llama", "mistral", "qwen2"])
def test_every_family_through_the_engine(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path, seed=2)
    engine = Guarded(tmp_path, chunk=9, preempt_every=4, delay=1)
    for index, prompt in enumerate(make_prompts([3, 20, 7, 33])):
        engine.add(f"r{index}", prompt, GREEDY)
    Oracle(tmp_path).check_all(engine.run())


def test_64_greedy_tokens(jamba: Path) -> None:
    engine = Guarded(jamba, checksum=False)
    for index, prompt in enumerate(make_prompts([5, 40])):
        engine.add(f"r{index}", prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    Oracle(jamba).check_all(engine.run())


def test_logprobs_and_prompt_logprobs(jamba: Path) -> None:
    """In chunks, with a preemption in between: each position once, and equal to the oracle's."""
    engine = Guarded(jamba, chunk=4)
    prompt = make_prompts([11])[0]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    engine.add("r", prompt, params)
    engine.add("other", make_prompts([6], seed=3)[0], GREEDY)
    engine.step()
    engine.step()
    engine.core.scheduler.preempt(engine.core.scheduler.requests["r"])
    result = engine.run()["r", 0]
    logits, _ = Oracle(jamba).forward([*prompt, *result.token_ids])
    expected = torch.log_softmax(logits, -1)
    assert len(result.prompt_logprobs) == len(prompt) - 1
    assert len(result.logprobs) == 5
    tokens = [*prompt[1:], *result.token_ids]
    for position, scored in enumerate([*result.prompt_logprobs, *result.logprobs]):
        row = expected[position]
        top = row.topk(2 if position < len(prompt) - 1 else 3)
        assert scored.token_ids == [tokens[position], *top.indices.tolist()]
        assert scored.logprobs == pytest.approx(
            [row[tokens[position]].item(), *top.values.tolist()], abs=1e-4
        )
        assert scored.rank == int((row > row[tokens[position]]).sum()) + 1


def test_prompt_logprobs_alone(jamba: Path) -> None:
    engine = Guarded(jamba)
    engine.add("r", make_prompts([7])[0], SamplingParams(max_tokens=0, prompt_logprobs=0))
    result = engine.run()["r", 0]
    assert result.token_ids == []
    assert result.finish_reason == "length"
    assert len(result.prompt_logprobs) == 6


@pytest.mark.parametrize("delay", [0, 1])
def test_logits_that_are_not_finite_end_their_request_only(jamba: Path, delay: int) -> None:
    engine = Guarded(jamba, delay=delay)
    engine.add("bad", make_prompts([5])[0], GREEDY)
    engine.add("good", make_prompts([6], seed=3)[0], GREEDY)
    engine.step()
    engine.step()
    slot = engine.core.scheduler.requests["bad"].state_slot
    for view in engine.executor.arena.views:
        if isinstance(view, tuple):
            view[1][slot] = torch.nan
    outputs = []
    while engine.core.has_work:
        outputs += engine.step()
    engine.check_drained()
    last = [output for output in outputs if output.request_id == "bad"][-1]
    assert (last.finish_reason, last.stop_reason) == ("abort", NOT_FINITE)
    assert engine.core.gauges()["num_not_finite"] == 1
    Oracle(jamba).check(engine.results["good", 0])


@pytest.mark.parametrize("delay", [0, 1])
def test_seeded_draws_do_not_depend_on_company(jamba: Path, delay: int) -> None:
    params = SamplingParams(seed=7, n=2, max_tokens=12, ignore_eos=True, top_p=0.9, frequency_penalty=0.5)
    prompt = make_prompts([9])[0]
    alone = Guarded(jamba)
    alone.add("r", prompt, params)
    expected = {key: result.token_ids for key, result in alone.run().items()}
    assert expected["r", 0] != expected["r", 1]
    busy = Guarded(jamba, chunk=7, delay=delay, preempt_every=3, row_order="shuffled")
    for index, other in enumerate(make_prompts([4, 12, 3], seed=5)):
        busy.add(f"o{index}", other, SamplingParams(max_tokens=9, ignore_eos=True, top_k=5))
    busy.step()
    busy.add("r", prompt, params)
    results = busy.run()
    assert {key: results[key].token_ids for key in expected} == expected


def test_eos_stop_tokens_and_min_tokens(jamba: Path) -> None:
    prompt = make_prompts([6])[0]
    drawn = Oracle(jamba).greedy(prompt, 6)
    stop = drawn[2]
    first = drawn.index(stop) + 1
    cases = {
        "stop": ({"stop_token_ids": (stop,)}, drawn[:first], "stop"),
        "none": ({}, drawn, "length"),
    }
    engine = Guarded(jamba)
    for name, (more, _, _) in cases.items():
        engine.add(name, prompt, SamplingParams(temperature=0, max_tokens=6, **more))
    engine.add(
        "min", prompt, SamplingParams(temperature=0, max_tokens=6, min_tokens=5, stop_token_ids=(stop,))
    )
    results = engine.run()
    for name, (_, token_ids, reason) in cases.items():
        assert results[name, 0].token_ids == token_ids
        assert results[name, 0].finish_reason == reason
    assert len(results["min", 0].token_ids) >= 5
    assert stop not in results["min", 0].token_ids[:5]


def test_max_model_len_ends_a_sequence(jamba: Path) -> None:
    engine = Guarded(jamba, max_model_len=12)
    engine.add("r", make_prompts([9])[0], SamplingParams(max_tokens=50, ignore_eos=True))
    result = engine.run()["r", 0]
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "params", "more", "field"),
    [
        ([], {}, {}, "prompt"),
        ([3, -1], {}, {}, "prompt"),
        ([3, 512], {}, {}, "prompt"),
        ([3] * 300, {}, {}, "prompt"),
        ([3] * 256, {}, {}, "prompt"),
        ([3], {"stop_token_ids": (512,)}, {}, "stop_token_ids"),
        ([3], {"logit_bias": {600: 1.0}}, {}, "logit_bias"),
        ([3], {}, {"adapter": "x"}, "adapter"),
        ([3], {}, {"priority": 1}, "priority"),
    ],
)
def test_bad_requests_name_their_field(
    jamba: Path, prompt: list[int], params: dict, more: dict, field: str
) -> None:
    engine = Guarded(jamba)
    engine.add("good", make_prompts([5])[0], GREEDY)
    with pytest.raises(ValueError, match=rf"^{field}: "):
        engine.add("bad", prompt, SamplingParams(**params), **more)
    assert list(engine.core.scheduler.requests) == ["good"]
    engine.run()


def test_metrics_and_counters(jamba: Path) -> None:
    engine = Guarded(jamba)
    engine.add("r", make_prompts([5])[0], SamplingParams(n=3, max_tokens=4, ignore_eos=True), arrival=0.0)
    results = engine.run()
    for result in results.values():
        metrics = result.metrics
        assert metrics.arrival == 0.0
        assert metrics.arrival < metrics.first_scheduled < metrics.first_token <= metrics.finished
    stats = engine.core.gauges()
    assert stats["num_generated_tokens"] == 12
    assert stats["num_computed_tokens"] == 5 + 3 * 3
    assert (stats["num_requests"], stats["num_finished_requests"], stats["num_finished_sequences"]) == (
        1,
        1,
        3,
    )
    assert stats["num_running"] == stats["num_waiting"] == stats["cache_num_bytes"] == 0


def test_a_request_has_finished_when_its_last_sequence_has(jamba: Path) -> None:
    engine = Guarded(jamba)
    prompt, several = make_prompts([5])[0], SamplingParams(n=3, max_tokens=4, ignore_eos=True)
    stats = engine.core.stats

    engine.add("unborn", prompt, several)
    engine.core.abort("unborn")  # its continuations have not begun; each is told that it ends
    assert (stats.num_requests, stats.num_finished_requests, stats.num_finished_sequences) == (1, 1, 3)

    engine.add("parts", prompt, several)
    engine.step()
    for index, finished in enumerate([1, 1, 2]):
        engine.core.abort("parts", index)
        assert (stats.num_finished_requests, stats.num_finished_sequences) == (finished, 4 + index)
