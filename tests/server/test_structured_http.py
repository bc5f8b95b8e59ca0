"""Structured outputs over HTTP: what an engine is asked for, what is refused, and that nobody is held up."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.frontend import protocol
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from hybridserve.core.request import SamplingParams
    from tests.harness.asgi import Answer, Client

HELLO = [{"role": "user", "content": "hello"}]
BOTH = ["completions", "chat"]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def ask(client: Client, kind: str, **fields: Any) -> Answer:
    base: dict[str, Any] = {"max_tokens": 1}
    base |= {"prompt": "hello"} if kind == "completions" else {"messages": HELLO}
    path = "/v1/completions" if kind == "completions" else "/v1/chat/completions"
    return await client.post(path, base | fields)


def sent(client: Client) -> list[SamplingParams]:
    """The parameters of the requests that the engine has got."""
    return [
        message.request.params for message in client.engine.fake.received if type(message) is protocol.Add
    ]


@pytest.mark.parametrize("kind", BOTH)
def test_every_way_to_ask_reaches_the_engine(kind: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    cases: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json={"type": "object"})),
        ({"response_format": schema}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, StructuredOutputs(json={"type": "null"})),
        ({"structured_outputs": {"regex": "[a-c]+"}}, StructuredOutputs(regex="[a-c]+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputs(grammar='start: "a"')),
    ]

    async def scenario(client: Client) -> None:
        for fields, expected in cases:
            answer = await ask(client, kind, **fields)
            assert answer.status == 200, answer.body
            assert sent(client)[-1].structured_outputs == expected
        more = {"include_stop_str_in_output": True, "allowed_token_ids": [5, 6]}
        assert (await ask(client, kind, **more)).status == 200
        assert sent(client)[-1].allowed_token_ids == (5, 6)
        assert sent(client)[-1].include_stop_str_in_output

    serving(scenario)


BAD_SCHEMAS: list[Any] = [
    {"type": "foo"},
    {"type": 5},
    {"type": []},
    {"type": ["string", "foo"]},
    {"type": "string", "minLength": -1},
    {"type": "string", "maxLength": 1.5},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": 3},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "format": "colour"},
    {"type": "string", "format": 3},
    {"type": "integer", "minimum": 5, "maximum": 2},
    {"type": "integer", "minimum": "3"},
    {"type": "integer", "multipleOf": 0},
    {"type": "array", "items": 3},
    {"type": "array", "minItems": -1},
    {"type": "array", "minItems": 5, "maxItems": 2},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {}},
    {"type": "array", "contains": {}, "minContains": 2},
    {"type": "object", "required": "a"},
    {"type": "object", "required": [3]},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": 3},
    {"type": "object", "properties": {"a": 3}},
    {"type": "object", "properties": {"a": {"not": {}}}},
    {"type": "object", "patternProperties": {"(": {}}},
    {"type": "object", "additionalProperties": 3},
    {"type": "object", "propertyNames": {"pattern": "a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {}}},
    {"type": "object", "dependencies": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "array", "unevaluatedItems": False},
    {"type": "null", "const": 3},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {}},
    {"enum": []},
    {"enum": 3},
    {"anyOf": 3},
    {"anyOf": []},
    {"allOf": {}},
    {"allOf": [{"type": "string"}, {"type": "number"}]},
    {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]},
    {"$ref": 3},
    {"$ref": "#/nope"},
    {"$ref": "http://127.0.0.1:1/schema"},
    {"$dynamicRef": "#a"},
    {"x-guidance": {"lenient": True}},
    {"enum": [f"{i}" * 40 for i in range(4000)]},
    False,
]
OTHERS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "["}},
    {"structured_outputs": {"regex": r"\1"}},
    {"structured_outputs": {"regex": 3}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": "ab"}},
    {"structured_outputs": {"choice": [1]}},
    {"structured_outputs": {"grammar": "start: x"}},
    {"structured_outputs": {"grammar": "root ::= ("}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": 3}},
    {"structured_outputs": {"json": [SCHEMA]}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": {"regex": "a", "backend": "x"}},
    {"structured_outputs": {}},
    {"structured_outputs": "a"},
    {"response_format": {"type": "regex"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    {"response_format": "json_object"},
    {"allowed_token_ids": [-1]},
    {"allowed_token_ids": [4096]},
    {"allowed_token_ids": [2**31]},
    {"allowed_token_ids": [2**63]},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [True]},
    {"allowed_token_ids": [4096], "min_tokens": 1},
    {"allowed_token_ids": [3], "structured_outputs": {"regex": "a"}},
    {"include_stop_str_in_output": 1},
]


def test_s009_bad_schemas_are_the_clients_mistake_and_never_reach_the_engine() -> None:
    assert len(BAD_SCHEMAS) >= 50

    async def scenario(client: Client) -> None:
        for schema in BAD_SCHEMAS:
            answer = await ask(client, "chat", structured_outputs={"json": schema})
            assert answer.status == 400, (schema, answer.body)
            assert answer.error["param"] == "structured_outputs.json"
            wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            answer = await ask(client, "chat", response_format=wrapped)
            assert (answer.status, answer.error["param"]) == (400, "response_format"), answer.body
        for fields in OTHERS:
            answer = await ask(client, "completions", **fields)
            assert answer.status == 400, (fields, answer.body)
            assert answer.error["param"].split(".")[0].split("[")[0] in fields, answer.body
            assert len(answer.error["message"]) < 400
        assert sent(client) == []
        assert (await ask(client, "chat", structured_outputs={"json": SCHEMA})).status == 200

    serving(scenario)


def test_a_keyword_that_cant_be_enforced_is_named() -> None:
    async def scenario(client: Client) -> None:
        for keyword, schema in [("uniqueItems", {"uniqueItems": True}), ("not", {"items": {"not": {}}})]:
            answer = await ask(client, "chat", structured_outputs={"json": schema})
            assert answer.error["message"] == f"structured_outputs.json: can't be enforced: {keyword}"

    serving(scenario)


def test_the_largest_schema_to_the_last_byte() -> None:
    async def scenario(client: Client) -> None:
        for length, status in ((100, 200), (101, 400)):
            answer = await ask(client, "chat", structured_outputs={"regex": "é" * 49 + "a" * (length - 98)})
            assert answer.status == status, answer.body
        assert "server.limits.schema_bytes" in answer.error["message"]

    serving(scenario, server={"limits": {"schema_bytes": 100}})


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_b048_the_old_spelling_is_refused_with_the_new_one(kind: str) -> None:
    async def scenario(client: Client) -> None:
        answer = await ask(client, "chat", **{f"guided_{kind}": "x"})
        assert answer.status == 400
        assert f"use structured_outputs.{kind}" in answer.error["message"]

    serving(scenario)


def test_s011_a_schema_that_never_compiles_holds_up_only_those_that_have_one() -> None:
    async def scenario(client: Client) -> None:
        await ask(client, "chat", structured_outputs={"regex": "a"})  # the worker is there
        endless = {"json": {"type": "integer", "multipleOf": 9_999_991}}
        hostile = asyncio.create_task(ask(client, "chat", structured_outputs=endless))
        longest = 0.0
        num_served = 0
        while not hostile.done():
            begin = time.monotonic()
            assert (await ask(client, "chat")).status == 200
            longest = max(longest, time.monotonic() - begin)
            num_served += 1
            await asyncio.sleep(0.02)
        answer = await hostile
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs.json")
        assert "too complex" in answer.error["message"]
        assert num_served > 10
        assert longest < 1.0  # on a busy machine; alone, some milliseconds

    serving(scenario)
