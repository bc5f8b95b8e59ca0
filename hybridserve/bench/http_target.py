"""Any server with OpenAI's HTTP interface as a target.

Knows URLs, bodies and streams of events; no times. A key goes into one header and nowhere else.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import msgspec

from hybridserve.bench.http_client import HttpClient, HttpFailure
from hybridserve.bench.sse import EventParser
from hybridserve.bench.target import Arrival, RequestFailed, TargetError, Usage, is_chat

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from hybridserve.bench.target import TargetRequest

MAX_DETAIL = 300
MAX_LISTED = 10


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _TokenizerInfo(msgspec.Struct):
    vocab_size: int | None = None


class HttpTarget:
    """`url` is the server's, with or without /v1. `model` None: the first that the server lists.

    Until `rehearse` it asks for nothing that OpenAI's own servers don't know.
    """

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._client, self._path = connect_to(url, self.url, api_key)
        self.vocab_size: int | None = None
        self.max_model_len: int | None = None
        self._given_model = model
        self._model = model or ""
        self._models: list[_Model] = []
        self._version: str | None = None
        self._extensions: frozenset[str] = frozenset()
        self._tells_counts = False

    @property
    def name(self) -> str:
        return self._model

    @property
    def counts(self) -> str:
        return "told by the server" if self._tells_counts else "estimated: a request's tokens over its events"

    async def __aenter__(self) -> Self:
        try:
            await self._look_around()
        except BaseException:
            self._client.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._client.close()

    async def _look_around(self) -> None:
        body = await self._get("/v1/models")
        if body is not None:
            try:
                self._models = msgspec.json.decode(body, type=_Models).data
            except msgspec.MsgspecError:
                raise TargetError(f"{self.url}/v1/models: is no list of models") from None
        names = [model.id for model in self._models]
        if self._given_model is None:
            if not names:
                raise TargetError(f"{self.url}: lists no model; name it by --model")
            self._model = next((model.id for model in self._models if model.parent is None), names[0])
        elif names and self._given_model not in names:
            raise TargetError(f"--model: {self.url} serves no {self._given_model!r}; {_listed(names)}")
        self.max_model_len = next((m.max_model_len for m in self._models if m.id == self._model), None)
        with contextlib.suppress(msgspec.MsgspecError):
            if body := await self._get("/tokenizer_info"):
                self.vocab_size = msgspec.json.decode(body, type=_TokenizerInfo).vocab_size
            if body := await self._get("/version"):
                self._version = msgspec.json.decode(body, type=dict[str, Any]).get("version")

    async def _get(self, path: str) -> bytes | None:
        """None for what the server doesn't have."""
        try:
            async with self._client.request("GET", self._path + path) as response:
                body = await response.read()
        except HttpFailure as error:
            raise TargetError(f"{self.url}: {error}") from None
        if response.status in (401, 403):
            raise TargetError(key_refused(self.url, response.status))
        if path == "/v1/models" and response.status not in (200, 404, 405):
            raise TargetError(f"{self.url}{path}: {response.status}: {message_in(body)}")
        return body if response.status == 200 else None

    async def adapters(self) -> list[str]:
        return [model.id for model in self._models if model.id != self._model]

    async def rehearse(self, request: TargetRequest, *, needs_ids: bool) -> None:
        """Finds out which of the extensions that tell more, or that make answers comparable, it knows."""
        wanted = {"continuous_usage_stats"}
        wanted |= {"ignore_eos"} if request.ignore_eos else set()
        wanted |= {"return_token_ids"} if needs_ids else set()
        attempts = [wanted, wanted - {"continuous_usage_stats"}]
        if request.ignore_eos:
            attempts += [wanted - {"ignore_eos"}, wanted - {"continuous_usage_stats", "ignore_eos"}]
        first: RequestFailed | None = None
        for extensions in attempts:
            self._extensions = frozenset(extensions)
            try:
                await self._rehearse(request, needs_ids=needs_ids)
            except RequestFailed as failed:
                first = first or failed
                if failed.kind not in ("HTTP 400", "HTTP 422"):
                    break
            else:
                return
        raise TargetError(f"{self.url}: {first}")

    async def _rehearse(self, request: TargetRequest, *, needs_ids: bool) -> None:
        usage, has_ids, tells_counts = None, False, True
        async with contextlib.aclosing(self.stream(request)) as stream:
            async for arrival in stream:
                usage = arrival.usage or usage
                has_ids = has_ids or bool(arrival.token_ids)
                tells_counts = tells_counts and arrival.num_tokens is not None
        if usage is None:
            raise TargetError(
                f"{self.url}: reports no usage of a stream (stream_options.include_usage), so its "
                "tokens can't be counted"
            )
        if needs_ids and not has_ids:
            raise TargetError(
                f"{self.url}: doesn't tell the token ids of its answers (return_token_ids), which a "
                "next turn of token ids needs; use --send chat"
            )
        self._tells_counts = tells_counts

    async def stream(self, request: TargetRequest) -> AsyncGenerator[Arrival]:
        path, body = self._body(request)
        try:
            async with self._client.request("POST", self._path + path, msgspec.json.encode(body)) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}", message_in(await response.read()))
                reader = _Reader()
                async for block in response.blocks:
                    if (arrival := reader.read(block)) is not None:
                        yield arrival
                reader.check_end()
        except HttpFailure as error:
            raise RequestFailed("connection", str(error)) from None

    def _body(self, request: TargetRequest) -> tuple[str, dict[str, Any]]:
        options = {"include_usage": True}
        if "continuous_usage_stats" in self._extensions:
            options["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": request.adapter or self._model,
            "stream": True,
            "stream_options": options,
            **request.sampling,
        }
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        if request.ignore_eos and "ignore_eos" in self._extensions:
            body["ignore_eos"] = True
        if "return_token_ids" in self._extensions:
            body["return_token_ids"] = True
        if is_chat(request.prompt):
            return "/v1/chat/completions", {**body, "messages": request.prompt}
        return "/v1/completions", {**body, "prompt": request.prompt}

    def describe(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "model": self._model,
            "version": self._version,
            "extensions": sorted(self._extensions),
        }


def connect_to(typed: str, url: str, api_key: str | None) -> tuple[HttpClient, str]:
    """A client of the server at `url`, which its user typed as `typed`, and the path that its own paths come
    after. Raises TargetError for what is no server's URL; connects to nobody yet."""
    try:
        parts = urlsplit(typed)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise TargetError(f"{typed}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not _is_plain(typed):
        raise TargetError(f"{typed}: is no URL of a server, such as http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise TargetError("the URL holds more than a server and a path; a key is given by --api-key")
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if api_key is not None:
        if not _is_plain(api_key):
            raise TargetError("--api-key: holds characters that no header can")
        headers["authorization"] = f"Bearer {api_key}"
    client = HttpClient(parts.hostname, port, is_secure=parts.scheme == "https", headers=headers)
    return client, urlsplit(url).path


class _Reader:
    """One response: bytes to arrivals."""

    def __init__(self) -> None:
        self._events = EventParser()
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._num_told = 0
        """Tokens, by the last usage that came with a piece of text."""
        self._is_done = False

    def read(self, block: bytes) -> Arrival | None:
        """What the bytes complete, if anything."""
        arrival, is_empty = Arrival(), True
        try:
            for data in self._events.feed(block):
                if data == b"[DONE]":
                    self._is_done = True
                else:
                    self._add(self._decode(data), arrival)
                    is_empty = False
        except ValueError as error:  # msgspec's own are, too
            raise RequestFailed("protocol", f"an event of the stream can't be read: {error}") from None
        return None if is_empty else arrival

    def _add(self, chunk: _Chunk, arrival: Arrival) -> None:
        if chunk.error is not None:
            raise RequestFailed("stream", _message_of(chunk.error))
        for choice in chunk.choices:
            text = choice.text or _text_of(choice.delta)
            arrival.text += text
            arrival.finish_reason = choice.finish_reason or arrival.finish_reason
            num_tokens: int | None = None
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens - self._num_told
                self._num_told = chunk.usage.completion_tokens
            elif choice.token_ids is not None:
                num_tokens = len(choice.token_ids)
            arrival.token_ids += choice.token_ids or ()
            if text or num_tokens:
                arrival.num_events += 1
                if num_tokens is None or arrival.num_tokens is None:
                    arrival.num_tokens = None
                else:
                    arrival.num_tokens += num_tokens
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = None if details is None else details.cached_tokens
            arrival.usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached)

    def check_end(self) -> None:
        if not self._is_done:
            raise RequestFailed("stream", "it ended before [DONE]")


def _text_of(delta: _Delta | None) -> str:
    if delta is None:
        return ""
    return delta.content or delta.reasoning_content or ("" if not delta.tool_calls else str(delta.tool_calls))


def _is_plain(text: str) -> bool:
    """Whether it can stand in the head of a request."""
    return text.isascii() and text.isprintable() and " " not in text


def message_in(body: bytes) -> str:
    """What an error response says, in one line."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return _message_of(body.decode(errors="replace"))
    return _message_of(value.get("error", value) if isinstance(value, dict) else value)


def _message_of(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return " ".join(str(error).split())[:MAX_DETAIL]


def key_refused(url: str, status: int) -> str:
    return f"{url}: {status}: the API key is missing or wrong; set HYBRIDSERVE_API_KEY or --api-key"


def _listed(names: list[str]) -> str:
    return f"there is {', '.join(names[:MAX_LISTED])}" + (", ..." if len(names) > MAX_LISTED else "")
