"""The HTTP client against bytes that servers send, whole and in pieces."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.bench.http_client import Chunks, HttpClient, HttpFailure

CODED = b"5\r\nhello\r\n1;name=value\r\n \r\nA\r\n0123456789\r\n2\r\n\r\n\r\n0\r\nTrailer: x\r\n\r\n"
PLAIN = b"hello 0123456789\r\n"


def test_chunks():
    chunks = Chunks()
    assert chunks.feed(CODED) == PLAIN
    assert chunks.has_ended


@given(st.lists(st.integers(0, len(CODED)), max_size=10))
def test_chunks_cut_anywhere(cuts):
    chunks = Chunks()
    edges = [0, *sorted(cuts), len(CODED)]
    pieces = [CODED[a:b] for a, b in itertools.pairwise(edges)]
    assert b"".join(chunks.feed(piece) for piece in pieces if not chunks.has_ended) == PLAIN
    assert chunks.has_ended


@pytest.mark.parametrize("data", [b"x\r\n", b"\r\n", b"5" * 5000])
def test_no_chunks(data):
    with pytest.raises(HttpFailure):
        Chunks().feed(data)


def talk(answers: list[bytes | None], num_requests: int = 1, *, keeps: bool = True) -> list[object]:
    """What requests give, one after another: (status, body) or the reason of a failure. `answers`: of each
    request; None hangs up. With keeps=False the server hangs up after each answer. Last: connections made."""
    found: list[object] = []
    left = iter(answers)
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                answer = next(left)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if not keeps:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def work() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient("127.0.0.1", port, is_secure=False, headers={})
        for _ in range(num_requests):
            try:
                async with client.request("GET", "/") as response:
                    found.append((response.status, await response.read()))
            except HttpFailure as error:
                found.append(str(error))
            await asyncio.sleep(0.02)  # a server that hangs up has done so
        client.close()
        server.close()
        await asyncio.sleep(0.02)

    asyncio.run(work())
    return [*found, num_connections]


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (OK, (200, b"ok")),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", (204, b"")),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CODED, (200, PLAIN)),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, (200, b"ok")),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "its answer is no HTTP"),
        (b"\r\n\r\n", "its answer is no HTTP"),
        (b"HTTP/2 200 OK\r\n\r\n", "its answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "its answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**17 + b"\r\n\r\n", "its answer is no HTTP"),
        (None, "it hung up without an answer"),
    ],
)
def test_an_answer(answer, expected):
    assert talk([answer])[0] == expected


def test_an_answer_that_only_the_end_of_the_connection_ends():
    assert talk([b"HTTP/1.0 200 OK\r\n\r\nall of it"], keeps=False)[0] == (200, b"all of it")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", "it hung up within its answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", "it hung up within its answer"),
        (b"HTTP/1.1 200 OK\r\nContent", "it hung up within the head of its answer"),
    ],
)
def test_an_answer_that_breaks_off(answer, reason):
    assert talk([answer], keeps=False)[0] == reason


def test_connections_are_kept():
    assert talk([OK] * 3, 3) == [(200, b"ok")] * 3 + [1]


def test_a_connection_that_was_closed_meanwhile_is_made_again():
    assert talk([OK] * 3, 3, keeps=False) == [(200, b"ok")] * 3 + [3]


def test_a_server_may_ask_not_to_keep_it():
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    assert talk([closing] * 2, 2)[-1] == 2


def test_what_was_left_in_part_is_not_used_again():
    async def work() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart")
            hung_up.set_result(await reader.read())
            writer.close()

        hung_up = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient("127.0.0.1", port, is_secure=False, headers={})
        async with client.request("GET", "/") as response:
            assert await anext(response.blocks) == b"part"
        assert await asyncio.wait_for(hung_up, 5) == b""
        assert not client._idle
        server.close()

    asyncio.run(work())
