"""The Python API on the bundled demo model, as a user calls it."""

from __future__ import annotations

import gc
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridserve import LLM, EngineConfig, SamplingParams
from hybridserve.models.hub import resolve_model
from hybridserve.outputs import StreamAborted

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "The people of the"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", memory_bytes="32MiB", check_integrity=True, dtype="float32")


def test_prompts_keep_their_order(llm: LLM) -> None:
    prompts = ["The king", PROMPT, llm.tokenizer.encode("In the year")]
    outputs = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert [o.prompt for o in outputs] == ["The king", PROMPT, None]
    assert outputs[2].prompt_token_ids == prompts[2]
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished
        assert completion.finish_reason == "length"
        assert (
            completion.text
            == llm.tokenizer.decode([*output.prompt_token_ids, *completion.token_ids])[
                len(llm.tokenizer.decode(output.prompt_token_ids)) :
            ]
        )


def test_one_list_of_ids_is_one_prompt(llm: LLM) -> None:
    assert len(llm.generate([1, 50, 60], GREEDY)) == 1
    assert len(llm.generate([[1, 50, 60], [1, 2]], GREEDY)) == 2
    assert llm.generate([], GREEDY) == []


def test_params_one_for_all_or_one_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 5)]
    outputs = llm.generate([PROMPT, PROMPT], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(ValueError, match=r"params: 2 given for 1 prompts"):
        llm.generate([PROMPT], params)


def test_stream_is_generate(llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    pieces = list(llm.stream(PROMPT, GREEDY))
    assert len(pieces) > 3
    assert "".join(pieces) == expected


def test_streams_side_by_side(llm: LLM) -> None:
    prompts = [PROMPT, "The king said"]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    texts = ["", ""]
    for pieces in zip(*streams, strict=False):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    texts = [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in prompts]
    # zip may have taken one piece of the first stream before it found the second at its end
    assert texts[1] == alone[1]
    assert alone[0].startswith(texts[0][:20])


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=200))
    next(stream)
    assert llm.stats()["num_running"] == 1
    stream.close()
    stats = llm.stats()
    assert stats["num_running"] == stats["cache_num_live_bytes"] == 0


@pytest.mark.parametrize("is_left", [False, True])
def test_a_stream_that_is_over_keeps_no_engine(is_left: bool) -> None:
    llm = LLM("demo", memory_bytes="8MiB")
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    if is_left:
        stream.close()
    assert (list(stream) == []) == is_left
    engine = weakref.ref(llm._core)
    del llm
    gc.collect()
    assert engine() is None
    assert list(stream) == []
    stream.close()


def test_stop_string_across_tokens(llm: LLM) -> None:
    text = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].text
    stop = text[7:12]
    params = SamplingParams(temperature=0, max_tokens=40, stop=stop)
    completion = llm.generate(PROMPT, params)[0].outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop
    assert "".join(llm.stream(PROMPT, params)) == completion.text
    assert len(completion.token_ids) < 40
    assert llm.stats()["cache_num_live_bytes"] == 0


def test_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    full = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    stop = full.text[1:4]
    params = SamplingParams(temperature=0, max_tokens=30, min_tokens=20, stop=stop)
    assert len(llm.generate(PROMPT, params)[0].outputs[0].token_ids) >= 20


def test_n_continuations(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=10, logprobs=1)
    output = llm.generate(PROMPT, params)[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({c.text for c in output.outputs}) == 4
    for completion in output.outputs:
        chosen = [next(iter(step.values())).logprob for step in completion.logprobs]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))
        assert [next(iter(step)) for step in completion.logprobs] == completion.token_ids


def test_prompt_logprobs(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert output.outputs[0].token_ids == []
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, scored in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert scored[token].rank >= 1
        assert scored[token].logprob <= 0
        assert len(scored) in (2, 3)


def test_heldout_text_is_scored_as_the_model_card_says(llm: LLM) -> None:
    """4.21 nats a token on the whole text; its first part is near that, and far from an untrained model's
    8.3."""
    text = (Path(__file__).parent.parent / "data" / "heldout.txt").read_text(encoding="utf-8")
    output = llm.generate(text[:6000], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    nats = [-scored[token].logprob for token, scored in pairs]
    assert 3.9 < sum(nats) / len(nats) < 4.6


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    one = llm.chat(messages, GREEDY)[0]
    assert one.prompt_token_ids == llm.tokenizer.chat_ids(messages)
    many = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in many] == [one.outputs[0].token_ids] * 2
    with pytest.raises(ValueError, match="messages"):
        llm.chat([])
    with pytest.raises(ValueError, match="messages"):
        llm.chat([{"role": "user"}])


def test_metrics_and_stats(llm: LLM) -> None:
    before = llm.stats()["num_generated_tokens"]
    output = llm.generate(PROMPT, GREEDY)[0]
    metrics = output.metrics
    assert metrics.arrival <= metrics.first_scheduled <= metrics.first_token <= metrics.finished
    assert metrics.num_cached_tokens == metrics.num_preemptions == 0
    assert llm.stats()["num_generated_tokens"] == before + 12
    assert llm.stats()["num_running"] == 0


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("x", {"temperature": -1}, "temperature"),
        ("x", {"temperature": math.nan}, "temperature"),
        ("x", {"n": 0}, "n"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"stop": ["a", ""]}, "stop"),
        ("x", {"top_p": 0}, "top_p"),
        ("x", {"top_k": 1.5}, "top_k"),
        ("x", {"logprobs": 21}, "logprobs"),
        ("x", {"min_tokens": 20}, "min_tokens"),
        ([], {}, "prompt"),
        ([[]], {}, "prompt"),
        ([[1, 5000]], {}, "prompt"),
        ([[1, -5]], {}, "prompt"),
        ([[1, 2.5]], {}, "prompt"),
        ([[True, 1]], {}, "prompt"),
        ([["a", "b"]], {}, "prompt"),
        (5, {}, "prompt"),
        ("word " * 5000, {}, "prompt"),
    ],
)
def test_bad_input_names_its_field_and_disturbs_nobody(
    llm: LLM, prompt: Any, params: dict[str, Any], field: str
) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream)
    if prompt == []:
        prompt = [[]]
    with pytest.raises(ValueError, match=rf"^{field}: ") as error:
        llm.generate(prompt, SamplingParams(**params))
    assert "\n" not in str(error.value)
    assert first + "".join(stream) == llm.generate(PROMPT, GREEDY)[0].outputs[0].text


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**63},
        {"max_tokens": 10**400},
        {"temperature": 10**400},
        {"presence_penalty": -(10**400)},
        {"temperature": math.inf},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {50: math.inf}},
        {"logit_bias": {50: 10**400}},
        {"logit_bias": {50: math.nan}},
        {"logit_bias": {10**30: 1}},
    ],
    ids=lambda params: next(iter(params)),
)
def test_numbers_have_bounds(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(params))}: ") as error:
        SamplingParams(**params)
    assert len(str(error.value)) < 200


def test_logit_bias_at_its_limit_decides(llm: LLM) -> None:
    for temperature in (0.0, 0.1, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=4, logit_bias={50: 100})
        assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == [50] * 4


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda llm: llm.generate("x", {"temperature": 0}), "params"),
        (lambda llm: llm.generate(["x"], [{"temperature": 0}]), "params"),
        (lambda llm: llm.generate("x", 5), "params"),
        (lambda llm: llm.generate("x", (p for p in [GREEDY])), "params"),
        (lambda llm: llm.generate("x", adapter=5), "adapter"),
        (lambda llm: llm.generate("x", priority="high"), "priority"),
        (lambda llm: llm.generate("x", priority=1), "priority"),
        (lambda llm: llm.generate(b"hello"), "prompt"),
        (lambda llm: llm.generate([b"hello"]), "prompt"),
        (lambda llm: llm.stream("x", {"temperature": 0}), "params"),
        (lambda llm: llm.chat({"role": "user", "content": "x"}), "messages"),
        (lambda llm: llm.chat(5), "messages"),
    ],
)
def test_wrong_types_name_their_field(llm: LLM, call: Any, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        call(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_fails_does_not_end_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Its own requests are gone; a stream that was in the same step goes on as if nothing had happened."""
    expected = "".join(llm.stream(PROMPT, GREEDY))
    stream = llm.stream(PROMPT, GREEDY)
    text = next(stream)
    runner = llm._core.executor.worker.runner
    plain, calls = runner.model.logits, []

    def failing(hidden: Any, lora: Any) -> Any:
        calls.append(hidden)
        if len(calls) == 3:
            raise error
        return plain(hidden, lora)

    monkeypatch.setattr(runner.model, "logits", failing, raising=False)
    with pytest.raises(error):
        llm.generate(["The king", "In the year"], SamplingParams(n=2, max_tokens=8, prompt_logprobs=0))
    assert text + "".join(stream) == expected
    assert llm.stats()["num_running"] == llm.stats()["cache_num_live_bytes"] == 0
    output = llm.generate("The king", SamplingParams(max_tokens=2, prompt_logprobs=0))[0]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    stats = llm.stats()
    # the two that were dropped have finished, too; the continuation of each began again, or never did
    assert stats["num_finished_requests"] == stats["num_requests"]


def test_logits_that_are_not_finite_end_a_stream_with_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llm._core.executor.worker.runner.model
    plain = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden, lora: plain(hidden, lora) * math.nan, raising=False)
    with pytest.raises(StreamAborted, match="not finite"):
        list(llm.stream(PROMPT, GREEDY))
    completion = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    assert completion.finish_reason == "abort"
    assert completion.stop_reason == "the model's logits were not finite"


def test_a_closed_engine_says_so() -> None:
    with LLM("demo", memory_bytes="8MiB") as llm:
        llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(PROMPT)
    with pytest.raises(RuntimeError, match="closed"):
        llm.stream(PROMPT)


def test_a_stream_that_outlives_its_engine_says_so() -> None:
    llm = LLM("demo", memory_bytes="8MiB")
    begun, fresh = llm.stream(PROMPT, SamplingParams(max_tokens=50)), llm.stream(PROMPT, GREEDY)
    next(begun)
    llm.close()
    for stream in (begun, fresh):
        with pytest.raises(RuntimeError, match=r"^this LLM has been closed$"):
            next(stream)


def test_an_engine_that_is_closed_while_it_generates_says_so() -> None:
    llm = LLM("demo", memory_bytes="8MiB")
    with pytest.raises(RuntimeError, match=r"^this LLM has been closed$"):
        llm.generate(PROMPT, GREEDY, watch=lambda index, piece: llm.close())


def test_numbers_of_numpy_are_numbers(llm: LLM) -> None:
    params = SamplingParams(
        n=np.int64(1),
        temperature=np.float32(0),
        top_p=np.float64(0.5),
        max_tokens=np.int32(4),
        seed=np.uint64(3),
        stop_token_ids=[np.int64(7)],
        logit_bias={np.int64(50): np.float32(2)},
        logprobs=np.int8(1),
    )
    plain = SamplingParams(
        temperature=0,
        top_p=0.5,
        max_tokens=4,
        seed=3,
        stop_token_ids=[7],
        logit_bias={50: 2},
        logprobs=1,
    )
    assert params == plain
    numbers = [params.n, params.max_tokens, params.seed, params.logprobs]
    assert {type(n) for n in [*numbers, *params.stop_token_ids, *params.logit_bias]} == {int}
    floats = [params.temperature, plain.temperature, params.top_p, *params.logit_bias.values()]
    assert {type(n) for n in floats} == {float}
    ids = [1, 50, 60]
    expected = llm.generate(ids, plain)[0].outputs[0].token_ids
    array = np.array(ids)
    for prompt in (array, array.astype(np.uint16), list(array), tuple(array), [array], [list(array)]):
        output = llm.generate(prompt, params)
        assert [each.outputs[0].token_ids for each in output] == [expected]
        assert {type(n) for n in output[0].prompt_token_ids} == {int}
    assert "".join(llm.stream(array, params)) == "".join(llm.stream(ids, plain))


@pytest.mark.parametrize(
    "prompt",
    [np.array([1.0, 2.0]), np.array([True, False]), np.array([[1, 2], [3, 4]]), np.array(3)],
    ids=str,
)
def test_arrays_that_are_no_prompt(llm: LLM, prompt: Any) -> None:
    for given in (prompt, [prompt]):
        with pytest.raises(ValueError, match=r"^prompt: "):
            llm.generate(given, GREEDY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", np.bool_(True)),
        ("max_tokens", np.float64(3)),
        ("temperature", np.float32("nan")),
        ("temperature", np.bool_(False)),
        ("temperature", 1j),
        ("stop_token_ids", [np.float32(3)]),
        ("logit_bias", {np.float64(3): 1.0}),
    ],
)
def test_numbers_of_the_wrong_kind(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        SamplingParams(**{name: value})


def test_priority_runs_sooner(llm: LLM) -> None:
    one = LLM("demo", memory_bytes="8MiB", max_num_seqs=1, policy="priority")
    outputs = one.generate([PROMPT] * 3, GREEDY, priority=[2, 1, 0])
    started = [output.metrics.first_scheduled for output in outputs]
    # nothing runs before all are queued, so the last comes first
    assert started == sorted(started, reverse=True)


def test_an_engine_config_says_everything() -> None:
    config = EngineConfig(model="demo", cache={"memory_bytes": 2**23})
    with LLM(config=config) as llm:
        assert llm.config is config
    with pytest.raises(ValueError, match=r"^config: "):
        LLM("demo", config=config)
    with pytest.raises(ValueError, match=r"^model: "):
        LLM(config)


def test_a_prompt_of_ids_may_end_inside_a_character(llm: LLM) -> None:
    ids = llm.tokenizer.encode("so 🙂")
    for cut in range(1, 4):
        rest = ids[-cut:]
        bias = dict.fromkeys(rest, 100.0)
        text = ""
        for place, token in enumerate(rest):
            params = SamplingParams(temperature=0, max_tokens=1, logit_bias={token: bias[token]})
            text = llm.generate([*ids[: len(ids) - cut + place]], params)[0].outputs[0].text
        assert "\ufffd" not in text
        assert text == "🙂"


def test_nothing_runs_if_one_prompt_is_bad(llm: LLM) -> None:
    before = llm.stats()["num_requests"]
    with pytest.raises(ValueError, match=r"^prompt: "):
        llm.generate([PROMPT, [1, 99999]], GREEDY)
    assert llm.stats()["num_requests"] == before


@pytest.mark.parametrize("adapter", ["milton", ["milton"], "", 3, [3], {}, ["python", "python"]])
def test_an_adapter_that_there_is_not_is_refused(llm: LLM, adapter: Any) -> None:
    with pytest.raises(ValueError, match=r"^adapter: "):
        llm.generate([PROMPT], GREEDY, adapter=adapter)
    assert llm.generate([PROMPT], GREEDY, adapter=[None])


def test_a_stream_is_checked_when_it_is_asked_for(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^n: "):
        llm.stream(PROMPT, SamplingParams(n=2))
    with pytest.raises(ValueError, match=r"^prompt: "):
        llm.stream([1, 99999])


def test_without_a_tokenizer_ids_still_work(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(resolve_model("demo") / name, tmp_path)
    with LLM(tmp_path, memory_bytes="8MiB") as llm:
        output = llm.generate([1, 50, 60], GREEDY)[0]
        assert len(output.outputs[0].token_ids) == 12
        assert output.outputs[0].text == ""
        for call, field in (
            (lambda: llm.generate("text"), "prompt"),
            (lambda: llm.generate([1, 2], SamplingParams(stop="x")), "stop"),
            (lambda: llm.chat([{"role": "user", "content": "x"}]), "messages"),
            (lambda: llm.stream("text"), "prompt"),
        ):
            with pytest.raises(ValueError, match=rf"^{field}: .*tokenizer"):
                call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "max_num_seq.*max_num_seqs"),
        ({"cache": {"blocksize": 4}}, "blocksize.*block_size"),
        ({"memory_bytes": "40KiB"}, "arena"),
        ({"memory_bytes": "300KiB"}, "max_model_len"),
        ({"max_model_len": 5000}, "max_model_len: 5000 is above the 4096"),
        ({"dtype": "int3"}, "dtype"),
        ({"kernels": {"attention": "cuda"}}, "attention"),
    ],
    ids=str,
)
def test_bad_options_are_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        LLM("demo", **options)
    assert "\n" not in str(error.value)


def test_arena_too_small_says_what_would_fit() -> None:
    with pytest.raises(ValueError, match=r"max_model_len to (\d[\d,]*) or less") as error:
        LLM("demo", memory_bytes="1MiB")
    fits = int(str(error.value).split("max_model_len to ")[1].split(" ")[0].replace(",", ""))
    LLM("demo", memory_bytes="1MiB", max_model_len=fits).close()
    with pytest.raises(ValueError, match="max_model_len"):
        LLM("demo", memory_bytes="1MiB", max_model_len=fits + 16)
    needed = str(error.value).rsplit(" give the cache ", 1)[1]
    number, unit = needed.split()
    LLM("demo", memory_bytes=f"{math.ceil(float(number) * 100 + 10) / 100}{unit}").close()


def test_two_engines_in_one_process(llm: LLM) -> None:
    other = LLM("demo", memory_bytes="16MiB", block_size=32, dtype="float32")
    mine, theirs = llm.stream(PROMPT, GREEDY), other.stream(PROMPT, GREEDY)
    assert "".join(a + b for a, b in zip(mine, theirs, strict=True)) != ""
    assert "".join(llm.stream(PROMPT, GREEDY)) == "".join(other.stream(PROMPT, GREEDY))


def test_prompts_with_a_common_beginning(llm: LLM) -> None:
    """What was computed is not computed again, the answer is the same, and a salt keeps it apart."""
    prompt = list(range(500, 550))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    before = llm.stats()
    outputs = [llm.generate(prompt, params, cache_salt=salt)[0] for salt in (None, None, "one", "one", "two")]
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 48, 0, 48, 0]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    after = llm.stats()
    assert after["prefix_num_hit_tokens"] - before["prefix_num_hit_tokens"] == 96
    assert after["num_computed_tokens"] - before["num_computed_tokens"] == 5 * 55 - 96
    kinds = ("kv_live", "kv_cached", "state_live", "checkpoints", "fragmented", "free")
    assert sum(after[f"cache_bytes_{kind}"] for kind in kinds) == after["cache_num_usable_bytes"]
    assert list(llm.stream(prompt, params, cache_salt="three"))
    for salt in (7, "x" * 1025, "\ud800"):
        with pytest.raises(ValueError, match="cache_salt: "):
            llm.generate(prompt, params, cache_salt=salt)
