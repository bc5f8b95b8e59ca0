"""Tools over HTTP: what the model is told, which calls a client gets, and what is refused."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as Backend

from hybridserve.chat_template import ChatTemplate
from hybridserve.frontend import protocol
from hybridserve.grammar.compiler import compile_matcher, load_tokenizer
from hybridserve.server import generation
from hybridserve.server.chat import ChatAnswer
from hybridserve.text import Tokenizer
from tests.harness.asgi import serving
from tests.harness.serve_process import server
from tests.harness.structured import EOS, save_byte_model
from tests.harness.tools import (
    MARKERS,
    NOW,
    TOOLS,
    WEATHER,
    call_text,
    joined,
    of_whole,
    save_tokenizer,
    says,
    without_ids,
)

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.core.request import SamplingParams
    from tests.harness.asgi import Answer, Client

HELLO = [{"role": "user", "content": "hello"}]
WIEN = '{"city": "Wien", "days": 3}'
KINDS = ["special", "plain"]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A tokenizer to which the markers are special tokens, and one to which they are text."""
    return save_tokenizer(tmp_path, request.param)


async def both(client: Client, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices, which are the same whole and streamed but for the ids of calls."""
    fields = {"messages": HELLO, "tools": TOOLS, **fields}
    answer = await client.chat(**fields)
    assert answer.status == 200, answer.body
    whole = of_whole(answer.json)
    streamed = joined((await client.chat(**fields, stream=True)).events)
    assert without_ids(streamed) == without_ids(whole)
    ids = [call["id"] for choices in (whole, streamed) for one in choices.values() for call in one["calls"]]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("call_") for name in ids)
    return whole


def sent(client: Client) -> list[SamplingParams]:
    """The parameters of the requests that the engine has got."""
    return [each.request.params for each in client.engine.fake.received if type(each) is protocol.Add]


def prompt(client: Client) -> str:
    """The text of the newest prompt, special tokens by name."""
    requests = [each.request for each in client.engine.fake.received if type(each) is protocol.Add]
    tokenizer = client.engine.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(requests[-1].prompt_ids, skip_special_tokens=False)


# ---- what is called


def test_calls_and_what_is_said_beside_them(directory: str) -> None:
    text = f"Let me see. {call_text(('weather', WIEN), ('now', '{ }'))}\nOne moment."

    async def scenario(client: Client) -> None:
        (choice,) = (await both(client)).values()
        assert choice["content"] == "Let me see. \nOne moment."
        assert [(call["name"], call["arguments"]) for call in choice["calls"]] == [
            ("weather", WIEN),
            ("now", "{ }"),
        ]
        assert choice["finish_reason"] == "tool_calls"

    serving(scenario, tokenizer=directory, reply=says(directory, text))


def test_a_large_answer_is_made_elsewhere(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "LARGE_ANSWER", 1)
    threads: list[str] = []

    def message(self: ChatAnswer, part: Any) -> Any:
        threads.append(threading.current_thread().name)
        return plain(self, part)

    plain = ChatAnswer._message
    monkeypatch.setattr(ChatAnswer, "_message", message)

    async def scenario(client: Client) -> None:
        (choice,) = (await both(client)).values()
        assert choice["finish_reason"] == "tool_calls"
        assert len(threads) == 1
        assert threads[0].startswith("hybridserve-text")

    serving(scenario, tokenizer=directory, reply=says(directory, call_text(("weather", WIEN))))


def test_an_answer_that_is_nothing_but_a_call(directory: str) -> None:
    async def scenario(client: Client) -> None:
        answer = (await client.chat(messages=HELLO, tools=TOOLS)).json
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        expected = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert choice["message"] == expected
        assert set(call) == {"id", "type", "function"}
        assert call["type"] == "function"
        assert call["function"] == {"name": "now", "arguments": "{}"}

    serving(scenario, tokenizer=directory, reply=says(directory, call_text(("now", "{}"))))


def test_arguments_come_while_the_model_writes_them(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path)

    async def scenario(client: Client) -> None:
        events = (await client.chat(messages=HELLO, tools=TOOLS, stream=True)).events[:-1]
        deltas = [event["choices"][0]["delta"] for event in events]
        pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        first, *rest = pieces
        assert first["function"] == {"name": "weather", "arguments": ""}
        assert "".join(piece["function"]["arguments"] for piece in rest) == WIEN
        assert len(rest) > len(WIEN) - 4  # a token is a byte or two here

    serving(scenario, tokenizer=directory, reply=says(directory, call_text(("weather", WIEN))))


def test_each_continuation_calls_for_itself(directory: str) -> None:
    texts = [
        call_text(("weather", WIEN)),
        "nothing to call",
        call_text(("now", "{}"), ("now", "{}")),
        f"{MARKERS[0]}[",
    ]

    async def scenario(client: Client) -> None:
        choices = await both(client, n=4)
        assert [len(choices[index]["calls"]) for index in range(4)] == [1, 0, 2, 0]
        reasons = [choices[index]["finish_reason"] for index in range(4)]
        assert reasons == ["tool_calls", "stop", "tool_calls", "stop"]
        assert [choices[index]["content"] for index in range(4)] == ["", texts[1], "", texts[3]]

    serving(scenario, tokenizer=directory, reply=says(directory, *texts))


@pytest.mark.parametrize(("kind", "before"), [("special", ""), ("plain", "See: ")])
def test_b027_a_call_that_was_cut_is_none(tmp_path: Path, kind: str, before: str) -> None:
    """Wherever max_tokens falls: "length" until the list is closed, "tool_calls" from then on; whole or
    streamed, the same."""
    directory = save_tokenizer(tmp_path, kind)
    text = before + call_text(("weather", WIEN), ("now", "{}"))
    ids = Tokenizer(directory).encode(text, add_special_tokens=False)

    async def scenario(client: Client) -> None:
        reasons: list[str] = []
        for max_tokens in range(1, len(ids) + 2):
            (choice,) = (await both(client, max_tokens=max_tokens)).values()
            reasons.append(choice["finish_reason"])
            if reasons[-1] == "tool_calls":
                assert [json.loads(call["arguments"]) for call in choice["calls"]] == [json.loads(WIEN), {}]
            whole = Tokenizer(directory).decode(ids[:max_tokens], skip_special_tokens=False)
            assert (reasons[-1] == "tool_calls") == (len(whole) > text.rindex("]"))
        assert "tool_calls" in reasons
        assert reasons == sorted(reasons)  # "length" comes before "tool_calls"

    serving(scenario, tokenizer=directory, reply=says(directory, text))


BROKEN = [
    f"{MARKERS[0]}[]{MARKERS[1]}",
    call_text(("wether", WIEN)),
    call_text(("weather", "3")),
    call_text(("weather", "{}"), opening=""),
    f"{MARKERS[0]}weather(){MARKERS[1]} I think",
    f"{MARKERS[0]}[{{{MARKERS[1]}",
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_call_comes_back_as_content(directory: str, text: str) -> None:
    async def scenario(client: Client) -> None:
        (choice,) = (await both(client)).values()
        assert (choice["content"], choice["calls"], choice["finish_reason"]) == (text, [], "stop")

    serving(scenario, tokenizer=directory, reply=says(directory, text))


def test_arguments_that_break_after_they_were_streamed(directory: str) -> None:
    """A whole answer has them as content; a stream has the rest as content, and does not end as if there were
    calls."""
    text = call_text(("now", "{}"), ("weather", '{"city": Wien}'))

    async def scenario(client: Client) -> None:
        (whole,) = of_whole((await client.chat(messages=HELLO, tools=TOOLS)).json).values()
        assert [call["name"] for call in whole["calls"]] == ["now"]
        assert whole["content"] == text[text.index(",\n") :]
        (streamed,) = joined((await client.chat(messages=HELLO, tools=TOOLS, stream=True)).events).values()
        assert [call["arguments"] for call in streamed["calls"]] == ["{}", '{"city": ']
        assert streamed["content"] == text[text.index("Wien") :]
        assert whole["finish_reason"] == streamed["finish_reason"] == "stop"

    serving(scenario, tokenizer=directory, reply=says(directory, text))


def test_a_stop_string_ends_a_call_like_any_text(directory: str) -> None:
    text = f"See: {call_text(('weather', WIEN))} and more"

    async def scenario(client: Client) -> None:
        for stop, content, reason in [
            ("Wien", text[: text.index("Wien")], "stop"),
            (" and", "See: ", "tool_calls"),
            (MARKERS[1], "See: ", "tool_calls"),
            ("See", "", "stop"),
        ]:
            fields = {"messages": HELLO, "tools": TOOLS, "stop": [stop]}
            (whole,) = of_whole((await client.chat(**fields)).json).values()
            assert (whole["content"], whole["finish_reason"]) == (content, reason)
            assert whole["stop_reason"] == stop
            (streamed,) = joined((await client.chat(**fields, stream=True)).events).values()
            assert (streamed["finish_reason"], streamed["stop_reason"]) == (reason, stop)
            if stop != "Wien":
                assert without_ids({0: streamed}) == without_ids({0: whole})

    serving(scenario, tokenizer=directory, reply=says(directory, text))


def test_every_token_has_its_logprob_and_its_id(directory: str) -> None:
    text = f"See: {call_text(('weather', WIEN))}."
    ids = [*Tokenizer(directory).encode(text, add_special_tokens=False), EOS]

    async def scenario(client: Client) -> None:
        fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        (choice,) = (await both(client, **fields)).values()
        assert len(choice["logprobs"]) == len(ids)
        shown = "".join(each["token"] for each in choice["logprobs"])
        assert shown == text + "</s>"
        answer = await client.chat(messages=HELLO, tools=TOOLS, stream=True, **fields)
        pieces = [event["choices"][0] for event in answer.events[:-1]]
        assert [token for piece in pieces for token in piece.get("token_ids", [])] == ids

    serving(scenario, tokenizer=directory, reply=says(directory, text))


def test_b007_usage_counts_the_tokens_of_calls(directory: str) -> None:
    text = f"See: {call_text(('weather', WIEN))}"
    num_tokens = len(Tokenizer(directory).encode(text, add_special_tokens=False)) + 1
    options = {"include_usage": True, "continuous_usage_stats": True}

    async def scenario(client: Client) -> None:
        for n in (1, 3):
            fields = {"messages": HELLO, "tools": TOOLS, "n": n}
            usage = (await client.chat(**fields)).json["usage"]
            assert usage["completion_tokens"] == n * num_tokens
            answer = await client.chat(**fields, stream=True, stream_options=options)
            *pieces, last = answer.events[:-1]
            assert last["choices"] == []
            assert last["usage"] == usage
            counts = [piece["usage"]["completion_tokens"] for piece in pieces]
            assert counts == sorted(counts)
            assert counts[-1] == n * num_tokens
            assert client.engine.fake.stats["num_generated_tokens"] % num_tokens == 0

    serving(scenario, tokenizer=directory, reply=says(directory, text))


def test_without_tools_the_same_text_is_text(directory: str) -> None:
    text = f"See: {call_text(('weather', WIEN))}"

    async def scenario(client: Client) -> None:
        shown = (
            text if client.engine.tokenizer.special_id(MARKERS[0]) is None else text.replace(MARKERS[0], "")
        )
        shown = shown if shown == text else shown.replace(MARKERS[1], "")
        for fields in ({"tools": []}, {"tool_choice": "none"}, {"tools": None, "tool_choice": "auto"}):
            (choice,) = (await both(client, **fields)).values()
            assert (choice["content"], choice["calls"], choice["finish_reason"]) == (shown, [], "stop")
            assert "weather" not in prompt(client)

    serving(scenario, tokenizer=directory, reply=says(directory, text))


# ---- what the model is told


def test_the_template_gets_the_tools_as_they_are(directory: str) -> None:
    async def scenario(client: Client) -> None:
        strict = {
            **WEATHER,
            "function": {**WEATHER["function"], "strict": True, "return": {"type": "string"}},
        }
        assert (await client.chat(messages=HELLO, tools=[strict, NOW], max_tokens=1)).status == 200
        lines = prompt(client).splitlines()
        expected = {**WEATHER["function"], "return": {"type": "string"}}
        assert json.loads(lines[1]) == expected
        assert list(json.loads(lines[1])) == ["name", "description", "parameters", "return"]
        assert json.loads(lines[2]) == {"name": "now"}
        fields = {"messages": HELLO, "tools": TOOLS}
        ids = (await client.post("/tokenize", fields)).json["tokens"]
        answer = await client.chat(**fields, max_tokens=1, return_token_ids=True)
        assert answer.json["prompt_token_ids"] == ids

    serving(scenario, tokenizer=directory, reply=says(directory, "x"))


def test_a_template_without_a_place_for_tools() -> None:
    async def scenario(client: Client) -> None:
        for fields in ({}, {"tool_choice": "required"}, {"stream": True}):
            answer = await client.chat(messages=HELLO, tools=TOOLS, **fields)
            assert (answer.status, answer.error["param"]) == (400, "tools")
            assert "chat template has no place for them" in answer.error["message"]
        answer = await client.post("/tokenize", {"messages": HELLO, "tools": TOOLS})
        assert (answer.status, answer.error["param"]) == (400, "tools")
        answer = await client.chat(messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=1)
        assert answer.status == 200

    serving(scenario)


@pytest.mark.parametrize(
    ("template", "takes_tools"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ tools }}", True),
        (
            "{% macro show(tools) %}{% for t in tools %}{{ t }}{% endfor %}{% endmacro %}{{ show(tools) }}",
            True,
        ),
        (
            "{% for m in messages %}{% if tools is not none %}{{ tools }}{% endif %}{% endfor %}",
            True,
        ),
        ("{{ messages[0].content }}", False),
        ("{# tools #}{{ 'tools' }}{{ messages[0].tools }}{% set tools = 3 %}", False),
    ],
)
def test_whether_a_template_has_a_place_for_tools(template: str, takes_tools: bool) -> None:
    assert ChatTemplate(template).takes_tools is takes_tools


def replay(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function, **more}
    return [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


def test_a_conversation_goes_on_after_a_call(directory: str) -> None:
    """With what the server answered, as a client sends it back."""

    async def scenario(client: Client) -> None:
        message = (await client.chat(messages=HELLO, tools=TOOLS)).json["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        dumped = {**message, "refusal": None, "function_call": None, "audio": None}
        assert (await client.chat(messages=[*HELLO, dumped, result], tools=TOOLS)).status == 200
        shown = f'{MARKERS[0]}[{{"name": "weather", "arguments": {WIEN}}}]{MARKERS[1]}'
        assert f"<assistant>{shown}<tool>sunny (of {call['id']})<assistant>" in prompt(client)

    serving(scenario, tokenizer=directory, reply=says(directory, call_text(("weather", WIEN))))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}'),
        ("", "{}"),
        (" ", "{}"),
        ("not json {", '"not json {"'),
        ('{"a": ', '"{\\"a\\": "'),
        ("[1]", '"[1]"'),
        ("NaN", '"NaN"'),
        ('{"a": NaN}', '"{\\"a\\": NaN}"'),
        (r'{"a": "\ud800"}', '"{\\"a\\": \\"\\\\ud800\\"}"'),
        ('{"a": ' + "[" * 1100, None),
        ('{"a": ' + "9" * 1000 + "}", None),
    ],
)
def test_b028_arguments_of_every_kind_are_taken_back(
    tmp_path: Path, arguments: Any, shown: str | None
) -> None:
    directory = save_tokenizer(tmp_path, "plain")

    async def scenario(client: Client) -> None:
        for fields in ({}, {"tools": TOOLS}):
            answer = await client.chat(messages=replay(arguments), max_tokens=1, **fields)
            assert answer.status == 200, answer.body
            if shown is not None:
                assert f'[{{"name": "weather", "arguments": {shown}}}]' in prompt(client)

    serving(scenario, tokenizer=directory)


def test_b028_a_template_that_needs_an_object(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.items() | list }}"
    )
    directory = save_tokenizer(tmp_path, "plain", template + "{% endfor %}{% endfor %}x")

    async def scenario(client: Client) -> None:
        assert (await client.chat(messages=replay('{"a": 1}'), max_tokens=1)).status == 200
        answer = await client.chat(messages=replay("not json {"), max_tokens=1)
        assert (answer.status, answer.error["param"]) == (400, "messages")

    serving(scenario, tokenizer=directory)


# ---- what may be written


def accepts(client: Client, directory: str, text: str, *, ends: bool = True) -> bool:
    """Whether the grammar of the newest request allows for this text, and for its end there."""
    wanted = sent(client)[-1].structured_outputs
    assert wanted is not None
    matcher = compile_matcher(load_tokenizer(client.engine.tokenizer.file, 0, [EOS]), wanted)
    ids = Backend.from_file(f"{directory}/tokenizer.json").encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and (matcher.is_accepting() or not ends)


def test_required_named_and_single_calls_have_a_grammar(directory: str) -> None:
    weather, now = ("weather", WIEN), ("now", "{}")
    one, other = call_text(weather), call_text(now)
    several = call_text(weather, now, weather)
    compact = f'{MARKERS[0]}[{{"name":"weather","arguments":{{"city":"Wien"}}}}]{MARKERS[1]}'
    wrong = call_text(("weather", '{"city": 3}'))
    extra = call_text(("now", '{"zone": "UTC"}'))
    unknown = call_text(("wether", WIEN))
    required, named = {"tool_choice": "required"}, {"tool_choice": NAMED}
    single = {"parallel_tool_calls": False}
    cases: list[tuple[dict[str, Any], list[str], list[str]]] = [
        (required, [one, other, several, compact], ["hello", wrong, extra, unknown, f"hi {one}", f"{one} x"]),
        (required | single, [one, other, compact], ["hello", several, wrong, extra]),
        (named, [one, compact], ["hello", other, several, wrong]),
        (named | {"parallel_tool_calls": True}, [one], [several]),
        (single, ["hello", one, f"hi {other}", wrong, extra, "a < b"], [several, unknown, f"hi {several}"]),
    ]

    async def scenario(client: Client) -> None:
        for fields, good, bad in cases:
            answer = await client.chat(messages=HELLO, tools=TOOLS, max_tokens=1, **fields)
            assert answer.status == 200, answer.body
            for text in good:
                assert accepts(client, directory, text), (fields, text)
            for text in bad:
                assert not accepts(client, directory, text), (fields, text)
        for fields in ({}, {"parallel_tool_calls": True}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
            await client.chat(messages=HELLO, tools=TOOLS, max_tokens=1, **fields)
            assert sent(client)[-1].structured_outputs is None

    serving(scenario, tokenizer=directory, reply=says(directory, "x"))


def test_references_in_a_schema_mean_what_they_meant(directory: str) -> None:
    def tree(kind: str) -> dict[str, Any]:
        node = {"type": "object", "properties": {"v": {"type": kind}, "next": {"$ref": "#/$defs/node"}}}
        node |= {"additionalProperties": False, "required": ["v"]}
        root = {"type": "object", "properties": {"$ref": {"$ref": "#/$defs/node"}}, "required": ["$ref"]}
        return {**root, "$defs": {"node": node}, "$schema": "http://json-schema.org/draft-07/schema#"}

    tools = [
        {"type": "function", "function": {"name": name, "parameters": tree(kind)}}
        for name, kind in [("ints", "integer"), ("texts", "string")]
    ]

    async def scenario(client: Client) -> None:
        fields = {"tools": tools, "tool_choice": "required", "max_tokens": 1}
        answer = await client.chat(messages=HELLO, **fields)
        assert answer.status == 200, answer.body
        for name, value in [("ints", "1"), ("texts", '"a"')]:
            text = f'{{"$ref": {{"v": {value}, "next": {{"v": {value}}}}}}}'
            assert accepts(client, directory, call_text((name, text)))
            for other in ("ints", "texts"):
                assert accepts(client, directory, call_text((other, text))) == (other == name)
            assert not accepts(client, directory, call_text((name, text.replace("$ref", "other"))))

    serving(scenario, tokenizer=directory, reply=says(directory, "x"))


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_schema_with_no_type_is_one_of_an_object(directory: str) -> None:
    either = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}

    async def scenario(client: Client) -> None:
        for schema, good, bad in [
            ({}, ["{}", '{"a": 1}'], ["3", "[]", "null"]),
            ({"properties": {"a": {"type": "integer"}}}, ["{}", '{"a": 1}'], ["3", '{"a": "b"}']),
            (either, ['{"a": 1}', '{"b": 1}'], ["3", "{}"]),
        ]:
            fields = {"messages": HELLO, "tools": [tool("f", schema)], "tool_choice": "required"}
            assert (await client.chat(**fields, max_tokens=1)).status == 200
            for text in good:
                assert accepts(client, directory, call_text(("f", text))), (schema, text)
            for text in bad:
                assert not accepts(client, directory, call_text(("f", text))), (schema, text)

    serving(scenario, tokenizer=directory, reply=says(directory, "x"))


def test_a_keyword_that_cant_be_enforced_is_named_with_its_tool(directory: str) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    endless = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 9_999_991}}}

    async def scenario(client: Client) -> None:
        tools = [WEATHER, tool("strange", unique), NOW]
        for choice in ("required", {"type": "function", "function": {"name": "strange"}}):
            answer = await client.chat(messages=HELLO, tools=tools, tool_choice=choice)
            assert (answer.status, answer.error["param"]) == (400, "tools[1].function.parameters")
            assert answer.error["message"].endswith(": can't be enforced: uniqueItems (of the tool strange)")
        wide = {"type": "object", "properties": {"id": {"enum": [2**53 + 1]}}}
        answer = await client.chat(messages=HELLO, tools=[NOW, tool("by_id", wide)], tool_choice="required")
        assert (answer.status, answer.error["param"]) == (400, "tools[1].function.parameters")
        assert "can't be enforced: enum, with an integer that a float can't" in answer.error["message"]
        assert answer.error["message"].endswith("(of the tool by_id)")
        for fields in ({}, {"parallel_tool_calls": False}, {"tool_choice": NAMED}):
            answer = await client.chat(messages=HELLO, tools=tools, max_tokens=1, **fields)
            assert answer.status == 200, answer.body
        answer = await client.chat(messages=HELLO, tools=[tool("f", endless)], tool_choice="required")
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "too complex" in answer.error["message"]

    serving(scenario, tokenizer=directory, reply=says(directory, "x"))


def test_fields_that_contradict_each_other(directory: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

    async def scenario(client: Client) -> None:
        for name, value in [
            ("response_format", {"type": "json_object"}),
            ("response_format", schema),
            ("structured_outputs", {"json": {"type": "object"}}),
            ("structured_outputs", {"regex": "a"}),
            ("structured_outputs", {"choice": ["a"]}),
        ]:
            is_json = name == "response_format" or "json" in value
            required = ({"tool_choice": "required"}, {"tool_choice": NAMED})
            for fields in required if is_json else (*required, {}, {"tool_choice": "auto"}):
                answer = await client.chat(messages=HELLO, tools=TOOLS, **{name: value}, **fields)
                assert (answer.status, answer.error["param"]) == (400, name)
            for fields in ({"tool_choice": "none"}, {"tools": []}):
                answer = await client.chat(
                    **{"messages": HELLO, "tools": TOOLS, "max_tokens": 1, name: value} | fields
                )
                assert answer.status == 200, answer.body
        text = {"response_format": {"type": "text"}, "tool_choice": "required"}
        assert (await client.chat(messages=HELLO, tools=TOOLS, **text, max_tokens=1)).status == 200
        ids = {"allowed_token_ids": [5], "tool_choice": "required"}
        answer = await client.chat(messages=HELLO, tools=TOOLS, **ids)
        assert (answer.status, answer.error["param"]) == (400, "allowed_token_ids")

    serving(scenario, tokenizer=directory, reply=says(directory, "x"))


def test_an_answer_in_a_format_or_calls(directory: str) -> None:
    schema = {"type": "object", "properties": {"$defs": {"type": "integer"}}, "required": ["$defs"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def scenario(client: Client) -> None:
        fields = {"messages": HELLO, "tools": TOOLS, "max_tokens": 1}
        several = call_text(("now", "{}"), ("weather", WIEN))
        for more in ({}, {"parallel_tool_calls": False}):
            answer = await client.chat(**fields, **more, response_format=form)
            assert answer.status == 200, answer.body
            assert accepts(client, directory, '{"$defs": 3}')
            assert accepts(client, directory, call_text(("now", "{}")))
            assert accepts(client, directory, several) == (not more)
            for text in ('{"$defs": "a"}', "hello", f'{{"$defs": 3}}{several}', call_text(("then", "{}"))):
                assert not accepts(client, directory, text), text
        await client.chat(**fields, response_format={"type": "json_object"})
        assert accepts(client, directory, '{"a": [1]}')
        assert not accepts(client, directory, "[1]")
        form["json_schema"]["schema"] = {"not": {}}
        answer = await client.chat(**fields, response_format=form)
        assert (answer.status, answer.error["param"]) == (400, "response_format")

    serving(scenario, tokenizer=directory, reply=says(directory, "x"))


# ---- what is refused


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": "f"}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function"),
    ({"tools": [WEATHER, named("")]}, "tools[1].function.name"),
    ({"tools": [named("a b")]}, "tools[0].function.name"),
    ({"tools": [named("f\n")]}, "tools[0].function.name"),
    ({"tools": [named("é")]}, "tools[0].function.name"),
    ({"tools": [named("f" * 65)]}, "tools[0].function.name"),
    ({"tools": [named(3)]}, "tools[0].function.name"),
    ({"tools": [WEATHER, NOW, WEATHER]}, "tools[2].function.name"),
    ({"tools": [tool("f", True)]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", "{}")]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", {"type": "string"})]}, "tools[0].function"),
    ({"tools": [tool("f", {"type": ["object", "null"]})]}, "tools[0].function"),
    ({"tools": [named(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [tool("f", {"description": "x" * 70_000})]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": []}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {**named("weather"), "mode": "auto"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "weather"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": "weather"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": named("wether")}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": named("weather")}, "tool_choice.function.name"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [WEATHER["function"]]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": replay(3)}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": replay(" " * 200_000)}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": replay(None)}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": replay("{}", function={})}, "messages[1].tool_calls[0].function.name"),
    ({"messages": replay("{}", function={"name": ""})}, "messages[1].tool_calls[0].function.name"),
    ({"messages": replay("{}", function=None)}, "messages[1].tool_calls[0].function"),
    ({"messages": replay("{}", type="custom")}, "messages[1].tool_calls[0].type"),
    ({"messages": replay("{}", id=1)}, "messages[1].tool_calls[0].id"),
    ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [named("f")]}]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0]"),
]


def test_what_is_refused_is_named(directory: str) -> None:
    async def scenario(client: Client) -> None:
        for fields, param in REFUSED:
            for stream in (False, True):
                answer = await client.chat(**{"messages": HELLO, "stream": stream} | fields)
                assert (answer.status, answer.error["param"]) == (400, param), (fields, answer.body)
                assert len(answer.error["message"]) < 300
        assert sent(client) == []
        for fields in (
            {"tools": [named("f" * 64), named("A-b_9")]},
            {"tools": [named(f"f{i}") for i in range(128)]},
            {"tools": [tool("f", {"properties": {}, "description": None})]},
            {"tools": [tool("f", None)]},
            {"messages": [*HELLO, {"role": "assistant", "content": "a", "tool_calls": []}, *HELLO]},
            {"messages": [{"role": "user", "content": "a", "tool_calls": None, "tool_call_id": None}]},
        ):
            answer = await client.chat(**{"messages": HELLO, "max_tokens": 1} | fields)
            assert answer.status == 200, (fields, answer.body)

    serving(scenario, tokenizer=directory, reply=says(directory, "x"), max_model_len=32_768)


def test_tools_to_the_last_byte(directory: str) -> None:
    one = tool("f", {"type": "object"})
    size = len(json.dumps(one, separators=(",", ":")))

    async def scenario(client: Client) -> None:
        assert (await client.chat(messages=HELLO, tools=[one], max_tokens=1)).status == 200
        longer = tool("ff", {"type": "object"})
        answer = await client.chat(messages=HELLO, tools=[longer], max_tokens=1)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "server.limits.schema_bytes" in answer.error["message"]
        answer = await client.post("/tokenize", {"messages": HELLO, "tools": [longer]})
        assert (answer.status, answer.error["param"]) == (400, "tools")

    options: dict[str, Any] = {"server": {"limits": {"schema_bytes": size}}}
    serving(scenario, tokenizer=directory, reply=says(directory, "x"), **options)


@pytest.mark.parametrize(
    "place",
    [
        '"tools": [{"type": "function", "function": {"name": "%s"}}]',
        '"tools": [{"type": "function", "function": {"name": "f", "description": "%s"}}]',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"%s": 1}}}]',
        '"tool_choice": {"type": "function", "function": {"name": "%s"}}',
        '"messages": [{"role": "tool", "content": "a", "tool_call_id": "%s"}]',
        '"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "%s"}}]}]',
        '"messages": [{"role": "assistant", "tool_calls": [{"id": "%s", "function": {"name": "f"}}]}]',
    ],
)
def test_b031_half_of_a_surrogate_pair_in_a_tool(tmp_path: Path, place: str) -> None:
    async def scenario(client: Client) -> None:
        for stream in ("true", "false"):
            body = "{" + place % r"\ud800" + f', "stream": {stream}}}'
            answer = await client.post("/v1/chat/completions", body.encode())
            assert (answer.status, answer.error["code"]) == (400, "invalid_json")

    serving(scenario, tokenizer=save_tokenizer(tmp_path))


def ignored(answer: Answer) -> str | None:
    assert answer.status == 200, answer.body
    return answer.headers.get("x-hybridserve-ignored-fields")


def test_what_has_no_effect_is_accepted_and_named(directory: str) -> None:
    strict = tool("f", {"type": "object"})
    strict["function"]["strict"] = True

    async def scenario(client: Client) -> None:
        base = {"messages": HELLO, "max_tokens": 1}
        assert ignored(await client.chat(**base, parallel_tool_calls=False)) == "parallel_tool_calls"
        assert ignored(await client.chat(**base, tools=TOOLS, parallel_tool_calls=True)) is None
        assert ignored(await client.chat(**base, tools=[strict])) == "tools.strict"
        assert ignored(await client.chat(**base, tools=[strict], user="me")) == "user, tools.strict"
        assert ignored(await client.chat(**base, tools=[strict], tool_choice="required")) is None
        assert (await client.series())['hybridserve_ignored_fields_total{field="tools.strict"}'] == 2

    serving(scenario, tokenizer=directory, reply=says(directory, "x"))


# ---- the real thing


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_must_call_what_it_has_never_seen(tmp_path: Path, kind: str) -> None:
    """It knows nothing of tools or JSON: the grammar alone makes a call of what it writes. `plain`: the demo;
    `special`: a random model of bytes."""
    parameters = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Wien", "Rom"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [tool("weather", parameters), NOW]
    if kind == "special":
        save_byte_model(tmp_path, max_position_embeddings=2048)
    options = [] if kind == "special" else ["--tokenizer", str(tmp_path)]
    save_tokenizer(tmp_path, kind)
    with server(*options, file=tmp_path if kind == "special" else None) as one:
        for choice, names in [("required", {"weather", "now"}), (named("weather"), {"weather"})]:
            for seed in range(3):
                fields = {"messages": HELLO, "tools": tools, "tool_choice": choice, "seed": seed}
                fields |= {"parallel_tool_calls": False, "max_tokens": 1000}
                status, answer = one.post("/v1/chat/completions", fields)
                assert status == 200, answer
                (made,) = answer["choices"]
                assert made["finish_reason"] == "tool_calls"
                assert made["message"]["content"] is None
                (call,) = made["message"]["tool_calls"]
                assert call["function"]["name"] in names
                arguments = json.loads(call["function"]["arguments"])
                if call["function"]["name"] == "weather":
                    assert arguments["city"] in ("Wien", "Rom")
                    assert arguments["days"] in range(1, 10)
                else:
                    assert arguments == {}
                back = [*HELLO, made["message"], {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
                status, answer = one.post(
                    "/v1/chat/completions", {"messages": back, "tools": tools, "max_tokens": 1}
                )
                assert status == 200, answer
