"""OpenAI's Python client against the real server."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.serve_process import Server

pytestmark = pytest.mark.slow

HELLO: Any = [{"role": "user", "content": "what is the time?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as one:
        yield one


def test_the_models(client: OpenAI) -> None:
    cards = list(client.models.list())
    assert [client.models.retrieve(card.id) for card in cards] == cards
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"
    assert [card.id for card in cards] == ["demo", "bard", "kjv"]
    assert {card.owned_by for card in cards} == {"hybridserve"}
    assert all(card.object == "model" and card.created > 1_700_000_000 for card in cards)


def test_a_chat_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=HELLO, **GREEDY)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, stream=True, stream_options=options, **GREEDY
    )
    chunks = list(stream)
    *pieces, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(piece.usage is None for piece in pieces)
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == choice.message.content
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    likes_tea: bool


def test_answers_as_objects(client: OpenAI) -> None:
    """The client makes the schema, and an object of the answer; and it collects a stream by itself."""
    asked: Any = {"model": "demo", "messages": HELLO, "max_tokens": 200, "response_format": Person, "seed": 3}
    said = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(said, Person)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == said
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_several_answers_each_by_its_index(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "n": 4, "seed": 7, "max_tokens": 10}
    whole = client.chat.completions.create(**asked)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2, 3]
    assert len(set(texts.values())) > 1
    streamed = dict.fromkeys(texts, "")
    ended = []
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                ended.append(choice.index)
    assert streamed == texts
    assert sorted(ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
def test_the_helper_that_collects_several_answers(client: OpenAI, tools: bool) -> None:
    """Whichever has something to say first: stop strings hold back words that one of them begins with."""
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "n": 4, "temperature": 1.5}
    asked |= {"max_tokens": 40, "tools": [WEATHER], "tool_choice": "required"} if tools else {"max_tokens": 3}
    for seed in range(6):
        stop = None if tools else [" the", " of", " and", " a"]
        with client.chat.completions.stream(seed=seed, stop=stop, **asked) as stream:
            for _ in stream:
                pass
            snapshot = stream.current_completion_snapshot
        assert [choice.index for choice in snapshot.choices] == [0, 1, 2, 3]


def test_probabilities(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY
    )
    scored = answer.choices[0].logprobs
    assert scored is not None
    assert scored.content is not None
    assert len(scored.content) == 12
    for token in scored.content:
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs))
        assert len(token.top_logprobs) == 3
    said = b"".join(bytes(token.bytes or []) for token in scored.content)
    assert said.decode() == answer.choices[0].message.content


def test_b013_a_prompt_that_is_scored(client: OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="for the people", echo=True, logprobs=1, max_tokens=0
    )
    (choice,) = answer.choices
    assert choice.text == "for the people"
    assert choice.logprobs is not None
    tokens, offsets, values = (
        choice.logprobs.tokens,
        choice.logprobs.text_offset,
        choice.logprobs.token_logprobs,
    )
    assert tokens is not None
    assert offsets is not None
    assert values is not None
    assert values[0] is None
    assert all(value is not None and value < 0 for value in values[1:])
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], None], strict=True):
        assert choice.text[begin:end] in ("", token)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 0)


def test_prompts_of_every_kind(client: OpenAI) -> None:
    ids = client.completions.create(
        model="demo", prompt="for the", max_tokens=1, extra_body={"return_token_ids": True}
    )
    (extra,) = ids.choices
    prompt_ids: list[int] = extra.model_extra["prompt_token_ids"]  # type: ignore[index]
    prompts: list[Any] = ["for the", ["for the", "for the"], prompt_ids, [prompt_ids, prompt_ids]]
    texts = []
    for prompt in prompts:
        answer = client.completions.create(model="demo", prompt=prompt, **GREEDY)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        texts += [choice.text for choice in answer.choices]
    assert len(texts) == 6
    assert len(set(texts)) == 1


def test_adapters_by_the_name_of_the_model(client: OpenAI) -> None:
    def say(model: str) -> str:
        answer = client.completions.create(model=model, prompt="And the", **GREEDY)
        assert answer.model == model
        return answer.choices[0].text

    assert len({say("demo"), say("bard"), say("kjv")}) == 3


def test_an_answer_in_the_form_of_a_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="demo", messages=HELLO, response_format=form, max_tokens=100, seed=1, stream=stream
        )
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        person = json.loads(text)
        assert person["name"] in ("Ann", "Bob")
        assert person["age"] <= 99
    plain = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        max_tokens=300,
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert plain.choices[0].message.content in ("yes", "no")


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Wien", "Linz"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_tool_is_called_and_answers(client: OpenAI) -> None:
    """The model has to call it; what it says when it has the answer is its own business."""
    asked: Any = {
        "model": "demo",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": "required",
        "seed": 1,
    }
    whole = client.chat.completions.create(max_tokens=400, parallel_tool_calls=False, **asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Wien", "Linz")
    pieces = list(
        client.chat.completions.create(max_tokens=400, parallel_tool_calls=False, stream=True, **asked)
    )
    parts = [part for piece in pieces for part in piece.choices[0].delta.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert [part.function.name for part in parts if part.function and part.function.name] == ["weather"]
    arguments = "".join(part.function.arguments or "" for part in parts if part.function)
    assert arguments == call.function.arguments
    assert pieces[-1].choices[0].finish_reason == "tool_calls"
    messages = [*HELLO, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], max_tokens=8)
    assert answer.choices[0].finish_reason


def test_the_helper_that_collects_calls(client: OpenAI) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with client.chat.completions.stream(
        model="demo", messages=HELLO, tools=[strict], tool_choice="required", max_tokens=400, seed=2
    ) as stream:
        kinds = {event.type for event in stream}
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert calls
    assert all(call.function.parsed_arguments["city"] in ("Wien", "Linz") for call in calls)  # type: ignore[index]


MISTAKES: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str | None, str | None]] = {
    "value": ({"temperature": -1}, openai.BadRequestError, "temperature", None),
    "model": ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
    "field": (
        {"extra_body": {"guided_regex": "a"}},
        openai.BadRequestError,
        "guided_regex",
        "unsupported_field",
    ),
    "length": ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
    "empty": ({"prompt": ""}, openai.BadRequestError, "prompt", None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", MISTAKES)
def test_b033_mistakes_are_the_exceptions_that_people_catch(client: OpenAI, name: str, stream: bool) -> None:
    """Before the stream begins, too: never with status 200."""
    fields, kind, param, code = MISTAKES[name]
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": "demo", "prompt": "a", "stream": stream, **fields})
    assert type(caught.value) is kind
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert param is not None
    assert param in caught.value.message
    assert caught.value.request_id


def test_headers(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="demo", prompt="a", max_tokens=1, user="me", extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.headers["x-hybridserve-ignored-fields"] == "user"
    assert raw.parse().choices[0].finish_reason
    with client.completions.with_streaming_response.create(
        model="demo", prompt="a", max_tokens=2, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.request_id
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_b009_leaving_a_stream_ends_the_request(client: OpenAI, served: Server) -> None:
    stream = client.completions.create(
        model="demo", prompt="for the", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    before = served.series()
    assert before["hybridserve_num_requests_running"] == 1
    stream.close()
    served.wait_idle()
    name = 'hybridserve_request_success_total{finished_reason="abort"}'
    assert served.series()[name] == before.get(name, 0) + 1


def test_b009_a_client_that_waits_no_longer(client: OpenAI, served: Server) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model="demo", prompt="a", max_tokens=2000, timeout=0.5, extra_body={"ignore_eos": True, "n": 8}
        )
    served.wait_idle()


def test_many_at_once_and_asynchronously(base_url: str, served: Server) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:

            async def one(index: int) -> str:
                stream = await client.chat.completions.create(
                    model=["demo", "bard", "kjv"][index % 3], messages=HELLO, stream=True, **GREEDY
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            texts = await asyncio.gather(*(one(index) for index in range(18)))
            assert [len(set(texts[start::3])) for start in range(3)] == [1, 1, 1]
            assert len(set(texts)) == 3
            endless = await client.completions.create(
                model="demo", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            )

            async def read() -> None:
                async for _ in endless:
                    pass

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(), 0.3)
            await endless.close()

    asyncio.run(run())
    served.wait_idle()
