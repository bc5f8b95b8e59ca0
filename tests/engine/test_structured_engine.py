"""Structured outputs and allowed tokens through the engine: every text is what was asked for, and the same
whatever the company, chunks, preemptions, steps planned ahead and failures."""

from __future__ import annotations

import inspect
import json
import random
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from hybridserve.core.request import SamplingParams
from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.engine import grammars as grammars_module
from hybridserve.engine import sampler, token_masks
from hybridserve.engine.messages import EngineRequest
from hybridserve.engine.token_masks import REFUSED, AllowedInput, TokenMasks
from hybridserve.text import Tokenizer
from tests.harness.engine import Guarded, make_prompts
from tests.harness.models import save_model
from tests.harness.structured import EOS, random_schema, save_byte_model

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance import LLMatcher

PROMPT = make_prompts([9], vocab_size=250)[0]
REGEX = StructuredOutputs(regex="[a-d]{3,9}(x|yz)?[0-9]{2}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    save_byte_model(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


def structured(spec: StructuredOutputs, **more: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=spec, **{"max_tokens": 60, "seed": 5} | more)


def start(model: Path, **options: Any) -> Guarded:
    return Guarded(model, **{"checksum": False, "poison": None} | options)


def test_every_finished_text_is_what_its_schema_accepts(model: Path, tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    schemas = [random_schema(rng) for _ in range(16)]
    engine = start(model)
    for place, schema in enumerate(schemas):
        engine.add(f"r{place}", PROMPT, structured(StructuredOutputs(json=schema), seed=place, n=2))
    num_complete = 0
    for (name, _), result in engine.run().items():
        text = tokenizer.decode(result.token_ids)
        if result.finish_reason == "stop":
            num_complete += 1
            jsonschema.validate(json.loads(text), schemas[int(name[1:])])
        else:
            assert result.finish_reason == "length"
    assert num_complete >= 16


@pytest.mark.parametrize("temperature", [0, 1, 50])
def test_every_text_matches_its_regex(model: Path, tokenizer: Tokenizer, temperature: float) -> None:
    engine = start(model)
    for seed in range(4):
        engine.add(f"r{seed}", PROMPT, structured(REGEX, seed=seed, temperature=temperature))
    texts = []
    for result in engine.run().values():
        assert result.finish_reason == "stop"
        texts.append(tokenizer.decode(result.token_ids))
        assert re.fullmatch(r"[a-d]{3,9}(x|yz)?[0-9]{2}", texts[-1])
    assert len(set(texts)) == (1 if temperature == 0 else 4)


def test_a_choice_is_exact_and_ends_with_its_last_token(model: Path, tokenizer: Tokenizer) -> None:
    choices = ("ab", "abc", "b\n/\\[é", "😀")
    engine = start(model)
    for seed in range(24):
        params = structured(StructuredOutputs(choice=choices), seed=seed, temperature=100)
        engine.add(f"r{seed}", PROMPT, params)
    results = engine.run().values()
    assert {tokenizer.decode(result.token_ids) for result in results} == set(choices)
    for result in results:
        assert result.finish_reason == "stop"
        # only where more could follow is the end a token
        assert (result.token_ids[-1] == EOS) == (tokenizer.decode(result.token_ids) == "ab")


def test_it_never_ends_before_the_grammar_allows_it(model: Path) -> None:
    engine = start(model)
    bias = {EOS: 100.0}  # as if the model wanted nothing else
    engine.add("r", PROMPT, structured(StructuredOutputs(regex="[a-z]{5,}"), logit_bias=bias))
    result = engine.run()["r", 0]
    assert len(result.token_ids) in (5, 6)  # one may be a pair
    assert result.token_ids[-1] == EOS


@pytest.mark.parametrize(
    "change", [{"min_tokens": 12}, {"ignore_eos": True}, {"min_tokens": 12, "stop_token_ids": (70,)}]
)
def test_an_end_is_put_off_while_something_else_may_follow(
    model: Path, tokenizer: Tokenizer, change: dict[str, Any]
) -> None:
    engine = start(model)
    bias = {EOS: 100.0}
    spec = StructuredOutputs(regex="[a-d]{2,20}")
    engine.add("long", PROMPT, structured(spec, logit_bias=bias, **change))
    engine.add("short", PROMPT, structured(StructuredOutputs(choice=("ab",)), logit_bias=bias, **change))
    results = engine.run()
    assert len(tokenizer.decode(results["long", 0].token_ids)) >= 11
    assert tokenizer.decode(results["short", 0].token_ids) == "ab"
    assert results["short", 0].finish_reason == "stop"


COMPANY = {
    "alone": {},
    "with others": {"others": 5},
    "in chunks": {"chunk": 3, "others": 2},
    "preempted": {"preempt_every": 3, "others": 2},
    "planned ahead": {"delay": 1, "others": 2},
    "all of it": {"delay": 1, "others": 4, "chunk": 5, "preempt_every": 4, "row_order": "shuffled"},
    "padded": {"buckets": [4, 16, 64], "row_order": "reverse", "others": 1},
}


def watched(model: Path, others: int = 0, n: int = 3, **options: Any) -> list[tuple[list[int], str | None]]:
    engine = start(model, **options)
    engine.add("r", PROMPT, structured(REGEX, n=n, presence_penalty=0.5, top_k=20, top_p=0.9, logprobs=1))
    engine.add("list", PROMPT, SamplingParams(allowed_token_ids=(40, 50, 60), seed=1, max_tokens=12))
    for place, prompt in enumerate(make_prompts([5] * others, seed=8, vocab_size=250)):
        spec = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}})
        engine.add(f"other{place}", prompt, structured(spec) if place % 2 else SamplingParams(max_tokens=20))
    results = engine.run()
    assert not options.get("preempt_every") or engine.core.scheduler.counters.num_preemptions > 0
    wanted = [results["r", index] for index in range(n)] + [results["list", 0]]
    return [(result.token_ids, result.finish_reason) for result in wanted]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[tuple[list[int], str | None]]:
    return watched(model)


@pytest.mark.parametrize("name", list(COMPANY)[1:])
def test_the_same_tokens_in_any_company(model: Path, alone: list[Any], name: str) -> None:
    assert watched(model, **COMPANY[name]) == alone
    assert len({tuple(token_ids) for token_ids, _ in alone[:3]}) == 3


def test_the_same_tokens_after_a_step_that_failed(model: Path, alone: list[Any]) -> None:
    engine = start(model)
    params = structured(REGEX, n=3, presence_penalty=0.5, top_k=20, top_p=0.9, logprobs=1)
    engine.add("r", PROMPT, params)
    num_executed = 0

    def fail_twice(step: object) -> None:
        nonlocal num_executed
        num_executed += 1
        if num_executed in (1, 4):
            raise RuntimeError("out of order")

    engine.executor.on_execute = fail_twice
    num_failed = 0
    while engine.core.has_work:
        try:
            engine.step()
        except RuntimeError:
            num_failed += 1
    assert num_failed == 2
    found = [(engine.results["r", index].token_ids, "stop") for index in range(3)]
    assert found == [(token_ids, "stop") for token_ids, _ in alone[:3]]


def test_a_token_that_never_counted_is_taken_back(model: Path, tokenizer: Tokenizer) -> None:
    """As where a step's result was followed and then, before the scheduler had it, everything failed."""
    expected = watched(model, n=1)[0][0]
    engine = start(model)
    engine.add("r", PROMPT, structured(REGEX, presence_penalty=0.5, top_k=20, top_p=0.9, logprobs=1))
    plain = engine.core.scheduler.update
    calls = 0

    def update(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of order")
        return plain(*args)

    engine.core.scheduler.update = update  # type: ignore[method-assign]
    while engine.core.has_work:
        try:
            engine.step()
        except RuntimeError:
            assert calls == 4
    assert engine.results["r", 0].token_ids == expected


def test_allowed_tokens_are_the_only_ones(model: Path) -> None:
    engine = start(model)
    allowed = (31, 32, 63, 64, 299, EOS)
    for seed in range(8):
        params = SamplingParams(allowed_token_ids=allowed, seed=seed, max_tokens=16, logprobs=2, min_tokens=5)
        engine.add(f"r{seed}", PROMPT, params)
    engine.add("free", PROMPT, SamplingParams(seed=1, max_tokens=16, ignore_eos=True))
    results = engine.run()
    drawn = {token for (name, _), r in results.items() if name != "free" for token in r.token_ids}
    assert {31, 32, 63, 64, 299} <= drawn <= set(allowed)
    assert not set(results["free", 0].token_ids) <= set(allowed)
    for (name, _), result in results.items():
        assert len(result.token_ids) >= 6 or name == "free"
        for scored in result.logprobs:  # of the raw distribution
            assert scored.rank == 1 or scored.logprobs[0] < scored.logprobs[1]


def test_a_list_of_nothing_but_ends_is_drawn_from_all_the_same(model: Path) -> None:
    engine = start(model)
    engine.add("r", PROMPT, SamplingParams(allowed_token_ids=(EOS,), min_tokens=3, max_tokens=8))
    assert engine.run()["r", 0].token_ids == [EOS] * 4


# ---- one request's trouble is nobody else's


def test_b045_a_grammar_that_refuses_the_token_ends_its_own_request_only(
    model: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(model, delay=1)
    engine.add("r", PROMPT, structured(REGEX, n=3, presence_penalty=0.5, top_k=20, top_p=0.9, logprobs=1))
    engine.add("bad", PROMPT, structured(StructuredOutputs(regex="[a-z]{30}")))
    plain = engine.core._masks.accept

    def accept(request: Any, token: int) -> tuple[bool, str | None]:
        if request.id == "bad" and len(request.output_ids) == 3:
            token = EOS  # what it does not allow now
        return plain(request, token)

    monkeypatch.setattr(engine.core._masks, "accept", accept)
    reasons = []
    while engine.core.has_work:
        reasons += [output.stop_reason for output in engine.step() if output.request_id == "bad"]
    assert reasons[-1] == REFUSED
    assert engine.results["bad", 0].finish_reason == "abort"
    assert len(engine.results["bad", 0].token_ids) == 3
    assert [engine.results["r", index].token_ids for index in range(3)] == [ids for ids, _ in alone[:3]]
    engine.check_drained()


def test_a_mask_that_fails_ends_its_own_request_only(model: Path, alone: list[Any]) -> None:
    engine = start(model)
    engine.add("r", PROMPT, structured(REGEX, n=3, presence_penalty=0.5, top_k=20, top_p=0.9, logprobs=1))
    engine.add("bad", PROMPT, structured(StructuredOutputs(regex="[a-z]{30}")))

    class Broken:
        def compute_bitmask(self) -> bytes:
            raise MemoryError

    while "bad" not in engine.core._masks._followers:
        engine.step()
    engine.core._masks._followers["bad"].matcher = Broken()  # type: ignore[assignment]
    results = engine.run()
    assert results["bad", 0].finish_reason == "abort"
    assert [results["r", index].token_ids for index in range(3)] == [ids for ids, _ in alone[:3]]


def hold_compiling(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Compiling takes until the event is set."""
    may_go_on = threading.Event()
    plain = grammars_module.compile_matcher

    def slow(*args: Any) -> LLMatcher:
        assert may_go_on.wait(60)
        return plain(*args)

    monkeypatch.setattr(grammars_module, "compile_matcher", slow)
    return may_go_on


def test_a_request_whose_grammar_is_being_compiled_holds_up_nobody(
    model: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = hold_compiling(monkeypatch)
    engine = start(model)
    engine.add("r", PROMPT, structured(REGEX, n=3, presence_penalty=0.5, top_k=20, top_p=0.9, logprobs=1))
    engine.add("other", PROMPT, SamplingParams(max_tokens=10, ignore_eos=True))
    with pytest.raises(ValueError, match="request_id: 'r' is in use"):
        engine.core.add(EngineRequest(request_id="r", prompt_ids=PROMPT, params=SamplingParams()))
    while engine.results["other", 0].finish_reason is None:
        engine.step()
    assert engine.core.step() == []
    assert engine.core.has_work
    assert engine.core.scheduler.num_running == 0
    may_go_on.set()
    results = engine.run()
    assert [results["r", index].token_ids for index in range(3)] == [ids for ids, _ in alone[:3]]


def test_waiting_for_a_grammar_changes_nobodys_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a seed, what is drawn depends on the order of arrival."""

    def drawn() -> list[list[int]]:
        engine = start(model)
        for name, spec in (("a", REGEX), ("b", None), ("c", REGEX)):
            engine.add(name, PROMPT, SamplingParams(structured_outputs=spec, max_tokens=9, ignore_eos=True))
        if may_go_on is not None:
            while engine.results["b", 0].finish_reason is None:
                engine.step()
            may_go_on.set()
        return [result.token_ids for result in engine.run().values()]

    may_go_on = None
    expected = drawn()
    may_go_on = hold_compiling(monkeypatch)
    assert drawn() == expected


def test_one_that_waits_for_its_grammar_can_be_aborted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = hold_compiling(monkeypatch)
    engine = start(model)
    engine.add("r", PROMPT, structured(REGEX))
    engine.core.abort("r")
    (output,) = engine.step()
    assert (output.finish_reason, output.token_ids, output.metrics is not None) == ("abort", [], True)
    assert not engine.core.has_work
    engine.add("r", PROMPT, structured(REGEX))  # the name is free
    may_go_on.set()
    assert engine.run()["r", 0].finish_reason == "stop"


@pytest.mark.parametrize("spec", [None, REGEX])
def test_each_continuation_of_one_that_never_began_has_an_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, spec: StructuredOutputs | None
) -> None:
    may_go_on = hold_compiling(monkeypatch)
    engine = start(model)
    engine.add("r", PROMPT, SamplingParams(structured_outputs=spec, n=3))
    engine.core.abort("r")
    outputs = engine.step()
    assert sorted((output.index, output.finish_reason) for output in outputs) == [
        (index, "abort") for index in range(3)
    ]
    assert all(output.metrics is not None for output in outputs)
    may_go_on.set()
    engine.run()
    assert engine.core.stats.num_finished_sequences == 3
    assert engine.core.stats.num_finished_requests == engine.core.stats.num_requests == 1


def test_what_nobody_tried_out_before_ends_as_an_abort_that_says_why(model: Path) -> None:
    engine = start(model)
    engine.add("bad", PROMPT, structured(StructuredOutputs(json={"uniqueItems": True})))
    engine.add("good", PROMPT, structured(REGEX))
    reasons = []
    while engine.core.has_work:
        reasons += [output.stop_reason for output in engine.step() if output.request_id == "bad"]
    assert reasons == ["structured_outputs.json: can't be enforced: uniqueItems"]
    assert engine.results["good", 0].finish_reason == "stop"


def test_nothing_is_left_of_requests_that_have_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_GRAMMARS", 3)
    engine = start(model)
    for place in range(6):
        spec = StructuredOutputs(regex=f"[a-d]{{{place + 1}}}")
        engine.add(f"r{place}", PROMPT, structured(spec, n=2))
        engine.add(f"l{place}", PROMPT, SamplingParams(allowed_token_ids=(place + 9,), max_tokens=3))
    engine.step()
    engine.step()
    engine.core.abort("r5")
    engine.run()
    masks = engine.core._masks
    assert (masks._grammars, masks._followers, masks._lists) == ({}, {}, {})
    assert len(engine.core._grammars._kept) == 3


def test_without_a_tokenizer_it_is_refused(model: Path, tmp_path: Path) -> None:
    save_model("llama", tmp_path, seed=1)
    engine = start(tmp_path)
    with pytest.raises(ValueError, match=r"^structured_outputs: "):
        engine.add("r", [5, 6], structured(REGEX))
    assert not engine.core.has_work


# ---- each of these tests sees its fault


def mask_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampler, "_keep_allowed", lambda logits, allowed: None)


def mask_of_another_row(patch: pytest.MonkeyPatch) -> None:
    plain = AllowedInput.masks.fget
    patch.setattr(AllowedInput, "masks", property(lambda self: plain(self)[::-1].copy()))  # type: ignore[misc]


def mask_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    def compute(jobs: Any, vocab_size: int) -> None:
        time.sleep(0.02)
        plain(jobs, vocab_size)

    plain = token_masks._compute
    patch.setattr(token_masks, "_compute", compute)
    patch.setattr(AllowedInput, "masks", property(lambda self: self._masks | 64))


def matcher_shared_by_continuations(patch: pytest.MonkeyPatch) -> None:
    def follow(self: TokenMasks, request: Any) -> Any:
        grammar = self._grammars[request.parent_id or request.id]
        return self._followers.setdefault(request.id, token_masks._Follower(grammar))

    patch.setattr(TokenMasks, "_follow", follow)


def matcher_never_taken_back(patch: pytest.MonkeyPatch) -> None:
    plain = TokenMasks._follow

    def follow(self: TokenMasks, request: Any) -> Any:
        return self._followers.get(request.id) or plain(self, request)

    patch.setattr(TokenMasks, "_follow", follow)


def planned_before_the_token_is_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SamplingParams, "needs_last_token", property(lambda self: False))


def end_not_put_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(token_masks, "_remove", lambda mask, token_ids: None)


def refusal_overlooked(patch: pytest.MonkeyPatch) -> None:
    plain = TokenMasks.accept
    patch.setattr(TokenMasks, "accept", lambda *args: (plain(*args)[0], None))


def completeness_overlooked(patch: pytest.MonkeyPatch) -> None:
    plain = TokenMasks.accept
    patch.setattr(TokenMasks, "accept", lambda *args: (False, plain(*args)[1]))


MUTATIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "regex, mask ignored": (mask_ignored, test_every_text_matches_its_regex, {"temperature": 1}),
    "list, mask ignored": (mask_ignored, test_allowed_tokens_are_the_only_ones, {}),
    "another row's mask": (mask_of_another_row, test_the_same_tokens_in_any_company, {"name": "with others"}),
    "mask not waited for": (mask_not_waited_for, test_every_text_matches_its_regex, {"temperature": 1}),
    "matcher shared": (
        matcher_shared_by_continuations,
        test_the_same_tokens_in_any_company,
        {"name": "in chunks"},
    ),
    "not taken back": (matcher_never_taken_back, test_a_token_that_never_counted_is_taken_back, {}),
    "token not known": (
        planned_before_the_token_is_known,
        test_the_same_tokens_in_any_company,
        {"name": "planned ahead"},
    ),
    "end not put off": (
        end_not_put_off,
        test_an_end_is_put_off_while_something_else_may_follow,
        {"change": {"ignore_eos": True}},
    ),
    "refusal overlooked": (
        refusal_overlooked,
        test_b045_a_grammar_that_refuses_the_token_ends_its_own_request_only,
        {},
    ),
    "end overlooked": (
        completeness_overlooked,
        test_a_choice_is_exact_and_ends_with_its_last_token,
        {},
    ),
}


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_a_fault_is_seen(
    name: str, model: Path, tokenizer: Tokenizer, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inject, test, case = MUTATIONS[name]
    given = {"model": model, "tokenizer": tokenizer, "alone": alone, "monkeypatch": monkeypatch}
    wanted = {key: value for key, value in given.items() if key in inspect.signature(test).parameters}
    inject(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        test(**wanted, **case)
