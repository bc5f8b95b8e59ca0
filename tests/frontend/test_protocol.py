"""Frames and messages between an engine's process and its client."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.engine.messages import (
    AdapterInfo,
    AdapterState,
    EngineRequest,
    RequestMetrics,
    SequenceOutput,
    TokenLogprobs,
)
from hybridserve.frontend import protocol
from hybridserve.frontend.protocol import (
    MAGIC,
    MAX_FRAME_BYTES,
    Channel,
    FromEngine,
    PeerGone,
    ProtocolError,
    ToEngine,
    decode,
    encode,
)
from hybridserve.lora.report import LoadReport

REQUEST = EngineRequest(
    request_id="7",
    prompt_ids=[1, 4095],
    params=SamplingParams(n=3, logit_bias={3: -1.5}, stop=("a", "é"), stop_token_ids=(2,), seed=2**64 - 1),
    adapter="x",
    priority=-3,
    arrival=1.25,
)
METRICS = RequestMetrics(
    arrival=1.0, first_scheduled=None, first_token=2.0, finished=3.0, num_cached_tokens=0, num_preemptions=1
)
SCORES = TokenLogprobs([5, 6], [-0.5, float("-inf")], 2)
OUTPUT = SequenceOutput(
    request_id="7",
    index=2,
    token_ids=[5],
    logprobs=[SCORES],
    prompt_logprobs=[SCORES],
    finish_reason=FinishReason.STOP,
    stop_reason="a",
    metrics=METRICS,
)
MESSAGES = [
    (protocol.Start("{}", "/model", 0.5), ToEngine),
    (protocol.Add(REQUEST), ToEngine),
    (protocol.Abort("7", 1), ToEngine),
    (protocol.LoadAdapter(1, "a", "/a"), ToEngine),
    (protocol.UnloadAdapter(1, "a"), ToEngine),
    (protocol.PinAdapter(1, "a"), ToEngine),
    (protocol.UnpinAdapter(1, "a"), ToEngine),
    (protocol.ListAdapters(1), ToEngine),
    (protocol.GetStats(1), ToEngine),
    (protocol.GetView(1), ToEngine),
    (protocol.Close(), ToEngine),
    (protocol.Phase("load", 1.5), FromEngine),
    (protocol.Ready({"a": [1, {"b": None}]}, "table", 2048, 4096), FromEngine),
    (protocol.Beat(0.5, 0.0), FromEngine),
    (protocol.Admitted(["7"], [("8", "prompt: is empty")]), FromEngine),
    (protocol.Outputs([OUTPUT]), FromEngine),
    (protocol.Result(1, msgspec.Raw(encode(True))), FromEngine),
    (protocol.CallFailed(1, "no", True), FromEngine),
    (protocol.Failed("a; caused by b", "Traceback", False), FromEngine),
]


@pytest.fixture
def ends() -> tuple[Channel, socket.socket]:
    """A channel, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.mark.parametrize(("message", "kind"), MESSAGES, ids=lambda each: type(each).__name__)
def test_every_message_comes_back(message: object, kind: object) -> None:
    assert decode(encode(message), kind) == message


def test_values_of_calls_come_back() -> None:
    info = AdapterInfo(
        name="a",
        identity="hash",
        path=Path("/adapters/a"),
        state=AdapterState.DRAINING,
        rank=8,
        num_bytes=1,
        device_bytes=2,
        num_refs=3,
        is_pinned=True,
        report=LoadReport({"m": 1}, {"k": "why"}),
    )
    back = decode(encode([info]), list[AdapterInfo])
    assert back == [info]
    assert isinstance(back[0].path, Path)


def test_frames_come_whole_wherever_the_stream_is_cut(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    payloads = [b"", b"x", bytes(range(256)) * 9]
    sent = b"".join(MAGIC + len(each).to_bytes(4, "little") + each for each in payloads)
    received = []
    for position in range(len(sent)):
        peer.sendall(sent[position : position + 1])
        received += channel.receive()
    assert received == payloads


def test_a_channel_reads_what_a_channel_sends() -> None:
    ours, theirs = socket.socketpair()
    near, far = Channel(ours), Channel(theirs)
    payloads = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=near.send, args=(payload,)) for payload in payloads]
    for thread in threads:
        thread.start()
    received: list[bytes] = []
    while len(received) < len(payloads):
        received += far.receive()
    for thread in threads:
        thread.join()
    assert sorted(received) == payloads  # none is mixed with another
    near.close()
    with pytest.raises(PeerGone):
        far.receive()
    with pytest.raises(PeerGone):
        far.send(b"x" * 10_000_000)
    far.close()


def test_an_end_inside_a_frame_is_an_end(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(MAGIC + (100).to_bytes(4, "little") + b"half")
    peer.close()
    assert channel.receive() == []
    with pytest.raises(PeerGone):
        channel.receive()


@given(st.binary(min_size=8, max_size=200).filter(lambda noise: not noise.startswith(MAGIC)))
def test_s001_noise_is_no_frame(noise: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        theirs.sendall(noise)
        with pytest.raises(ProtocolError, match="not a frame"):
            channel.receive()
        channel.close()


def test_s001_a_frame_has_a_limit(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(MAGIC + (MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match="not a frame"):
        channel.receive()


def test_a_message_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", len(encode(protocol.Close())))
    encode(protocol.Close())
    with pytest.raises(ProtocolError, match=r"a Phase of \d+ bytes is too large"):
        encode(protocol.Phase("a longer one"))


@pytest.mark.parametrize("kind", [ToEngine, FromEngine])
@given(st.binary(max_size=300))
def test_s001_noise_raises_nothing_else(kind: object, noise: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(noise, kind)


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode(["Add", ["7", [1], {"temperature": -1}]]),  # not SamplingParams
        msgspec.msgpack.encode(["Add", ["7", ["x"], {}]]),
        msgspec.msgpack.encode(["Nothing"]),
        msgspec.msgpack.encode({"Add": 1}),
        b"\x91" * 5000 + b"\xc0",  # nested more deeply than any message
        encode(protocol.Close()) + b"\x00",
    ],
)
def test_what_is_nearly_a_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        decode(payload, ToEngine)


@pytest.mark.parametrize("value", ["half \ud800", 2**64, -(2**63) - 1])
def test_what_has_no_bytes_is_a_value_error(value: object) -> None:
    with pytest.raises(ValueError, match="can't be sent"):
        encode([value])
