"""Which fields are honoured, which are accepted without effect, and which are refused: never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.core.request import MAX_LOGPROBS, MAX_N
from hybridserve.server.fields import HARMLESS, REFUSED, WITHOUT_EFFECT
from hybridserve.server.protocol import ChatRequest, CompletionRequest
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from tests.harness.asgi import Answer, Client

HELLO = [{"role": "user", "content": "hello"}]
BOTH = ["completions", "chat"]


def ask(client: Client, kind: str, **fields: Any) -> Any:
    base: dict[str, Any] = {"max_tokens": 1}
    base |= {"prompt": "hello"} if kind == "completions" else {"messages": HELLO}
    return client.post("/v1/completions" if kind == "completions" else "/v1/chat/completions", base | fields)


def refused(answer: Answer, param: str) -> None:
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert answer.error["message"].startswith(f"{param}: ")
    assert answer.error["type"] == "invalid_request_error"


def test_the_tables_do_not_contradict_each_other():
    for model in (ChatRequest, CompletionRequest):
        served = set(model.model_fields)
        assert served & HARMLESS <= {"parallel_tool_calls"}
        assert served & set(REFUSED) <= {"tools", "tool_choice"}
        assert served & set(WITHOUT_EFFECT) <= {"echo", "add_generation_prompt", "tools", "tool_choice"}
    assert not HARMLESS & (set(REFUSED) | set(WITHOUT_EFFECT))


@pytest.mark.parametrize("kind", BOTH)
def test_harmless_fields_are_accepted_named_and_counted(kind):
    async def scenario(client: Client) -> None:
        for stream in (False, True):
            answer = await ask(client, kind, user="me", metadata={"a": "b"}, store=True, stream=stream)
            assert answer.status == 200
            assert answer.headers["x-hybridserve-ignored-fields"] == "metadata, store, user"
        assert "x-hybridserve-ignored-fields" not in (await ask(client, kind)).headers
        assert (await client.series())['hybridserve_ignored_fields_total{field="user"}'] == 2

    serving(scenario)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "key", ["05", "1_0", " 5", "5 ", "+5", "-5", "\u0665", "5.0", "", "a", "5\n", "9" * 11]
)
def test_keys_of_logit_bias_are_plain_ids(kind, key):
    """Other writings of a number would make one id of two keys."""

    async def scenario(client: Client) -> None:
        refused(await ask(client, kind, logit_bias={key: 1, "5": 2}), "logit_bias")
        assert (await ask(client, kind, logit_bias={"0": 1, "50": 2})).status == 200
        assert client.engine.fake.received[-1].request.params.logit_bias == {0: 1.0, 50: 2.0}

    serving(scenario)


@pytest.mark.parametrize("kind", BOTH)
def test_stream_options(kind):
    async def scenario(client: Client) -> None:
        async def events(**options: Any) -> Any:
            answer = await ask(client, kind, stream=True, stream_options=options, max_tokens=3)
            assert answer.status == 200, answer.body
            told = answer.headers.get("x-hybridserve-ignored-fields")
            assert told == (
                "stream_options.include_obfuscation" if options.get("include_obfuscation") else None
            )
            return answer.events[:-1]

        each = await events(continuous_usage_stats=True)
        assert all(event["choices"] for event in each), "nobody asked for a last one"
        assert each[-1]["usage"]["completion_tokens"] == 3
        for options in ({"include_usage": None}, {"continuous_usage_stats": None}, {}):
            assert all("usage" not in event for event in await events(**options))
        last = (await events(include_usage=True, continuous_usage_stats=None, include_obfuscation=True))[-1]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
        for bad in ({"include_usage": 1}, {"include_obfuscation": "yes"}, {"other": True}):
            answer = await ask(client, kind, stream=True, stream_options=bad)
            refused(answer, f"stream_options.{next(iter(bad))}")

    serving(scenario)


@pytest.mark.parametrize("kind", BOTH)
def test_max_completion_tokens_is_max_tokens(kind):
    async def scenario(client: Client) -> None:
        answer = await ask(client, kind, max_tokens=None, max_completion_tokens=3)
        assert answer.json["usage"]["completion_tokens"] == 3
        assert (await ask(client, kind, max_tokens=3, max_completion_tokens=3)).status == 200
        refused(await ask(client, kind, max_tokens=3, max_completion_tokens=4), "max_tokens")
        much = await ask(client, kind, max_tokens=None, max_completion_tokens=5000)
        refused(much, "max_completion_tokens")
        less = await ask(client, kind, max_tokens=None, max_completion_tokens=3, min_tokens=4)
        assert less.status == 400
        if kind == "completions":
            scored = await ask(
                client, kind, max_tokens=None, max_completion_tokens=0, echo=True, logprobs=1, n=2
            )
            assert scored.json["usage"]["completion_tokens"] == 0

    serving(scenario)


@pytest.mark.parametrize("kind", BOTH)
def test_b048_foreign_fields_are_refused_with_what_to_do(kind):
    async def scenario(client: Client) -> None:
        served = (ChatRequest if kind == "chat" else CompletionRequest).model_fields
        for name in REFUSED.keys() - served.keys():
            answer = await ask(client, kind, **{name: "anything"})
            refused(answer, name)
            assert answer.error["code"] == "unsupported_field"
            assert (await ask(client, kind, **{name: None})).status == 200

    serving(scenario)


def test_values_that_ask_for_what_is_done_anyway():
    async def scenario(client: Client) -> None:
        for name, values in WITHOUT_EFFECT.items():
            for value in values:
                assert (await ask(client, "chat", **{name: value})).status == 200
            refused(await ask(client, "chat", **{name: 7}), name)

    serving(scenario)


@pytest.mark.parametrize("kind", BOTH)
def test_unknown_fields_are_refused_with_the_nearest(kind):
    async def scenario(client: Client) -> None:
        for name, near in [("temprature", "temperature"), ("max_token", "max_tokens"), ("zzz", None)]:
            answer = await ask(client, kind, **{name: 1})
            refused(answer, name)
            assert answer.error["code"] == "unknown_field"
            assert (f"did you mean {near}?" in answer.error["message"]) == (near is not None)

    serving(scenario)


def test_s031_an_unknown_name_is_repeated_harmlessly():
    async def scenario(client: Client) -> None:
        answer = await ask(client, "chat", **{"x\r\n\x1b[31m" + "y" * 10_000: 1})
        message = answer.error["message"]
        assert len(message) < 200
        assert message.isprintable()

    serving(scenario)


OUT_OF_RANGE: dict[str, list[Any]] = {
    "n": [0, -1, True, "3", 1.5, 129, 10**9, 2**63, 10**30],
    "max_tokens": [-1, True, "3", 1.5, 2**31, 2**63],
    "min_tokens": [-1, True, "1", 2**31],
    "temperature": [-1, "1", True, 1001],
    "top_p": [-0.1, 0, 1.1, "1"],
    "top_k": [-2, 1.5, True, 2**31],
    "min_p": [-0.1, 1.1],
    "seed": ["1", 1.5, True, 2**64, -(2**63) - 1],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, 101, -1],
    "stop": [5, [5], [""], "", ["a"] * 17, "x" * 257, [["a"]], {"a": 1}],
    "stop_token_ids": [5, ["5"], [True], [1.5], [-1], [1] * 1025],
    "logit_bias": [[], {"a": 1}, {"5": "1"}, {"5": 101}, {"5": True}, {str(i): 1 for i in range(1025)}],
    "ignore_eos": [1, "true"],
    "stream": [1, "true"],
    "stream_options": [True, {"include_usage": 1}, {"other": True}],
    "prompt_logprobs": [-1, 21, True],
    "truncate_prompt_tokens": [0, -1, True],
    "priority": [1, -1, "0", True, 2**31],
    "return_token_ids": [1],
    "model": [5, True],
}


@pytest.mark.parametrize("kind", BOTH)
def test_s014_s015_s018_values_out_of_range(kind):
    async def scenario(client: Client) -> None:
        for name, values in OUT_OF_RANGE.items():
            for value in values:
                more = {"stream": True} if name == "stream_options" else {}
                answer = await ask(client, kind, **{name: value}, **more)
                assert answer.status == 400, (name, value, answer.body)
                assert answer.error["param"].split(".")[0].split("[")[0] == name, answer.body

    serving(scenario)


def test_numbers_that_are_none():
    async def scenario(client: Client) -> None:
        for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e400"):
            body = f'{{"prompt": "a", "temperature": {number}}}'.encode()
            answer = await client.post("/v1/completions", body)
            assert (answer.status, answer.error["code"]) == (400, "invalid_json")

    serving(scenario)


def test_the_limits_of_the_configuration_to_the_last():
    limits = {"n": 3, "logprobs": 4, "stop": 2, "stop_bytes": 6}

    async def scenario(client: Client) -> None:
        for name, good, bad in [
            ("n", 3, 4),
            ("logprobs", 4, 5),
            ("prompt_logprobs", 4, 5),
            ("stop", ["a", "b"], ["a", "b", "c"]),
            ("stop", "ééé", "éééx"),
        ]:
            assert (await ask(client, "completions", **{name: good})).status == 200
            answer = await ask(client, "completions", **{name: bad})
            refused(answer, name)
            assert "server.limits." in answer.error["message"]
        assert (await ask(client, "chat", logprobs=True, top_logprobs=4)).status == 200
        refused(await ask(client, "chat", logprobs=True, top_logprobs=5), "top_logprobs")

    serving(scenario, server={"limits": limits})


def test_the_limits_go_as_far_as_the_engine():
    from hybridserve.config.schema import LimitsConfig

    assert (LimitsConfig().n, LimitsConfig().logprobs) == (MAX_N, MAX_LOGPROBS)


@pytest.mark.parametrize("kind", BOTH)
def test_null_means_that_a_field_was_not_given(kind):
    async def scenario(client: Client) -> None:
        model = CompletionRequest if kind == "completions" else ChatRequest
        optional = [name for name, info in model.model_fields.items() if not info.is_required()]
        answer = await ask(client, kind, **{name: None for name in optional if name != "max_tokens"})
        assert answer.status == 200, answer.body

    serving(scenario)


def test_best_of_is_n_or_refused():
    async def scenario(client: Client) -> None:
        assert (await ask(client, "completions", best_of=1)).status == 200
        assert (await ask(client, "completions", best_of=2, n=2)).status == 200
        refused(await ask(client, "completions", best_of=2), "best_of")
        refused(await ask(client, "completions", best_of=10**9), "best_of")

    serving(scenario)


def test_b047_priority_only_where_it_means_something():
    async def first_come(client: Client) -> None:
        refused(await ask(client, "chat", priority=1), "priority")
        assert (await ask(client, "chat", priority=0)).status == 200

    async def by_priority(client: Client) -> None:
        assert (await ask(client, "chat", priority=-5)).status == 200
        assert client.engine.fake.received[-1].request.priority == -5

    serving(first_come)
    serving(by_priority, scheduler={"policy": "priority"})


def test_what_benchmark_clients_send_is_honoured():
    async def scenario(client: Client) -> None:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
        guidellm = {"messages": parts, "max_completion_tokens": 4, "max_tokens": 4, "ignore_eos": True}
        assert (await ask(client, "chat", **guidellm, stream=True, stream_options=usage)).status == 200
        evals = {
            "prompt": [[263, 688]],
            "echo": True,
            "logprobs": 1,
            "seed": 1234,
            "temperature": 0,
            "stop": None,
        }
        assert (await ask(client, "completions", **evals)).status == 200
        bench = {"repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True, "best_of": 1}
        assert (await ask(client, "completions", **bench)).status == 200

    serving(scenario)
