"""Requests that find no room, clients that leave, deadlines, and an engine that starts, drains or dies."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.engine.messages import SequenceOutput
from hybridserve.frontend import protocol
from hybridserve.server.service import Service
from tests.harness.asgi import Client, serving
from tests.harness.fake_engine import FakeEngine

if TYPE_CHECKING:
    from tests.harness.asgi import Call

IDS = [263, 688, 83, 1282]
LONG = {"prompt": IDS, "max_tokens": 1000}
ENDLESS = {"step_seconds": 0.01}


async def until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - whatever it looks at
            await asyncio.sleep(0.005)


def has_taken(client: Client, count: int) -> bool:
    """Whether the engine has got so many requests."""
    return sum(isinstance(each, protocol.Add) for each in client.engine.fake.received) == count


def ask(client: Client, **fields: Any) -> Call:
    return client.start("POST", "/v1/completions", {**LONG, **fields})


def test_the_queue_to_the_last_place():
    async def scenario(client: Client) -> None:
        client.engine.hold()
        calls = [ask(client, max_tokens=1), ask(client, max_tokens=1, n=2)]
        await until(lambda: client.service.num_sequences == 3)
        assert (await client.get("/health/ready")).status == 200
        refused = await client.complete(prompt=IDS)
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.chat(messages=[{"role": "user", "content": "a"}])).status == 429
        assert (await client.complete(prompt=[IDS] * 4)).status == 429
        client.engine.go_on()
        assert [(await call.answer()).status for call in calls] == [200, 200]
        too_many = await client.complete(prompt=[IDS] * 4, max_tokens=1)
        assert (too_many.status, too_many.error["param"]) == (400, "prompt")
        assert (await client.complete(prompt=[IDS] * 3, max_tokens=1)).status == 200
        series = await client.series()
        assert series['hybridserve_admission_rejections_total{reason="queue_full"}'] == 3

    serving(scenario, max_num_seqs=1, server={"max_queue": 2})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["queued", "running"])
@pytest.mark.parametrize("n", [1, 3])
def test_b009_a_client_that_leaves(stream, moment, n):
    async def scenario(client: Client) -> None:
        if moment == "queued":
            client.engine.hold()
        call = ask(client, stream=stream, n=n)
        await until(lambda: has_taken(client, 1))
        if moment == "running":
            await until(lambda: client.engine.fake.stats["num_steps"] > 2)
        call.leave()
        await until(lambda: client.engine.num_in_flight == 0)
        await until(lambda: client.service.num_sequences == 0)
        assert isinstance(client.engine.fake.received[-1], protocol.Abort)
        client.engine.go_on()
        series = await client.series()
        assert series['hybridserve_request_success_total{finished_reason="abort"}'] == n

    serving(scenario, **ENDLESS)


def test_b009_a_client_that_leaves_in_its_prompt(monkeypatch):
    async def scenario(client: Client) -> None:
        entered = asyncio.Event()

        async def never(*_: Any, **__: Any) -> Any:
            entered.set()
            await asyncio.sleep(100)

        monkeypatch.setattr(client.engine, "submit", never)
        call = ask(client)
        await entered.wait()
        call.leave()
        await until(lambda: client.service.num_sequences == 0)
        async with asyncio.timeout(5):
            await call.task

    serving(scenario)


@pytest.mark.parametrize("moment", ["before it is admitted", "refused", "running"])
def test_what_the_engine_took_is_counted_though_its_client_has_left(moment, monkeypatch):
    """Else the prompts that the engine counts are more than those whose tokens and seconds are known."""

    async def scenario(client: Client) -> None:
        fake, held = client.engine.fake, []
        say = fake._say

        def hold_back(message: Any) -> None:
            (held.append if isinstance(message, protocol.Admitted) else say)(message)

        if moment != "running":
            monkeypatch.setattr(fake, "_say", hold_back)
        call = ask(client, model="nobody" if moment == "refused" else "demo")
        await until(lambda: has_taken(client, 1))
        if moment == "running":
            await until(lambda: fake.stats["num_steps"] > 2)
        call.leave()
        await until(lambda: client.service.num_sequences == 0)
        for message in held:
            say(message)
        await asyncio.sleep(0.05)
        series = await client.series()
        count = 0 if moment == "refused" else 1
        assert series["hybridserve_prompt_tokens_total"] == count * len(IDS)
        for name in (
            "request_prompt_tokens",
            "request_params_n",
            "request_generation_tokens",
            "e2e_request_latency_seconds",
        ):
            assert series[f"hybridserve_{name}_count"] == count, name
        first = series["hybridserve_time_to_first_token_seconds_count"]
        assert first == (1 if moment == "running" else 0)

    serving(scenario, **ENDLESS)


def test_b011_a_hundred_that_leave_together():
    async def scenario(client: Client) -> None:
        calls = [ask(client, stream=True) for _ in range(100)]
        await until(lambda: has_taken(client, 100), 10)
        for call in calls:
            call.leave()
        await until(lambda: client.service.num_sequences == client.engine.num_in_flight == 0, 5)
        series = await client.series()
        assert series["hybridserve_num_requests_running"] == 0
        assert series['hybridserve_request_success_total{finished_reason="abort"}'] == 100

    serving(scenario, **ENDLESS)


@pytest.mark.parametrize("seed", range(3))
def test_b009_clients_that_leave_at_any_moment(seed):
    """Between any two things that happen to a request."""
    draw = random.Random(seed)

    async def visit(client: Client) -> None:
        call = ask(
            client, stream=draw.random() < 0.5, prompt=[IDS] * draw.choice((1, 1, 2)), n=draw.choice((1, 2))
        )
        for _ in range(draw.randrange(40)):
            await asyncio.sleep(0)
        if draw.random() < 0.3:
            await asyncio.sleep(draw.random() / 50)
        call.leave()
        async with asyncio.timeout(10):
            await call.task

    async def scenario(client: Client) -> None:
        for _ in range(10):
            await asyncio.gather(*[visit(client) for _ in range(30)])
        await until(lambda: client.service.num_sequences == client.engine.num_in_flight == 0, 5)
        await until(lambda: not client.engine.fake._live, 5)

    serving(scenario, **ENDLESS)


def test_a_client_that_reads_slowly_gets_everything():
    async def scenario(client: Client) -> None:
        call = ask(client, stream=True, max_tokens=50)
        await call.until(b'"he"')
        call.may_write.clear()
        await until(lambda: client.engine.num_in_flight == 0, 5)
        call.may_write.set()
        answer = await call.answer()
        text = "".join(event["choices"][0]["text"] for event in answer.events[:-1])
        assert text == ("hello world" * 13)[: len(text)]
        assert len(text) > 100
        assert answer.num_writes < 30, "what came meanwhile is one write"

    serving(scenario, step_seconds=0.001)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_of_a_request(stream):
    async def scenario(client: Client) -> None:
        begin = time.monotonic()
        answer = await ask(client, stream=stream).answer()
        assert time.monotonic() - begin < 20
        if stream:
            assert answer.status == 200
            *pieces, last, _ = answer.events
            assert pieces
            assert last["error"]["code"] == "request_timeout"
        else:
            assert (answer.status, answer.error["code"]) == (504, "request_timeout")
            assert answer.headers["x-should-retry"] == "false"
        await until(lambda: client.engine.num_in_flight == 0)
        series = await client.series()
        assert series["hybridserve_e2e_request_latency_seconds_count"] == 1
        assert series["hybridserve_e2e_request_latency_seconds_sum"] > 0.25
        assert series["hybridserve_request_generation_tokens_count"] == 1
        assert series["hybridserve_request_generation_tokens_sum"] >= 1
        assert (await client.complete(prompt=IDS, max_tokens=2)).status == 200
        assert (await client.series())["hybridserve_e2e_request_latency_seconds_count"] == 2

    serving(scenario, server={"request_timeout": 0.3}, **ENDLESS)


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_cut_short_by_the_servers_end_is_told_so(stream, caplog):
    async def scenario(client: Client) -> None:
        call = ask(client, stream=stream)
        await until(lambda: client.engine.fake.stats["num_steps"] > 2)
        client.service.is_draining = True
        assert not await client.engine.drain(0.01)
        await client.engine.close()
        answer = await call.answer()
        error = answer.events[-2]["error"] if stream else answer.error
        assert (error["code"], error["message"]) == ("unavailable", "the server is being stopped")
        assert answer.status == (200 if stream else 503)
        late = await client.complete(prompt=IDS)
        assert (late.status, late.error["message"]) == (503, "the server is shutting down")

    with caplog.at_level("WARNING"):
        serving(scenario, **ENDLESS)
    assert not caplog.records


def test_while_the_model_is_being_loaded():
    async def run() -> None:
        engine = FakeEngine()
        client = Client(engine, Service(engine, engine.config))
        try:
            for path, status in [
                ("/health/live", 200),
                ("/health/ready", 503),
                ("/health", 503),
                ("/version", 200),
            ]:
                assert (await client.get(path)).status == status
            assert (await client.get("/health/ready")).json == {"status": "starting"}
            for path in ("/v1/models", "/tokenizer_info"):
                assert (await client.get(path)).status == 503
            answer = await client.complete(prompt=IDS)
            assert (answer.status, answer.error["code"]) == (503, "unavailable")
            assert "retry-after" in answer.headers
            assert (await client.series())["hybridserve_engine_up"] == 0
        finally:
            await engine.close()

    asyncio.run(run())


def test_b037_while_it_drains():
    async def scenario(client: Client) -> None:
        running = [ask(client, stream=stream, max_tokens=20) for stream in (False, True)]
        await until(lambda: client.engine.num_in_flight == 2)
        client.service.is_draining = True
        draining = asyncio.create_task(client.engine.drain(5))
        assert (await client.get("/health/ready")).json == {"status": "draining"}
        assert (await client.get("/health/live")).status == 200
        refused = await client.complete(prompt=IDS)
        assert (refused.status, refused.error["code"]) == (503, "unavailable")
        answers = [await call.answer() for call in running]
        assert answers[0].json["usage"]["completion_tokens"] == 20
        assert answers[1].events[-2]["choices"][0]["finish_reason"] == "length"
        assert await draining

    serving(scenario, **ENDLESS)


@pytest.mark.parametrize("moment", ["before the first token", "after it"])
def test_b033_b034_an_engine_that_dies(moment):
    async def scenario(client: Client) -> None:
        if moment == "before the first token":
            client.engine.hold()
        stream, whole = ask(client, stream=True), ask(client)
        await until(lambda: client.engine.num_in_flight == 2)
        if moment == "after it":
            await stream.until(b'"he"')
        else:
            await until(lambda: stream.sent)
        client.engine.die("RuntimeError: the-secret-word")
        *_, error, done = (await stream.answer()).events
        assert (error["error"]["code"], done) == ("engine_failed", "[DONE]")
        answer = await whole.answer()
        assert (answer.status, answer.error["code"]) == (500, "engine_failed")
        assert "secret" not in answer.body.decode() + stream.body.decode()
        assert (await client.get("/health/ready")).json == {"status": "dead"}
        assert [(await client.get(path)).status for path in ("/health", "/health/live", "/v1/models")] == [
            503
        ] * 3
        assert (await client.complete(prompt=IDS)).status == 503
        series = await client.series()
        assert series["hybridserve_engine_up"] == 0
        assert series['hybridserve_request_success_total{finished_reason="error"}'] == 2

    serving(scenario, **ENDLESS)


@pytest.mark.parametrize("stream", [False, True])
def test_b045_a_request_that_the_engine_gives_up(stream):
    """Its logits were not finite: that request fails, another one does not."""

    async def scenario(client: Client) -> None:
        call, other = ask(client, stream=stream), ask(client, max_tokens=30)
        await until(lambda: client.engine.fake.stats["num_steps"] > 2)
        (engine_id, index), (request, _) = next(iter(client.engine.fake._live.items()))
        del client.engine.fake._live[engine_id, index]
        last = client.engine.fake._last(request, index, "abort", [])
        given_up = SequenceOutput(
            request_id=engine_id,
            index=index,
            token_ids=[],
            finish_reason="abort",
            stop_reason="the model's logits were not finite",
            metrics=last.metrics,
        )
        client.engine.fake._say(protocol.Outputs([given_up]))
        answer = await call.answer()
        error = answer.events[-2]["error"] if stream else answer.error
        assert error["code"] == "engine_error"
        assert "not finite" in error["message"]
        assert (await other.answer()).json["usage"]["completion_tokens"] == 30
        assert (await client.series())["hybridserve_corrupted_requests_total"] == 1

    serving(scenario, **ENDLESS)


def test_of_several_prompts_one_that_is_refused_refuses_all():
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt=[IDS, IDS], model="nobody", max_tokens=500)
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")

        real = client.engine.submit
        count = 0

        async def submit(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == 2:
                raise ValueError("prompt: does not please")
            return await real(*args, **options)

        client.engine.submit = submit  # type: ignore[method-assign]
        answer = await client.complete(prompt=[IDS, IDS, IDS], max_tokens=500)
        assert (answer.status, answer.error["param"]) == (400, "prompt")

    serving(scenario, **ENDLESS)
