"""What goes into an engine and what comes out of it. Token ids and numbers only; knows no text and no
tensors."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import msgspec

from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.lora.report import LoadReport


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One prompt. `arrival` is in monotonic seconds."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None
    """Only requests with the same salt share what has been computed."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the raw distribution at one position.

    The first id is the token that stands there, `rank` its place among all (1 is the most likely); the most
    likely tokens follow, best first.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Of one finished sequence; times in monotonic seconds."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    num_cached_tokens: int
    num_preemptions: int


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one sequence gained in one step. `finish_reason` and `metrics` are set in its last output.

    `ends_in_text`: it stops after its last token, which is text as the others are; else a token that it stops
    at is none.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    ends_in_text: bool = False
    metrics: RequestMetrics | None = None


class AdapterState(enum.StrEnum):
    DEVICE = "device"
    LOADING = "loading"
    HOST = "host"
    DISK = "disk"
    DRAINING = "draining"
    """Its name is gone, or has other content now; sequences that began with it go on."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter, as `list_adapters` shows it. `num_refs`: sequences that use it."""

    name: str
    identity: str
    path: Path
    state: AdapterState
    rank: int
    num_bytes: int  # of host memory
    device_bytes: int
    num_refs: int
    is_pinned: bool
    report: LoadReport


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence as a watcher sees it: numbers, and nothing of its text. `seconds`: since it arrived."""

    adapter: str | None
    is_running: bool
    num_prompt: int
    num_computed: int
    num_generated: int
    max_tokens: int
    num_preemptions: int
    seconds: float


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: AdapterState
    rank: int


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment, for somebody who looks at it about once a second.

    `slabs` has one byte a slab, a `SlabKind`; the slabs that are missing at its end are free. `requests` are
    the oldest that have not finished, `adapters` those on the device first; each has an end.
    """

    gauges: dict[str, Any]
    slabs: bytes
    requests: list[RequestView]
    adapters: list[AdapterView]
