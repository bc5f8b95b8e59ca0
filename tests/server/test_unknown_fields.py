"""Fields that nobody knows, as `server.unknown_fields` has it, and spellings of other servers: none is
silently without effect."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from hybridserve.server.fields import REFUSED, WITHOUT_EFFECT
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from tests.harness.asgi import Client

WARN = {"server": {"unknown_fields": "warn"}}
HEADER = "x-hybridserve-ignored-fields"
FOREIGN = {
    # of other servers, and of older versions of the API
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "max_new_tokens": 5,
    "max_length": 5,
    "num_predict": 5,
    "num_ctx": 8,
    "n_predict": 5,
    "stop_regex": "a",
    "stop_sequences": ["a"],
    "repeat_penalty": 1.1,
    "typical_p": 0.5,
    "mirostat": 1,
    "grammar": "a",
    "json_schema": {},
    "regex": "a",
    "best_of": 4,
    "suffix": "a",
    "use_beam_search": True,
    "length_penalty": 2.0,
    "prompt_embeds": "a",
    "logits_processors": ["a"],
    "custom_logit_processor": "a",
    "lora_path": "a",
    "adapter_id": "a",
    "lora_request": {},
    "chat_template": "a",
    "functions": [{}],
    "function_call": "auto",
    "temprature": 1.0,
    "topp": 0.5,
    "maxTokens": 5,
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_b048_a_spelling_of_others_is_refused_by_name(path, name):
    async def scenario(client: Client) -> None:
        body = (
            {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        )
        answer = await client.post(path, {**body, "max_tokens": 1, name: FOREIGN[name]})
        assert answer.status == 400, answer.body
        assert answer.error["param"] == name
        assert client.engine.num_in_flight == 0

    serving(scenario)


def test_b048_what_is_refused_is_refused_under_warn_as_well():
    """It would change the answer; warning is for what nobody knows."""

    async def scenario(client: Client) -> None:
        for name in sorted(REFUSED.keys() - {"tools", "tool_choice"}):
            answer = await client.complete(prompt="a", max_tokens=1, **{name: ["something"]})
            assert (answer.status, answer.error["param"]) == (400, name)
        for name in WITHOUT_EFFECT.keys() - {"tools", "tool_choice", "echo"}:
            assert (await client.complete(prompt="a", max_tokens=1, **{name: "something"})).status == 400

    serving(scenario, **WARN)


def test_by_default_an_unknown_field_is_refused_with_the_nearest():
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt="a", max_tokns=1)
        assert (answer.status, answer.error["code"]) == (400, "unknown_field")
        assert answer.error["message"].endswith("did you mean max_tokens?")

    serving(scenario)


def test_under_warn_it_is_named_logged_once_and_counted(caplog):
    async def scenario(client: Client) -> None:
        with caplog.at_level(logging.WARNING, "hybridserve"):
            for _ in range(3):
                answer = await client.complete(prompt="a", max_tokens=2, wrong=1, user="me", other=None)
                assert answer.status == 200
                assert answer.headers[HEADER] == "user, other, wrong"
        assert [record.getMessage().split(" of a request")[0] for record in caplog.records] == [
            "the field other",
            "the field wrong",
        ]
        series = await client.series()
        assert series['hybridserve_ignored_fields_total{field="(unknown)"}'] == 6
        assert series['hybridserve_ignored_fields_total{field="user"}'] == 3
        stream = await client.chat(
            messages=[{"role": "user", "content": "a"}], max_tokens=2, wrong=1, stream=True
        )
        assert (stream.status, stream.headers[HEADER]) == (200, "wrong")

    serving(scenario, **WARN)


def test_under_warn_a_client_can_make_up_what_it_likes(caplog):
    """Neither the header, nor the log, nor the metrics grow with it; nor is anything forged in them."""

    async def scenario(client: Client) -> None:
        with caplog.at_level(logging.WARNING, "hybridserve"):
            for number in range(5):
                names = {f"made_up_{number}_{index}": 1 for index in range(100)}
                answer = await client.complete(prompt="a", max_tokens=1, **names)
                assert answer.status == 200
                listed = answer.headers[HEADER].split(", ")
                assert (len(listed), listed[-1]) == (17, "...")
            answer = await client.complete(prompt="a", max_tokens=1, **{"x\r\nset-cookie: a\x1b[31m客": 1})
            assert answer.status == 200
            assert answer.headers[HEADER].isascii()
            assert answer.headers[HEADER].isprintable()
            assert "set-cookie" not in answer.headers
        assert len(caplog.records) == 64
        assert len([name for name in await client.series() if "ignored_fields" in name]) == 1

    serving(scenario, **WARN)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/load_lora_adapter"])
def test_under_warn_every_path_does_the_same(path):
    async def scenario(client: Client) -> None:
        bodies = {
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [5]},
            "/v1/load_lora_adapter": {"lora_name": "law", "lora_path": "/a"},
        }
        answer = await client.post(path, {**bodies[path], "wrong": 1})
        assert (answer.status, answer.headers[HEADER]) == (200, "wrong")

    serving(scenario, **WARN)
