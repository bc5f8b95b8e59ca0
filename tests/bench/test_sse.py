"""The parser of server-sent events, against every way in which a network may cut them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.bench import sse
from hybridserve.bench.sse import EventParser

STREAM = (
    b"\xef\xbb\xbfdata: zeroth\n\n: a comment\r\n\r\n"
    b'data: {"a":1}\r\n\r\n'
    b"event: named\nid: 7\ndata: first\ndata:second\n\n"
    b"data: third\r\ndata: fourth\r\n\r\n"
    b"retry: 10\n\n"
    b"data:  two spaces\r\r" + "data: 客单价 🧑‍🚀\n\n".encode() + b"data\n\n"
    b"data: [DONE]\n\n"
    b"data: never ended"
)
EVENTS = [
    b"zeroth",
    b'{"a":1}',
    b"first\nsecond",
    b"third\nfourth",
    b" two spaces",
    "客单价 🧑‍🚀".encode(),
    b"",
    b"[DONE]",
]


def parse(*blocks: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for block in blocks for event in parser.feed(block)]


def test_all_at_once():
    assert parse(STREAM) == EVENTS


def test_byte_by_byte():
    assert parse(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cut_anywhere(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse(*(STREAM[a:b] for a, b in itertools.pairwise(edges))) == EVENTS


def test_an_event_comes_with_the_byte_that_completes_it():
    """Not with the next one: that would be a latency of a token."""
    parser = EventParser()
    assert parser.feed(b"data: x\r\n\r") == [b"x"]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"data: y\r\n\r\n") == [b"y"]


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT", 100)
    with pytest.raises(ValueError, match="more than"):
        parse(*[b"data: 0123456789\n"] * 20)
    assert parse(*[b"data: 0123456789\n\n"] * 20)
