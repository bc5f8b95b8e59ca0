"""POST /v1/chat/completions, and what templates and messages may do."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hybridserve
from tests.harness.asgi import serving
from tests.harness.fake_engine import MAX_MODEL_LEN
from tests.harness.tools import TOOLS, save_tokenizer, says

if TYPE_CHECKING:
    from tests.harness.asgi import Client

DEMO = Path(hybridserve.__file__).parent / "models" / "demo"
HELLO = [{"role": "user", "content": "hello"}]


def with_template(directory: Path, template: str) -> str:
    """A tokenizer with this chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(directory)


def test_an_answer_and_its_stream():
    async def scenario(client: Client) -> None:
        fields = {"messages": HELLO, "max_tokens": 6, "n": 2, "logprobs": True, "top_logprobs": 2}
        whole = (await client.chat(**fields)).json
        assert whole["object"] == "chat.completion"
        assert whole["model"] == "demo"
        assert [choice["message"]["role"] for choice in whole["choices"]] == ["assistant"] * 2
        events = (await client.chat(**fields, stream=True)).events[:-1]
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in events}) == 1
        for choice in whole["choices"]:
            pieces = [
                event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]
            ]
            deltas = [piece["delta"] for piece in pieces]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert all("role" not in delta for delta in deltas[1:])
            assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
            reasons = [piece["finish_reason"] for piece in pieces]
            assert reasons == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
            scored = [each for piece in pieces if piece["logprobs"] for each in piece["logprobs"]["content"]]
            assert scored == choice["logprobs"]["content"]
            assert len(scored) == 6

    serving(scenario)


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
def test_who_speaks_is_said_first_of_all_choices_in_order(tools, tmp_path):
    """OpenAI's client makes its list of choices by the first pieces, where choice 0 may have nothing to say
    yet: its text may be the beginning of a stop string, or of a marker."""
    directory = save_tokenizer(tmp_path, "plain")
    late, soon = "wait a while, then more", "at once"

    async def scenario(client: Client) -> None:
        more = {"tools": TOOLS} if tools else {}
        answer = await client.chat(messages=HELLO, n=3, stop=["wait a while!"], stream=True, **more)
        pieces = [event["choices"][0] for event in answer.events[:-1]]
        assert [piece["index"] for piece in pieces[:3]] == [0, 1, 2]
        assert [piece["delta"] for piece in pieces[:3]] == [{"role": "assistant", "content": ""}] * 3
        assert pieces[3]["index"] != 0, "choice 0 was to be held back"
        assert all("role" not in piece["delta"] for piece in pieces[3:])
        for index, text in enumerate([late, soon, soon]):
            mine = [piece for piece in pieces if piece["index"] == index]
            assert "".join(piece["delta"].get("content", "") for piece in mine) == text
            assert mine[-1]["finish_reason"] == "stop"

    serving(scenario, tokenizer=directory, reply=says(directory, late, soon))


@pytest.mark.parametrize("count", [None, 0, 1, 20])
def test_logprobs(count):
    async def scenario(client: Client) -> None:
        answer = await client.chat(messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=count)
        for token in answer.json["choices"][0]["logprobs"]["content"]:
            assert bytes(token["bytes"]).decode() == token["token"]
            assert len(token["top_logprobs"]) == (count or 0)
            assert token["logprob"] < 0
        assert (await client.chat(messages=HELLO, top_logprobs=1)).error["param"] == "top_logprobs"
        assert (await client.chat(messages=HELLO, max_tokens=1)).json["choices"][0]["logprobs"] is None

    serving(scenario)


def test_without_max_tokens_the_context_is_the_limit():
    async def scenario(client: Client) -> None:
        usage = (await client.chat(messages=HELLO)).json["usage"]
        assert usage["total_tokens"] == MAX_MODEL_LEN
        over = await client.chat(messages=HELLO, max_completion_tokens=MAX_MODEL_LEN)
        assert over.error["code"] == "context_length_exceeded"
        for fields in (
            {"max_tokens": 3},
            {"max_completion_tokens": 3},
            {"max_tokens": 3, "max_completion_tokens": 3},
        ):
            assert (await client.chat(messages=HELLO, **fields)).json["usage"]["completion_tokens"] == 3
        two = await client.chat(messages=HELLO, max_tokens=3, max_completion_tokens=4)
        assert two.error["param"] == "max_tokens"

    serving(scenario)


def test_b030_one_beginning_of_sequence_however_it_is_asked():
    async def scenario(client: Client) -> None:
        ids = (await client.post("/tokenize", {"messages": HELLO})).json["tokens"]
        assert ids.count(1) == 1
        assert ids[0] == 1
        answer = await client.chat(messages=HELLO, max_tokens=1, return_token_ids=True)
        assert answer.json["prompt_token_ids"] == ids
        streamed = await client.chat(messages=HELLO, max_tokens=1, return_token_ids=True, stream=True)
        assert streamed.events[0]["prompt_token_ids"] == ids
        assert await client.engine.encode_chat(HELLO) == ids
        closed = await client.chat(
            messages=HELLO, max_tokens=1, return_token_ids=True, add_generation_prompt=False
        )
        assert closed.json["prompt_token_ids"] == ids[:-1]

    serving(scenario)


@pytest.mark.parametrize(
    "content",
    [
        "hello",
        [{"type": "text", "text": "hello"}],
        [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
    ],
    ids=["text", "part", "parts"],
)
def test_content_as_text_or_in_parts(content):
    async def scenario(client: Client) -> None:
        message = {"role": "user", "content": content, "id": "m1", "metadata": {"a": [1]}}
        assert (await client.chat(messages=[message], max_tokens=1)).status == 200
        whole = "\n".join(["hello"] if isinstance(content, str) else [part["text"] for part in content])
        ids = (await client.post("/tokenize", {"messages": [message]})).json["tokens"]
        plain = [{"role": "user", "content": whole}]
        assert ids == (await client.post("/tokenize", {"messages": plain})).json["tokens"]

    serving(scenario)


NO_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    ([{"role": "user"}], "messages[0]"),
    ([{"role": "user", "content": None}], "messages[0]"),
    ([{"content": "a"}], "messages[0].role"),
    ([*HELLO, {"role": "robot", "content": "a"}], "messages[1].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}],
        "messages[0].content",
    ),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content"),
    (["a"], "messages[0]"),
]


def test_s026_messages_that_are_none():
    async def scenario(client: Client) -> None:
        for messages, param in NO_MESSAGES:
            answer = await client.chat(messages=messages)
            assert (answer.status, answer.error["param"]) == (400, param), answer.body

    serving(scenario)


@pytest.mark.parametrize("arguments", ['{"a": 1}', "not json {", ""])
def test_b028_a_replayed_tool_call(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]

    async def scenario(client: Client) -> None:
        assert (await client.chat(messages=messages, max_tokens=1)).status in (200, 400)

    serving(scenario)


def test_b029_a_template_that_refuses(tmp_path):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('No system role here') }}{% endif %}x"

    async def scenario(client: Client) -> None:
        answer = await client.chat(messages=[{"role": "system", "content": "s"}, *HELLO])
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "No system role here" in answer.error["message"]
        assert (await client.chat(messages=HELLO, max_tokens=1)).status == 200

    serving(scenario, tokenizer=with_template(tmp_path, template))


@pytest.mark.parametrize(
    "template",
    [
        "{{ lipsum.__globals__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}{{ messages.__init__.__globals__ }}",
        "{% for k in ().__class__.__base__.__subclasses__() %}{{ k }}{% endfor %}",
    ],
)
def test_s007_a_template_that_looks_for_a_way_out(tmp_path, template):
    async def scenario(client: Client) -> None:
        answer = await client.chat(messages=HELLO)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "<class" not in answer.body.decode()

    serving(scenario, tokenizer=with_template(tmp_path, template))


SIXTY = "{% set ns = namespace(s='x', n=9) %}{% for i in range(60) %}"
HOSTILE = {
    "nested ranges": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops without ranges": "{% set s = 'abcdefghij' * 900 %}{% for a in s %}{% for b in s %}{% for c in s %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'x' * 10**9 }}",
    "a text doubled": SIXTY + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a list": "{{ ([0] * 10**9) | length }}",
    "a text joined": SIXTY + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a power": "{{ 10 ** 1000000 }}",
    "a product": SIXTY + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "macros": "{% macro f(n) %}{{ f(n + 1) if n < 60 }}{{ f(n + 1) if n < 60 }}{% endmacro %}{{ f(0) }}",
    "a block": "{% set x %}{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}{% endset %}{{ x }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "centred": "{{ 'x' | center(1000000000) }}",
    "indented": "{{ ('x\n' * 10000) | indent(1000000) }}",
    "replaced": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "formatted": "{{ '{:1000000000}'.format(1) }}",
    "padded": "{{ 'x'.ljust(1000000000) }}",
    "joined": "{{ ('x' * 100000) | join('y' * 100000) }}",
    "much output": "{% for i in range(100000) %}{{ 'x' * 10000 }}{% endfor %}",
    "lorem": "{{ lipsum(n=100000) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_s008_a_template_that_never_ends(tmp_path, name):
    """It is given up within seconds, takes no memory to speak of, and others are served meanwhile."""

    async def scenario(client: Client) -> None:
        begin = time.monotonic()
        call = client.start("POST", "/v1/chat/completions", {"messages": HELLO})
        waits: list[float] = []
        while not call.task.done():
            asked = time.monotonic()
            assert (await client.get("/health/live")).status == 200
            waits.append(time.monotonic() - asked)
        answer = await call.answer()
        assert (answer.status, answer.error["param"]) == (400, "messages"), answer.body
        assert time.monotonic() - begin < 20
        assert sorted(waits)[len(waits) * 9 // 10] < 0.25, "the event loop waited"

    before = peak_bytes()
    serving(scenario, tokenizer=with_template(tmp_path, HOSTILE[name]))
    assert peak_bytes() - before < 200 * 2**20


def peak_bytes() -> int:
    """Of this process's memory, since it began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def test_s008_a_request_brings_no_template():
    async def scenario(client: Client) -> None:
        for fields in (
            {"chat_template": "x"},
            {"chat_template_kwargs": {"chat_template": "x"}},
            {"chat_template_kwargs": {"a": 1}},
            {"documents": []},
        ):
            answer = await client.chat(messages=HELLO, **fields)
            assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))
        assert (await client.chat(messages=HELLO, chat_template_kwargs={}, max_tokens=1)).status == 200

    serving(scenario)


@pytest.mark.parametrize(
    "place",
    [
        '"messages": [{"role": "user", "content": "%s"}]',
        '"messages": [{"role": "user", "content": [{"type": "text", "text": "%s"}]}]',
        '"messages": [{"role": "user", "content": "a", "name": "%s"}]',
        '"messages": [{"role": "%s", "content": "a"}]',
        '"messages": [{"role": "user", "content": "a"}], "stop": ["%s"]',
        '"messages": [{"role": "user", "content": "a"}], "user": "%s"',
        '"messages": [{"role": "user", "content": "a"}], "model": "%s"',
        '"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "%s"}]',
        '"messages": [{"role": "user", "content": "a"}], "%s": 1',
    ],
)
def test_b031_half_of_a_surrogate_pair(place):
    async def scenario(client: Client) -> None:
        for half in (r"\ud800", r"\udfff", r"a\ud83dz"):
            for stream in ("true", "false"):
                body = "{" + place % half + f', "stream": {stream}}}'
                answer = await client.post("/v1/chat/completions", body.encode())
                assert (answer.status, answer.error["code"]) == (400, "invalid_json")

    serving(scenario)


def test_a_model_without_a_template(tmp_path):
    directory = with_template(tmp_path, "")
    (tmp_path / "chat_template.jinja").unlink()

    async def scenario(client: Client) -> None:
        answer = await client.chat(messages=HELLO)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "no chat template" in answer.error["message"]
        assert str(tmp_path) not in answer.body.decode()

    serving(scenario, tokenizer=directory)


def test_usage_of_a_chat():
    async def scenario(client: Client) -> None:
        options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
        answer = await client.chat(messages=HELLO, max_tokens=5, n=3, stream=True, stream_options=options)
        *pieces, last = answer.events[:-1]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 15
        assert [piece["usage"]["completion_tokens"] for piece in pieces][-1] == 15
        plain = await client.chat(
            messages=HELLO, stream=True, max_tokens=2, stream_options={"include_usage": True}
        )
        assert [event["usage"] is None for event in plain.events[:-1]][-1] is False

    serving(scenario)
