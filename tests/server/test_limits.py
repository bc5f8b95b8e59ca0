"""Bodies: at each limit and one past it, and JSON that is none."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import pytest

from hybridserve.server import limits
from hybridserve.server.errors import ApiError
from hybridserve.server.limits import MAX_DEPTH, MAX_FIELDS, MAX_VALUES, parse_object
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from tests.harness.asgi import Client

LIMIT = 4096


def body_of(size: int) -> bytes:
    head, tail = b'{"max_tokens": 1, "prompt": "a", "user": "', b'"}'
    return head + b"x" * (size - len(head) - len(tail)) + tail


def test_s020_bodies_at_the_limit_and_one_past_it():
    async def scenario(client: Client) -> None:
        for size, status in [(LIMIT, 200), (LIMIT + 1, 413), (LIMIT * 50, 413)]:
            body = body_of(size)
            declared = [("content-length", str(size))]
            for headers in (declared, []):
                assert (await client.post("/v1/completions", body, headers)).status == status
            pieces = [body[i : i + 100] for i in range(0, size, 100)]
            answer = await client.call("POST", "/v1/completions", chunks=pieces)
            assert answer.status == status
            if status == 413:
                assert str(LIMIT) in answer.error["message"]

    serving(scenario, server={"limits": {"body_bytes": LIMIT}})


def test_s020_a_body_that_is_declared_too_large_is_not_read():
    async def scenario(client: Client) -> None:
        call = client.start(
            "POST", "/v1/completions", chunks=[b"{", b"}"], headers=[("content-length", str(10**12))]
        )
        assert (await call.answer()).status == 413
        assert len(call._inbox) == 2
        asking = [("content-length", str(17 * 2**20)), ("expect", "100-continue")]
        call = client.start("POST", "/v1/completions", chunks=[b"{", b"}"], headers=asking)
        assert (await call.answer()).status == 413
        assert len(call._inbox) == 2

    serving(scenario)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
def test_s020_compressed_bodies_are_refused(encoding):
    async def scenario(client: Client) -> None:
        answer = await client.post("/v1/completions", b"x", [("content-encoding", encoding)])
        assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")

    serving(scenario)


def test_s020_a_body_that_does_not_come(monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.1)

    async def scenario(client: Client) -> None:
        call = client.start("POST", "/v1/completions", chunks=[b"{", b"}"])
        call._inbox.pop()
        assert (await call.answer()).status == 408

    serving(scenario)


def test_a_client_that_leaves_while_it_sends():
    async def scenario(client: Client) -> None:
        call = client.start("POST", "/v1/completions", chunks=[b"{", b"}"])
        call._inbox.pop()
        call.leave()
        async with asyncio.timeout(5):
            await call.task
        assert not call.sent

    serving(scenario)


NOT_JSON = (
    b"",
    b" ",
    b"null",
    b"[]",
    b"5",
    b'"a"',
    b"{",
    b'{"a": 1}x',
    b"{'a': 1}",
    b'{"a": 01}',
    b"\xff",
    b'{"a": "\xff"}',
    b'{"a": "\x00"}',
    b"\xef\xbb\xbf{}",
    '{"prompt": "é"}'.encode("latin-1"),
    '{"prompt": "a"}'.encode("utf-16"),
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt": ' + b"1" * 5000 + b"}",
)


def test_what_is_not_json():
    async def scenario(client: Client) -> None:
        for body in NOT_JSON:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                answer = await client.post(path, body)
                assert (answer.status, answer.error["code"]) == (400, "invalid_json"), body[:30]

    serving(scenario)


def test_depth_to_the_level():
    def nested(levels: int) -> bytes:
        return b'{"a": ' + b"[" * levels + b"]" * levels + b"}"

    assert parse_object(nested(MAX_DEPTH))["a"] is not None
    for levels in (MAX_DEPTH + 1, 900, 1100):
        with pytest.raises(ApiError, match="deep"):
            parse_object(nested(levels))


def test_values_and_fields_to_the_last():
    def values(count: int) -> bytes:
        return b'{"a": [' + b",".join([b"1"] * count) + b"]}"

    assert len(parse_object(values(MAX_VALUES))["a"]) == MAX_VALUES
    with pytest.raises(ApiError) as error:
        parse_object(values(MAX_VALUES + 1))
    assert (error.value.status, error.value.param) == (413, "a")
    assert parse_object(b'{"a": "' + b"," * 2 * MAX_VALUES + b'"}')["a"].count(",") == 2 * MAX_VALUES
    fields = {f"f{i}": 1 for i in range(MAX_FIELDS)}
    assert parse_object(json.dumps(fields).encode()) == fields
    with pytest.raises(ApiError, match="fields"):
        parse_object(json.dumps({**fields, "one": 1}).encode())


def test_strings_objects_and_lists_to_the_last():
    def body(inner: str, count: int) -> bytes:
        return f'{{"a": [{",".join([inner] * count)}]}}'.encode()

    for inner, size in (("[]", 1), ("{}", 1), (r'"\"{[\\"', 1), ('{"b": [{"c": 1}]}', 5)):
        count = (limits.MAX_PARTS - 1) // size
        assert len(parse_object(body(inner, count))["a"]) == count
        with pytest.raises(ApiError) as error:
            parse_object(body(inner, count + 1))
        assert (error.value.status, error.value.param) == (413, "a")
    text = '{["' * limits.MAX_PARTS
    assert parse_object(json.dumps({"a": text, "b": [text]}).encode()) == {"a": text, "b": [text]}


def test_s014_requests_for_too_much_are_refused_at_once():
    async def scenario(client: Client) -> None:
        begin = time.monotonic()
        for fields in (
            {"n": 10**9},
            {"best_of": 10**9},
            {"n": 129},
            {"prompt": ["a"] * 20_000},
            {"prompt": ["a"] * 100_000},
            {"prompt": [[5]] * 1_000, "n": 128},
        ):
            answer = await client.complete(**{"prompt": "a", **fields})
            assert answer.status == (413 if len(fields.get("prompt", ())) == 100_000 else 400)
        assert time.monotonic() - begin < 20
        assert not client.engine.fake.received[1:]

    serving(scenario)
