"""The engine as a target: the real asyncio API over a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from hybridserve.bench.engine_target import EngineTarget
from hybridserve.bench.record import measure
from hybridserve.bench.target import TargetError, TargetRequest
from tests.harness.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine


def with_target(work, **options):
    """What `work` (target, engine) returns."""

    async def live():
        engine = FakeEngine(**options)
        async with EngineTarget(engine) as target:
            return await work(target, engine)

    return asyncio.run(live())


def ask(*requests, **options):
    async def work(target, engine):
        return [await measure(target, each, due=0.0, limit=10.0) for each in requests]

    return with_target(work, **options)


def test_ids():
    (record,) = ask(TargetRequest([1, 5, 6], 4, ignore_eos=True, sampling={"temperature": 0.0}))
    assert record.error is None
    assert record.usage == (3, 4, 0)
    assert record.token_ids == [1, 5, 6, 1]
    assert sum(record.counts()) == 4
    assert record.is_exact
    assert record.finish_reason == "length"


def test_text_and_messages():
    text, messages = ask(
        TargetRequest("Once upon", 3), TargetRequest([{"role": "user", "content": "Hello"}], 3)
    )
    assert text.usage.num_output == messages.usage.num_output == 3
    assert messages.usage.num_prompt > 3
    assert text.text


def test_without_max_tokens_an_answer_may_fill_the_model():
    (record,) = ask(TargetRequest([1] * (MAX_MODEL_LEN - 30)))
    assert record.usage.num_output == 30


def test_what_it_tells_of_itself():
    async def work(target, engine):
        return (
            target.name,
            target.max_model_len,
            target.vocab_size,
            target.describe(),
            await target.adapters(),
        )

    name, length, vocab_size, told, adapters = with_target(work, adapters=["a"], served_name="mine")
    assert (name, length, vocab_size) == ("mine", MAX_MODEL_LEN, VOCAB_SIZE)
    assert told["model"] == "mine"
    assert told["plan"]["max_model_len"] == MAX_MODEL_LEN
    assert adapters == ["a"]


@pytest.mark.parametrize(
    ("request_", "detail"),
    [
        (TargetRequest([VOCAB_SIZE], 3), "prompt: "),
        (TargetRequest([1], 3, sampling={"temperature": -1}), "temperature: "),
        (TargetRequest([1] * (MAX_MODEL_LEN + 1), 1), str(MAX_MODEL_LEN)),
        (TargetRequest([1], 3, adapter="b"), "adapter: 'b' is unknown"),
    ],
)
def test_refusals(request_, detail):
    (record,) = ask(request_, adapters=["a"])
    assert record.error.kind == "refused"
    assert detail in record.error.detail

    async def work(target, engine):
        await target.rehearse(request_, needs_ids=False)

    with pytest.raises(TargetError, match=r".+"):
        with_target(work, adapters=["a"])


def test_an_engine_that_dies():
    async def work(target, engine):
        engine.hold()
        measured = asyncio.create_task(measure(target, TargetRequest([1, 2], 50), due=0.0, limit=10.0))
        await asyncio.sleep(0.1)
        engine.die("out of luck")
        return [await measured, await measure(target, TargetRequest([1, 2], 50), due=0.0, limit=10.0)]

    for record in with_target(work):
        assert (record.error.kind, record.error.detail) == ("engine", "out of luck")


def test_a_timeout_aborts_the_request():
    async def work(target, engine):
        engine.hold()
        record = await measure(target, TargetRequest([1, 2], 50), due=0.0, limit=0.1)
        engine.go_on()
        return record, engine.num_in_flight, await engine.stats()

    record, num_in_flight, stats = with_target(work)
    assert record.error.kind == "timeout"
    assert (num_in_flight, stats["num_running"]) == (0, 0)


def test_several_steps_between_two_wakings_are_one_arrival():
    """A client that was busy sees them together, and says so."""

    async def work(target, engine):
        record = None
        async with contextlib.aclosing(target.stream(TargetRequest([1, 2], 6, ignore_eos=True))) as stream:
            counts = []
            async for arrival in stream:
                counts.append(arrival.num_tokens)
                record = arrival
                await asyncio.sleep(0.2)
        return counts, record

    counts, last = with_target(work)
    assert counts == [1, 5]
    assert last.usage.num_output == 6
