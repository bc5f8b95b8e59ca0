"""The asyncio API on the bundled demo model, as a user calls it: what `LLM` gives, from another process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from hybridserve.core.slabs import SlabKind
from hybridserve.frontend.errors import EngineState, EngineUnavailable
from hybridserve.models.hub import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hybridserve.outputs import Delta, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
SCHEMA = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}})
PROMPT = "The people of the"
MESSAGES = [{"role": "user", "content": "Who are you?"}]
OPTIONS: dict[str, Any] = {
    "memory_bytes": "64MiB",
    "check_integrity": True,
    "dtype": "float32",
    "policy": "priority",
    "allow_runtime_loading": True,
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters: copies of those that come with the model."""
    root = tmp_path_factory.mktemp("adapters")
    for name in ("scripture", "python"):
        shutil.copytree(resolve_model("demo") / "adapters" / name, root / name)
    return root


@pytest.fixture(scope="module")
def llm(roots: Path) -> Iterator[LLM]:
    with LLM("demo", roots=[str(roots)], **OPTIONS) as llm:
        yield llm


class Running:
    """An engine, and the event loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, engine: AsyncLLM) -> None:
        self.run = runner.run
        self.engine = engine


@pytest.fixture(scope="module")
def running(roots: Path) -> Iterator[Running]:
    with asyncio.Runner() as runner:
        engine = AsyncLLM("demo", roots=[str(roots)], **OPTIONS)
        runner.run(engine.__aenter__())
        yield Running(runner, engine)
        runner.run(engine.close())


@pytest.fixture
def call(running: Running) -> Any:
    """Runs a coroutine function of the engine; afterwards nothing of its requests may be left."""

    def call(work: Any) -> Any:
        return running.run(asyncio.wait_for(work(running.engine), 100))

    yield call
    assert running.run(idle(running.engine)), "requests or memory are left"


async def idle(engine: AsyncLLM, seconds: float = 2.0) -> bool:
    """Whether the engine holds nothing for any request, at the latest after so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stats = await engine.stats()
        left = ("num_running", "num_waiting", "cache_num_live_bytes")
        if engine.num_in_flight == 0 and not any(stats[name] for name in left):
            return True
        await asyncio.sleep(0.01)
    return False


async def last(engine: AsyncLLM, *args: Any, **options: Any) -> RequestOutput:
    *_, output = [output async for output in engine.generate(*args, **options)]
    assert output.finished
    return output


# ---- the same as LLM

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"params": GREEDY},
    "default": {"params": SamplingParams(seed=1)},
    "drawn": {"params": SamplingParams(temperature=0.9, top_k=40, top_p=0.95, max_tokens=30, seed=2**64 - 1)},
    "several": {"params": SamplingParams(n=3, seed=7, max_tokens=9, logprobs=1)},
    "logprobs": {"params": SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)},
    "no tokens": {"params": SamplingParams(max_tokens=0, prompt_logprobs=0)},
    "stop": {"params": SamplingParams(temperature=0, max_tokens=40, stop=(" States", "zzz"), logprobs=0)},
    "stop at once": {"params": SamplingParams(temperature=0, max_tokens=40, stop=(" ",), min_tokens=3)},
    "stop several": {"params": SamplingParams(n=4, seed=3, max_tokens=40, stop=("e", "t"))},
    "stop token": {"params": SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(262, 264))},
    "penalties": {"params": SamplingParams(temperature=0, frequency_penalty=1.5, repetition_penalty=1.2)},
    "bias": {"params": SamplingParams(temperature=0, logit_bias={100: 50.0})},
    "stop shown": {
        "params": SamplingParams(temperature=0, max_tokens=40, stop=" ", include_stop_str_in_output=True)
    },
    "schema": {"params": SamplingParams(structured_outputs=SCHEMA, n=2, seed=1, max_tokens=80)},
    "choice": {"params": SamplingParams(structured_outputs=StructuredOutputs(choice=("ab", "abc")), seed=1)},
    "gbnf": {"params": SamplingParams(structured_outputs=StructuredOutputs(grammar='root ::= "x"'))},
    "allowed": {"params": SamplingParams(allowed_token_ids=(70, 71, 300), seed=1)},
    "adapter": {"params": GREEDY, "adapter": "scripture"},
    "priority": {"params": GREEDY, "priority": -2},
}
PROMPTS = (PROMPT, [1, 50, 60, 70], "Ünïcödé 😀 in a prompt")


def same(output: RequestOutput, expected: RequestOutput) -> None:
    assert (output.prompt, output.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
    assert output.adapter == expected.adapter
    assert len(output.outputs) == len(expected.outputs)
    for ours, theirs in zip(output.outputs, expected.outputs, strict=True):
        assert (ours.index, ours.text, ours.token_ids) == (theirs.index, theirs.text, theirs.token_ids)
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
        same_logprobs(ours.logprobs, theirs.logprobs)
    same_logprobs(output.prompt_logprobs, expected.prompt_logprobs)
    assert output.metrics is not None
    assert output.metrics.finished >= (output.metrics.first_token or 0) >= 0


def same_logprobs(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    for our, their in zip(ours or (), theirs or (), strict=True):
        assert (our is None) == (their is None)
        for token_id, logprob in (our or {}).items():
            assert logprob.logprob == pytest.approx(their[token_id].logprob, abs=1e-4)
            assert logprob.decoded_token == their[token_id].decoded_token


def test_everything_at_once_is_what_llm_gives(llm: LLM, call: Any) -> None:
    requests = [(prompt, case) for prompt in PROMPTS for case in CASES.values()]

    async def work(engine: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine, prompt, **case) for prompt, case in requests))

    outputs = call(work)
    for output, (prompt, case) in zip(outputs, requests, strict=True):
        same(
            output,
            llm.generate(prompt, case["params"], **{k: v for k, v in case.items() if k != "params"})[0],
        )


def test_chat_is_what_llm_gives(llm: LLM, call: Any) -> None:
    async def work(engine: AsyncLLM) -> RequestOutput:
        *_, output = [output async for output in engine.chat(MESSAGES, GREEDY, adapter="python")]
        return output

    same(call(work), llm.chat(MESSAGES, GREEDY, adapter="python")[0])


def test_b030_text_helpers_are_the_tokenizers(llm: LLM, call: Any) -> None:
    assert llm.tokenizer is not None

    async def work(engine: AsyncLLM) -> tuple[Any, ...]:
        ids = await engine.encode(PROMPT)
        bare = await engine.encode(PROMPT, add_special_tokens=False)
        return ids, bare, await engine.encode_chat(MESSAGES), await engine.decode(ids)

    assert call(work) == (
        llm.tokenizer.encode(PROMPT),
        llm.tokenizer.encode(PROMPT, add_special_tokens=False),
        llm.tokenizer.chat_ids(MESSAGES),
        PROMPT,
    )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"prompt": ""}, "prompt: is empty"),
    "empty ids": ({"prompt": []}, "prompt: is empty"),
    "no prompt": ({"prompt": 5}, "prompt: must be text or a list of token ids"),
    "half": ({"prompt": "\ud800"}, "prompt: holds half of a surrogate pair"),
    "beyond": ({"prompt": [1, 4096]}, r"prompt: token id 4096 is not in the vocabulary \(0 to 4095\)"),
    "far beyond": ({"prompt": [10**30]}, "prompt: token id 1000.* is not in the vocabulary"),
    "below": ({"prompt": [-1]}, "prompt: token id -1 is not in the vocabulary"),
    "too long": ({"prompt": [1] * 4097}, r"prompt: 4097 tokens, max_model_len is 4096"),
    "far too long": ({"prompt": "x" * 200_000}, "prompt: 5405 tokens or more, max_model_len is 4096"),
    "no room": ({"prompt": [1] * 4096}, "prompt: 4096 tokens leave no room"),
    "stop id": (
        {"prompt": "x", "params": SamplingParams(stop_token_ids=(9999,))},
        "stop_token_ids: token id 9999",
    ),
    "bias": (
        {"prompt": "x", "params": SamplingParams(logit_bias={2**31 - 1: 1.0})},
        "logit_bias: token id 2147483647",
    ),
    "adapter": ({"prompt": "x", "adapter": "nobody"}, "adapter: 'nobody' is unknown"),
    "adapter's type": ({"prompt": "x", "adapter": 3}, "adapter: 3 is not a name"),
    "params": ({"prompt": "x", "params": {"n": 1}}, "params: .* is not SamplingParams"),
    "priority": ({"prompt": "x", "priority": 1.5}, "priority: 1.5 is not a whole number"),
    "large priority": ({"prompt": "x", "priority": 2**70}, "priority: is out of range"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_as_by_llm(name: str, llm: LLM, call: Any) -> None:
    fields, message = BAD[name]

    async def work(engine: AsyncLLM) -> str:
        before = (await engine.stats())["num_requests"]
        with pytest.raises(ValueError, match=f"^{message}") as caught:
            await last(engine, **fields)
        assert (await engine.stats())["num_requests"] == before
        return str(caught.value)

    text = call(work)
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        llm._request(**{"params": None, "adapter": None, "priority": 0, **fields})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "fields", [{"params": SamplingParams(stop="half \ud800")}, {"adapter": "half \ud800"}]
)
def test_b031_half_a_character_is_refused_anywhere(fields: dict[str, Any], call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        with pytest.raises(ValueError, match="surrogate"):
            await engine.submit("x", **fields)

    call(work)


# ---- as it grows


def test_the_output_grows(call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        seen: list[tuple[str, int, bool]] = []
        outputs = set()
        async for output in engine.generate(PROMPT, GREEDY, request_id="mine"):
            outputs.add(id(output))
            completion = output.outputs[0]
            seen.append((completion.text, len(completion.token_ids), output.finished))
            assert (completion.finish_reason is not None) == output.finished
        assert len(outputs) == 1
        assert output.request_id == "mine"
        assert len(seen) > 3
        for (text, count, finished), (longer, more, _) in itertools.pairwise(seen):
            assert longer.startswith(text)
            assert more >= count
            assert not finished
        assert seen[-1][1:] == (12, True)

    call(work)


def test_b024_each_continuation_ends_once(call: Any) -> None:
    params = SamplingParams(n=4, seed=5, max_tokens=25, stop=("e",), logprobs=1)

    async def work(engine: AsyncLLM) -> None:
        stream = await engine.submit(PROMPT, params)
        deltas: list[Delta] = [delta async for some in stream for delta in some]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        ends = [delta.index for delta in deltas if delta.finish_reason is not None]
        assert sorted(ends) == [0, 1, 2, 3]
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].metrics is not None
        output = stream.new_output()
        for delta in deltas:
            output.add(delta)
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        for completion in output.outputs:
            assert completion.text == "".join(d.text for d in deltas if d.index == completion.index)
            assert len(completion.token_ids) == len(completion.logprobs or ())

    call(work)


def test_a_watcher_sees_requests_and_slabs(call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        async with contextlib.aclosing(engine.generate(PROMPT, LONG)) as outputs:
            await anext(outputs)
            view = await engine.view()
            (request,) = view.requests
            assert (request.is_running, request.adapter, request.max_tokens) == (True, None, LONG.max_tokens)
            assert request.num_generated >= 1
            assert 0 < request.seconds < 100
            assert view.gauges["num_running"] == 1
            assert view.slabs[0] == SlabKind.NULL
            assert view.slabs.count(SlabKind.KV) == view.gauges["cache_num_block_slabs"] >= 1
            assert view.slabs.count(SlabKind.STATE) == view.gauges["cache_num_slot_slabs"] >= 1
            assert {adapter.name for adapter in view.adapters} >= {"shakespeare"}
        assert await idle(engine, 1.0)
        view = await engine.view()
        assert view.requests == []
        assert view.gauges["cache_num_live_bytes"] == 0

    call(work)


# ---- ends before its time


def test_b009_leaving_the_iterator_aborts(call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        params = SamplingParams(n=3, max_tokens=1500, ignore_eos=True)
        async with contextlib.aclosing(engine.generate(PROMPT, params)) as outputs:
            await anext(outputs)
            stats = await engine.stats()
            assert stats["num_running"] + stats["num_waiting"] == 3
        assert await idle(engine, 1.0)

    call(work)


@pytest.mark.parametrize("delay", [0, 0.0005, 0.002, 0.01, 0.05, 0.2])
def test_b009_cancelling_aborts_wherever_it_is(delay: float, call: Any) -> None:
    """In the tokenizer, on the way, in the queue, in the prompt, or later."""

    async def work(engine: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(engine, PROMPT * 20, LONG)) for _ in range(3)]
        await asyncio.sleep(delay)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError)
        assert await idle(engine, 1.0)

    call(work)


def test_abort_ends_the_iterator(call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        task = asyncio.create_task(last(engine, PROMPT, LONG, request_id="r1"))
        while (await engine.stats())["num_running"] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.abort("r1")
        await engine.abort("r1")
        await engine.abort("nobody")
        output = await task
        assert output.outputs[0].finish_reason == "abort"
        assert 0 < len(output.outputs[0].token_ids) < 1500

    call(work)


def test_abort_reaches_a_request_that_is_still_read(call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        task = asyncio.create_task(last(engine, PROMPT, LONG, request_id="r1"))
        await asyncio.sleep(0)
        await engine.abort("r1")
        assert (await task).outputs[0].finish_reason == "abort"

    call(work)


def test_an_id_names_one_request_at_a_time(call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        async with contextlib.aclosing(await engine.submit(PROMPT, LONG, request_id="r1")):
            with pytest.raises(ValueError, match="request_id: 'r1' is the id of a request in flight"):
                await engine.submit(PROMPT, GREEDY, request_id="r1")
            assert engine.num_in_flight == 1
        for _ in range(3):  # what is left of the one before does not disturb
            output = await last(engine, PROMPT, GREEDY, request_id="r1")
            assert len(output.outputs[0].token_ids) == 12
        with pytest.raises(ValueError, match="request_id: 3 is not text"):
            await engine.submit(PROMPT, GREEDY, request_id=3)  # type: ignore[arg-type]
        for name in ("request-0", "a#1", "", "x" * 10_000):
            assert (await last(engine, PROMPT, GREEDY, request_id=name)).request_id == name

    call(work)


def test_a_hundred_requests_at_once(llm: LLM, call: Any) -> None:
    prompts = [[1, 10 + number % 7, 20 + number] for number in range(100)]
    params = [SamplingParams(temperature=0, max_tokens=4 + number % 5) for number in range(100)]

    async def work(engine: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine, *each) for each in zip(prompts, params, strict=True)))

    expected = llm.generate(prompts, params, progress=False)
    for output, other in zip(call(work), expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("is_known", [True, False], ids=["surely too long", "to be tokenized"])
def test_b035_a_huge_prompt_does_not_stop_the_loop(
    is_known: bool, running: Running, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:
        monkeypatch.setitem(vars(running.engine.tokenizer), "max_bytes_an_id", None)
    text = "the people of the states " * (800_000 if is_known else 10_000)  # 20 MB; 250 kB take a second

    async def work(engine: AsyncLLM) -> None:
        late = []
        task = asyncio.create_task(engine.submit(text, GREEDY))
        while not task.done():
            begin = time.monotonic()
            await asyncio.sleep(0.005)
            late.append(time.monotonic() - begin - 0.005)
        with pytest.raises(ValueError, match=r"^prompt: \d+ tokens( or more)?, max_model_len is 4096$"):
            await task
        assert sorted(late)[int(len(late) * 0.99)] < 0.1
        assert is_known or len(late) > 10

    call(work)


# ---- adapters and numbers


def test_adapters_as_with_llm(llm: LLM, roots: Path, call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        before = await engine.list_adapters()
        assert [info.name for info in before] == [info.name for info in llm.list_adapters()]
        info = await engine.load_adapter("mine", roots / "scripture")
        assert (info.name, info.rank) == ("mine", 16)
        assert info.path == roots / "scripture"
        assert info.report.applied
        output = await last(engine, PROMPT, GREEDY, adapter="mine")
        same_as = llm.generate(PROMPT, GREEDY, adapter="scripture")[0]
        assert output.outputs[0].token_ids == same_as.outputs[0].token_ids
        await engine.pin_adapter("mine")
        assert [each.is_pinned for each in await engine.list_adapters() if each.name == "mine"] == [True]
        await engine.unpin_adapter("mine")
        stats = await engine.stats()
        assert stats["adapters"]["mine"]["num_generated_tokens"] == 12
        assert await engine.unload_adapter("mine")
        assert [each.name for each in await engine.list_adapters()] == [each.name for each in before]
        with pytest.raises(ValueError, match="adapter: 'mine' is unknown"):
            await engine.submit(PROMPT, GREEDY, adapter="mine")

    call(work)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("mine", "nowhere", "path: 'nowhere': there is no such directory under lora.roots"),
        ("no/name", "scripture", "adapter: 'no/name' can't be a name"),
        ("demo", "scripture", "base model"),
        ("mine", "/etc", "lora.roots"),
        ("half \ud800", "scripture", "surrogate"),
        ("mine", "half \ud800", "surrogate"),
        (3, "scripture", "is not text"),
        ("mine", b"scripture", "is not text"),
    ],
)
def test_b040_a_bad_adapter_is_refused(name: Any, path: Any, message: str, call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        with pytest.raises(ValueError, match=message):
            await engine.load_adapter(name, path)
        for method in (engine.unload_adapter, engine.pin_adapter, engine.unpin_adapter):
            with pytest.raises(ValueError, match=r"unknown|not text|surrogate"):
                await method("nobody" if isinstance(name, str) and name.isascii() else name)

    call(work)


def test_b038_b039_unloading_what_is_in_use(llm: LLM, roots: Path, call: Any) -> None:
    """The answer comes at once, what runs is not disturbed, and the adapter goes with it."""
    params = SamplingParams(n=16, seed=1, max_tokens=60, ignore_eos=True)
    expected = llm.generate(PROMPT, params, adapter="python", progress=False)[0]

    async def work(engine: AsyncLLM) -> RequestOutput:
        (tmp := roots / "other").mkdir(exist_ok=True)
        for file in (roots / "python").iterdir():
            shutil.copy(file, tmp)
        await engine.unload_adapter("python")
        await engine.load_adapter("other", tmp)
        task = asyncio.create_task(last(engine, PROMPT, params, adapter="other"))
        while (await engine.stats())["num_running"] < 16:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        begin = time.monotonic()
        assert not await engine.unload_adapter("other")
        assert time.monotonic() - begin < 10
        assert not task.done()
        assert {each.state for each in await engine.list_adapters() if each.name == "other"} == {"draining"}
        output = await task
        assert [each.name for each in await engine.list_adapters() if each.name == "other"] == []
        await engine.load_adapter("python", roots / "python")
        return output

    output = call(work)
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]


def test_calls_at_once_are_answered_each(call: Any) -> None:
    async def work(engine: AsyncLLM) -> None:
        stats, adapters, *others = await asyncio.gather(
            engine.stats(), engine.list_adapters(), *(engine.stats() for _ in range(20))
        )
        assert {"num_running", "cache_utilisation", "adapters"} <= stats.keys()
        assert {info.name for info in adapters} >= {"scripture"}
        assert all(other.keys() == stats.keys() for other in others)

    call(work)


def test_what_it_knows_of_itself(llm: LLM, running: Running) -> None:
    engine = running.engine
    assert engine.state is EngineState.READY
    assert engine.error is None
    assert engine.plan.keys() == llm.plan.to_dict().keys()
    assert engine.plan["num_slabs"] == llm.plan.to_dict()["num_slabs"]
    assert engine.plan_table == llm.plan.table()
    assert (engine.max_model_len, engine.vocab_size) == (4096, 4096)
    assert engine.tokenizer is not None
    assert [name for name, _ in engine.phases] == ["tokenizer", "import", "plan", "load"]
    assert all(0 <= seconds < 60 for _, seconds in engine.phases)
    with pytest.raises(RuntimeError, match="has been started before"):
        running.run(engine.start())


# ---- processes


def test_s001_d14_nothing_listens_and_the_client_imports_no_torch() -> None:
    """In a process of its own: other tests leave groups of ranks in this one."""
    program = """
import asyncio, sys
import psutil
from hybridserve import AsyncLLM, SamplingParams
from hybridserve.outputs import RequestOutput
async def main():
    async with AsyncLLM("demo", memory_bytes="8MiB", max_model_len=64) as engine:
        async for output in engine.generate("The", SamplingParams(max_tokens=2)):
            pass
        print(output.finished, {"torch", "transformers", "numpy", "pickle"} & sys.modules.keys() - BEFORE)
        us = psutil.Process()
        both = [us, *us.children(recursive=True)]
        print(len(both), [each.net_connections() for each in both])
import concurrent.futures, logging, multiprocessing  # of the standard library, which may pickle
BEFORE = set(sys.modules)
asyncio.run(main())
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.stdout, run.stderr) == ("True set()\n2 [[], []]\n", "")


def test_b037_draining_lets_finish_what_runs() -> None:
    async def run() -> None:
        async with AsyncLLM("demo", memory_bytes="8MiB", max_model_len=512) as engine:
            params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            tasks = [asyncio.create_task(last(engine, PROMPT, params)) for _ in range(4)]
            endless = asyncio.create_task(
                last(engine, PROMPT, SamplingParams(max_tokens=505, ignore_eos=True), request_id="endless")
            )
            await asyncio.sleep(0)  # some may still be at the tokenizer: they were there before
            draining = asyncio.create_task(engine.drain(60))
            await asyncio.sleep(0)
            assert engine.state is EngineState.DRAINING
            with pytest.raises(EngineUnavailable, match="the engine is draining"):
                await engine.submit(PROMPT)
            for output in await asyncio.gather(*tasks):
                assert len(output.outputs[0].token_ids) == 100
            assert not await engine.drain(0)
            assert await engine.stats()
            await engine.abort("endless")
            assert (await endless).outputs[0].finish_reason == "abort"
            async with asyncio.timeout(10):
                assert await draining
            assert engine.state is EngineState.DRAINING
        assert engine.state is EngineState.DEAD

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "demo", "max_model_len": 10**6}, "max_model_len: 1000000 is above"),  # known to the engine
        ({"model": "no/such/place"}, "model: 'no/such/place': no such directory"),
        ({"model": "demo", "tokenizer": "/nowhere"}, "nowhere"),
        ({"model": "demo", "adapters": {"a": "/nowhere"}}, "nowhere: no such directory"),
    ],
)
def test_what_can_not_be_served_is_a_value_error(options: dict[str, Any], message: str) -> None:
    async def run() -> None:
        engine = AsyncLLM(**options)
        with pytest.raises(ValueError, match=message):
            async with engine:
                pass
        assert engine.state is EngineState.DEAD

    asyncio.run(run())


def test_what_makes_no_sense_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="unknown key 'max_num_seq'"):
        AsyncLLM("demo", max_num_seq=8)


def test_a_model_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    for file in resolve_model("demo").iterdir():
        if file.is_file() and "token" not in file.name:
            shutil.copy(file, tmp_path)

    async def run() -> None:
        async with AsyncLLM(str(tmp_path), memory_bytes="8MiB", max_model_len=64) as engine:
            assert engine.tokenizer is None
            assert "no tokenizer.json" in engine.tokenizer_error
            output = await last(engine, [1, 5], GREEDY)
            assert output.outputs[0].text == ""
            assert len(output.outputs[0].token_ids) == 12
            for work in (engine.submit("text"), engine.encode("text"), engine.encode_chat(MESSAGES)):
                with pytest.raises(ValueError, match=r"no tokenizer\.json"):
                    await work

    asyncio.run(run())
