"""Every route but those that generate, which have modules of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from msgspec import UNSET

from hybridserve.engine.messages import AdapterState
from hybridserve.frontend.errors import EngineUnavailable
from hybridserve.server import chat, completions
from hybridserve.server.errors import ApiError, bad_request, shown, unavailable
from hybridserve.server.metrics import CONTENT_TYPE
from hybridserve.server.prompting import check_ids, encode_chat, encode_text
from hybridserve.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from hybridserve.server.tools import check_tools
from hybridserve.server.wire import (
    Health,
    LoadedAdapter,
    ModelCard,
    ModelList,
    Text,
    TokenizerInfo,
    Tokens,
    UnloadedAdapter,
    Version,
)
from hybridserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from hybridserve.server.exchange import Exchange
    from hybridserve.server.service import Service
    from hybridserve.text import Tokenizer

T = TypeVar("T")


async def create_completion(service: Service, exchange: Exchange) -> None:
    """Continue a prompt, or several; streamed, as server-sent events."""
    service.check_ready()
    service.check_room()  # before a large body comes
    body = await exchange.read(CompletionRequest)
    exchange.ignore(body.without_effect)
    await (await completions.prepare(service, body, exchange)).run(service, exchange)


async def create_chat_completion(service: Service, exchange: Exchange) -> None:
    """Answer a conversation; streamed, as server-sent events."""
    service.check_ready()
    service.check_room()
    body = await exchange.read(ChatRequest)
    exchange.ignore(body.without_effect)
    await (await chat.prepare(service, body, exchange)).run(service, exchange)


async def list_models(service: Service, exchange: Exchange) -> None:
    """The base model and every adapter that may be named as model."""
    await exchange.reply(ModelList(await _cards(service)))


async def retrieve_model(service: Service, exchange: Exchange) -> None:
    """The base model, or an adapter, by its name."""
    cards = await _cards(service)
    for card in cards:
        if card.id == exchange.named or (card.parent is None and service.adapter_of(exchange.named) is None):
            return await exchange.reply(card)
    message = f"model: {shown(exchange.named)!r} is unknown; GET /v1/models lists those that there are"
    raise ApiError(404, message, param="model", code="model_not_found")


async def _cards(service: Service) -> list[ModelCard]:
    service.check_ready()
    engine = service.engine
    cards = [ModelCard(service.name, service.created, service.root, None, engine.max_model_len)]
    for info in await _asked(engine.list_adapters()):
        if info.state is not AdapterState.DRAINING:
            root = str(info.path)
            cards.append(ModelCard(info.name, service.created, root, service.name, engine.max_model_len))
    return cards


async def tokenize(service: Service, exchange: Exchange) -> None:
    """The token ids of a text or of a conversation."""
    service.check_ready()
    body = await exchange.read(TokenizeRequest)
    tokenizer = _tokenizer(service)
    if body.messages is not None:
        check_tools(body.tools, service.config.limits)
        ids = await encode_chat(
            service,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            tools=[tool.for_template() for tool in body.tools],
        )
    else:
        ids = await encode_text(service, "prompt", body.prompt or "", body.add_special_tokens)
    texts = [tokenizer.decode_token(token_id) for token_id in ids] if body.return_token_strs else UNSET
    await exchange.reply(Tokens(len(ids), service.engine.max_model_len, ids, texts))


async def detokenize(service: Service, exchange: Exchange) -> None:
    """The text of token ids."""
    service.check_ready()
    body = await exchange.read(DetokenizeRequest)
    _tokenizer(service)
    check_ids(service, "tokens", body.tokens)
    await exchange.reply(Text(await service.engine.decode(body.tokens)))


async def tokenizer_info(service: Service, exchange: Exchange) -> None:
    """What a client needs to write prompts itself."""
    service.check_ready()
    tokenizer = _tokenizer(service)
    special = tokenizer.special_tokens
    bos_id = tokenizer.bos_id
    info = TokenizerInfo(
        vocab_size=tokenizer.vocab_size,
        model_max_length=service.engine.max_model_len,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        pad_token=special.get("pad_token"),
        unk_token=special.get("unk_token"),
        chat_template=tokenizer.chat_template,
        add_bos_token=bos_id is not None and bos_id in tokenizer.encode("a"),
    )
    await exchange.reply(info)


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise bad_request(None, f"the model has no tokenizer ({service.engine.tokenizer_error})")
    return tokenizer


async def load_lora_adapter(service: Service, exchange: Exchange) -> None:
    """Let requests name the adapter in a directory of the server, from now on."""
    service.check_ready()
    body = await exchange.read(LoadAdapterRequest)
    info = await _asked(service.engine.load_adapter(body.lora_name, body.lora_path))
    loaded = LoadedAdapter(info.name, info.identity, info.rank, info.num_bytes, len(info.report.applied))
    await exchange.reply(loaded)


async def unload_lora_adapter(service: Service, exchange: Exchange) -> None:
    """Refuse an adapter's name from now on. Requests that use it go on."""
    service.check_ready()
    body = await exchange.read(UnloadAdapterRequest)
    is_gone = await _asked(service.engine.unload_adapter(body.lora_name), unknown=404)
    await exchange.reply(UnloadedAdapter(body.lora_name, not is_gone))


async def _asked(answer: Awaitable[T], *, unknown: int = 400) -> T:
    """What the engine answers about adapters; ApiError where it refuses, `unknown` being the status where it
    is for the name."""
    try:
        return await answer
    except EngineUnavailable:
        raise unavailable("the engine has failed, or is being stopped") from None
    except ValueError as error:
        raise _of_adapters(str(error), unknown) from None


def _of_adapters(message: str, unknown: int) -> ApiError:
    if message.startswith("lora.allow_runtime_loading"):
        return ApiError(403, message, code="runtime_loading_off")
    if message.startswith("adapter: "):
        renamed = message.replace("adapter: ", "lora_name: ", 1)
        code = "adapter_not_found" if unknown == 404 else "bad_adapter"
        return ApiError(unknown, renamed, param="lora_name", code=code)
    if message.startswith(("path: ", "/")):  # what was asked for, or a file of it
        renamed = "lora_path: " + message.removeprefix("path: ")
        return ApiError(400, renamed, param="lora_path", code="bad_adapter")
    return ApiError(400, message, code="bad_adapter")


async def health(service: Service, exchange: Exchange) -> None:
    """200 where requests are served, else 503: what to ask before sending any."""
    status = service.status
    await exchange.reply(Health(status), 200 if status == "ok" else 503)


async def health_live(service: Service, exchange: Exchange) -> None:
    """200 unless there is nothing left but to start the server again."""
    status = service.status
    await exchange.reply(Health(status), 503 if status == "dead" else 200)


async def version(service: Service, exchange: Exchange) -> None:
    """Of hybridserve."""
    await exchange.reply(Version(__version__))


async def metrics(service: Service, exchange: Exchange) -> None:
    """Counters, gauges and histograms in Prometheus' text format."""
    page = await service.metrics_page()
    headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(page)).encode())]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    await exchange.send({"type": "http.response.body", "body": page, "more_body": False})
