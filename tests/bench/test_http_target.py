"""The HTTP target against a server that answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from hybridserve.bench.http_target import HttpTarget
from hybridserve.bench.record import measure
from hybridserve.bench.target import TargetError, TargetRequest
from tests.harness.bench_targets import DONE, Reply, completion, event, openai, stub_server, usage_event

REQUEST = TargetRequest([1, 2, 3], 5, ignore_eos=True, sampling={"temperature": 0.0})


def ask(respond, *requests, rehearse=False, needs_ids=False, key=None, model=None, limit=10.0):
    """The records of the requests, the target and the server."""

    async def work(url):
        async with HttpTarget(url, model=model, api_key=key) as target:
            if rehearse:
                await target.rehearse(requests[0], needs_ids=needs_ids)
            return [await measure(target, each, due=0.0, limit=limit) for each in requests], target

    with stub_server(respond) as server:
        records, target = asyncio.run(work(server.url))
    return records, target, server


def test_completions_of_ids():
    parts = [completion("a", 1), completion("b", 2), usage_event(3, 2), DONE]
    (record,), target, server = ask(openai(lambda *_: parts), REQUEST, key="secret")
    assert record.error is None
    assert "".join(record.text) == "ab"
    assert record.usage == (3, 2, None)
    path, headers, body = server.requests[-1]
    assert path == "/v1/completions"
    assert headers["authorization"] == "Bearer secret"
    assert body == {
        "model": "stub",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "secret" not in json.dumps(target.describe())


def test_chat():
    def piece(**delta):
        return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}], usage=None)

    parts = [
        piece(role="assistant", content=""),
        piece(content="a"),
        piece(reasoning_content="b"),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        usage_event(4, 2),
        DONE,
    ]
    messages = [{"role": "user", "content": "u"}]
    (record,), _, server = ask(openai(lambda *_: parts), TargetRequest(messages, adapter="x"))
    assert "".join(record.text) == "ab"
    assert sum(record.num_events) == 2  # the role is no token
    assert record.finish_reason == "stop"
    path, _, body = server.requests[-1]
    assert path == "/v1/chat/completions"
    assert (body["messages"], body["model"]) == (messages, "x")
    assert "max_tokens" not in body


def test_a_chunk_of_several_tokens_is_told_by_usage():
    parts = [completion("a", 1), completion("bcd", 4), completion("", 4), usage_event(3, 4), DONE]
    respond = openai(lambda *_: parts)
    (record,), target, _ = ask(lambda *given: slowly(respond(*given)), REQUEST, rehearse=True)
    assert record.counts() == [1, 3]
    assert target.counts == "told by the server"


def test_a_chunk_of_several_tokens_is_told_by_ids():
    parts = [
        completion("a", 0, usage=False, token_ids=[5]),
        completion("bc", 0, usage=False, token_ids=[6, 7]),
        usage_event(3, 3),
        DONE,
    ]
    respond = openai(lambda *_: parts)
    (record,), _, server = ask(lambda *given: slowly(respond(*given)), REQUEST, rehearse=True, needs_ids=True)
    assert record.counts() == [1, 2]
    assert record.token_ids == [5, 6, 7]
    assert server.requests[-1][2]["return_token_ids"] is True


def test_chunks_of_untold_size_share_the_usage():
    parts = [*(completion(text, 0, usage=False) for text in "abcd"), usage_event(3, 8), DONE]
    respond = openai(lambda *_: parts)
    (record,), target, _ = ask(lambda *given: slowly(respond(*given)), REQUEST, rehearse=True)
    assert record.counts() == [2, 2, 2, 2]
    assert not record.is_exact
    assert "estimated" in target.counts


def slowly(reply: Reply) -> Reply:
    """Each part a read of its own."""
    if reply.content_type == "text/event-stream":
        reply.pause = 0.02
    return reply


def test_events_of_one_read_are_one_arrival():
    parts = [completion("a", 1) + completion("b", 2) + completion("c", 3), usage_event(3, 3) + DONE]
    respond = openai(lambda *_: parts)
    (record,), _, _ = ask(lambda *given: slowly(respond(*given)), REQUEST)
    assert record.counts() == [3]
    assert record.num_events == [3]


def test_a_stream_cut_anywhere():
    stream = completion("客", 1) + completion("🧑‍🚀", 2) + usage_event(3, 2) + DONE
    parts = [stream[i : i + 7] for i in range(0, len(stream), 7)]
    (record,), _, _ = ask(openai(lambda *_: parts), REQUEST)
    assert "".join(record.text) == "客🧑‍🚀"
    assert record.error is None


@pytest.mark.parametrize(
    ("reply", "kind", "detail"),
    [
        (
            Reply([b'{"error": {"message": "the queue is full"}}'], 429, "application/json"),
            "HTTP 429",
            "the queue is full",
        ),
        (Reply([b"<html>\nbad gateway"], 502, "text/html"), "HTTP 502", "<html> bad gateway"),
        (Reply([completion("a", 1), event(error={"message": "it died"}), DONE]), "stream", "it died"),
        (Reply([completion("a", 1)]), "stream", "it ended before [DONE]"),
        (Reply([b"data: nonsense\n\n"]), "protocol", "an event of the stream can't be read"),
        (Reply([completion("a", 1, usage=False), DONE]), "protocol", "without usage"),
        (Reply([], 0), "connection", "it hung up without an answer"),
        (Reply([completion("a", 1)], is_cut=True), "connection", "it hung up within its answer"),
        (Reply([completion("a", 1)] * 2, pause=0.6), "timeout", "no whole answer in 0.3 s"),
    ],
)
def test_failures(reply, kind, detail):
    models = openai(lambda *_: [])
    (record,), _, _ = ask(lambda *given: models(*given) if given[2] is None else reply, REQUEST, limit=0.3)
    assert record.error.kind == kind
    assert detail in record.error.detail


def test_closing_a_stream_hangs_up():
    respond = openai(lambda *_: [completion("a", 1)] * 1000)

    async def work(url):
        async with HttpTarget(url) as target:
            async with contextlib.aclosing(target.stream(REQUEST)) as stream:
                async for _ in stream:
                    break
            await asyncio.sleep(0.2)

    def slow(*given):
        reply = respond(*given)
        reply.pause = 0.01
        return reply

    with stub_server(slow) as server:
        asyncio.run(work(server.url))
        assert server.num_hung_up == 1


def picky(*unknown: str):
    """Refuses bodies with these fields, as OpenAI's own servers do."""

    def respond(path, headers, body):
        if path == "/v1/models":
            return Reply([b'{"data": [{"id": "stub"}]}'], content_type="application/json")
        if body is None:
            return Reply([b"{}"], 404, "application/json")
        for name in unknown:
            if name in body or name in body["stream_options"]:
                reason = {"error": {"message": f"{name}: unknown field"}}
                return Reply([json.dumps(reason).encode()], 400, "application/json")
        return Reply([completion("a", 0, usage=False), usage_event(3, 1), DONE])

    return respond


@pytest.mark.parametrize(
    ("unknown", "left"),
    [
        ((), {"continuous_usage_stats", "ignore_eos"}),
        (("continuous_usage_stats",), {"ignore_eos"}),
        (("ignore_eos",), {"continuous_usage_stats"}),
        (("continuous_usage_stats", "ignore_eos"), set()),
    ],
)
def test_extensions_that_a_server_refuses_are_not_used(unknown, left):
    (record,), target, _ = ask(picky(*unknown), REQUEST, rehearse=True)
    assert record.error is None
    assert set(target.describe()["extensions"]) == left


def failing(respond, *, key=None, model=None, rehearse=False, needs_ids=False) -> str:
    with pytest.raises(TargetError) as error:
        ask(respond, REQUEST, key=key, model=model, rehearse=rehearse, needs_ids=needs_ids)
    return str(error.value)


def test_a_field_that_cannot_be_left_out():
    assert "HTTP 400: temperature: unknown field" in failing(picky("temperature"), rehearse=True)


def test_ids_of_answers_that_are_needed():
    assert "(return_token_ids), which a next turn" in failing(picky(), rehearse=True, needs_ids=True)


def test_a_stream_without_usage_cannot_be_measured():
    respond = openai(lambda *_: [completion("a", 1, usage=False), DONE])
    assert "reports no usage of a stream" in failing(respond, rehearse=True)


def test_a_refused_key_is_not_told():
    def respond(path, headers, body):
        return Reply([b'{"error": {"message": "no"}}'], 401, "application/json")

    reason = failing(respond, key="sesame")
    assert "401: the API key is missing or wrong; set HYBRIDSERVE_API_KEY" in reason
    assert "sesame" not in reason


def test_an_unknown_model():
    assert "serves no 'other'; there is stub, x, y" in failing(openai(lambda *_: [], x=1, y=1), model="other")


def test_a_server_without_a_list_of_models_needs_a_name():
    def respond(path, headers, body):
        if body is None:
            return Reply([b"{}"], 404, "application/json")
        return Reply([completion("a", 1), usage_event(3, 1), DONE])

    assert "lists no model; name it by --model" in failing(respond)
    (record,), target, _ = ask(respond, REQUEST, model="mine")
    assert record.error is None
    assert target.name == "mine"


def test_a_server_that_is_loading():
    def respond(path, headers, body):
        return Reply([b'{"error": {"message": "the model is being loaded"}}'], 503, "application/json")

    assert failing(respond).endswith("/v1/models: 503: the model is being loaded")


def test_nobody_listens():
    with pytest.raises(TargetError, match=r"^http://127\.0\.0\.1:1: Connection refused$"):
        asyncio.run(HttpTarget("http://127.0.0.1:1").__aenter__())


@pytest.mark.parametrize(
    "url", ["http://", "ftp://host", "http://me:pw@host", "http://host?key=1", "http://a b", "http://host:x"]
)
def test_no_url_of_a_server(url):
    with pytest.raises(TargetError):
        HttpTarget(url)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_url_with_and_without_v1(end):
    assert HttpTarget(f"http://host:1/at{end}").url == "http://host:1/at"


def test_the_first_model_that_is_no_adapter():
    def respond(path, headers, body):
        if path == "/v1/models":
            data = [{"id": "a", "parent": "base"}, {"id": "base", "parent": None, "max_model_len": 77}]
            return Reply([json.dumps({"data": data}).encode()], content_type="application/json")
        if path == "/tokenizer_info":
            return Reply([b'{"vocab_size": 99}'], content_type="application/json")
        return Reply([b"not JSON"], content_type="application/json")

    _, target, _ = ask(respond)
    assert (target.name, target.max_model_len, target.vocab_size) == ("base", 77, 99)
    assert asyncio.run(target.adapters()) == ["a"]
