"""POST /v1/completions, against a scripted engine: shapes, counts, streams that say what whole answers do."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.asgi import serving
from tests.harness.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE

if TYPE_CHECKING:
    from tests.harness.asgi import Client

TEXT, IDS = "hello world", [263, 688, 83, 1282]
PROMPTS = {"text": TEXT, "texts": [TEXT, "for the"], "ids": IDS, "lists": [IDS, [264, 265]]}
CHARACTERS = "客单价 👩‍👩‍👧 é"


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """What the pieces of a stream amount to, by index."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        assert event["object"] == "text_completion"
        for piece in event["choices"]:
            choice = choices.setdefault(
                piece["index"], {"index": piece["index"], "text": "", "finish_reason": None, "logprobs": None}
            )
            assert choice["finish_reason"] is None, "a piece after the last"
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            for name in piece.keys() & {"token_ids"}:
                choice.setdefault(name, []).extend(piece[name])
            if piece["logprobs"] is not None:
                scored = choice["logprobs"] = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                for name, values in piece["logprobs"].items():
                    scored[name] += values
    assert len({event["id"] for event in events[:-1]}) == 1
    return choices


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
def test_every_kind_of_prompt(kind, n):
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt=PROMPTS[kind], max_tokens=3, n=n)
        assert answer.status == 200, answer.body
        many = 2 if kind in ("texts", "lists") else 1
        choices = answer.json["choices"]
        assert [choice["index"] for choice in choices] == list(range(many * n))
        assert all(choice["finish_reason"] == "length" for choice in choices)
        assert answer.json["usage"]["completion_tokens"] == 3 * many * n
        if kind == "ids":
            assert choices[0]["text"] == "hello"

    serving(scenario)


@pytest.mark.parametrize("kind", PROMPTS)
def test_b013_echo_logprobs_and_no_tokens(kind):
    async def scenario(client: Client) -> None:
        for echo, logprobs, max_tokens, n in itertools.product(
            (False, True), (None, 0, 1, 5), (0, 1, 5), (1, 2)
        ):
            fields: dict[str, Any] = {"prompt": PROMPTS[kind], "echo": echo, "max_tokens": max_tokens, "n": n}
            if logprobs is not None:
                fields["logprobs"] = logprobs
            whole = await client.complete(**fields)
            assert whole.status == 200, whole.body
            stream = await client.complete(**fields, stream=True)
            pieces = joined(stream.events)
            for choice in whole.json["choices"]:
                check_choice(choice, PROMPTS[kind], echo, logprobs, max_tokens)
                piece = pieces.pop(choice["index"])
                assert piece == {name: choice[name] for name in piece}
            assert not pieces

    serving(scenario)


def check_choice(
    choice: dict[str, Any], prompt: Any, echo: bool, logprobs: int | None, max_tokens: int
) -> None:
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        scored = choice["logprobs"]
        lengths = {len(values) for values in scored.values()}
        assert len(lengths) == 1
        offsets = scored["text_offset"]
        assert offsets == sorted(offsets)
        pieces = [choice["text"][a:b] for a, b in itertools.pairwise([*offsets, None])]
        expected = ["" if token == "<s>" else token for token in scored["tokens"]]
        if expected:
            assert pieces == expected
        begin = 1 if echo else 0
        assert all(value is not None for value in scored["token_logprobs"][begin:])
        assert all(len(top) == max(1, logprobs) for top in scored["top_logprobs"][begin:])
        if echo:
            assert scored["token_logprobs"][0] is None
            assert scored["top_logprobs"][0] is None
        assert len(scored["tokens"]) >= max_tokens
    if echo and isinstance(prompt, str):
        assert choice["text"].startswith(prompt)
    if not echo and max_tokens == 0:
        assert choice["text"] == ""


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"echo": True}, {"stop": "world"}], ids=["plain", "echo", "stop"])
def test_b007_usage_is_what_the_engine_counts(n, options):
    async def scenario(client: Client) -> None:
        fields = {"prompt": TEXT, "max_tokens": 7, "n": n, "return_token_ids": True, **options}
        whole = (await client.complete(**fields)).json
        num_generated = sum(len(choice["token_ids"]) for choice in whole["choices"])
        num_prompt = len(whole["choices"][0]["prompt_token_ids"])
        expected = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert whole["usage"] == expected
        assert num_generated == n * (5 if "stop" in options else 7)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        events = (await client.complete(**fields, stream=True, stream_options=usage)).events[:-1]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1]
        assert (events[-1]["choices"], events[-1]["usage"]) == ([], expected)
        assert all(event["choices"] for event in events[:-1])

    serving(scenario)


def test_b008_usage_comes_once_and_only_where_it_was_asked_for():
    async def scenario(client: Client) -> None:
        asked = (
            await client.complete(
                prompt=TEXT, max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
        ).events[:-1]
        assert [event["usage"] is not None for event in asked] == [False] * (len(asked) - 1) + [True]
        for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
            events = (await client.complete(prompt=TEXT, max_tokens=3, stream=True, **options)).events[:-1]
            assert all("usage" not in event for event in events)

    serving(scenario)


def test_b002_every_token_is_told_at_once():
    async def scenario(client: Client) -> None:
        client.engine.hold()
        call = client.start("POST", "/v1/completions", {"prompt": IDS, "max_tokens": 4, "stream": True})
        for text in (b'"he"', b'"ll"', b'"o"'):
            client.engine.go_on()
            await call.until(text)
        answer = await call.answer()
        assert [event["choices"][0]["text"] for event in answer.events[:-1]] == ["he", "ll", "o", " world"]

    serving(scenario, step_seconds=0.02)


def test_b001_characters_are_never_cut():
    async def scenario(client: Client) -> None:
        tokens = (await client.post("/tokenize", {"prompt": CHARACTERS, "add_special_tokens": False})).json
        assert tokens["count"] > len(CHARACTERS), "the script has no character in several tokens"
        for stream in (False, True):
            answer = await client.complete(prompt=tokens["tokens"], max_tokens=tokens["count"], stream=stream)
            pieces = joined(answer.events) if stream else answer.json["choices"]
            assert pieces[0]["text"] == CHARACTERS
        cut = await client.complete(prompt=tokens["tokens"], max_tokens=1)
        assert cut.json["choices"][0]["text"] == "\ufffd"

    serving(scenario)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("o wor", "hell", "o wor"),
        (["zzz", "ld"], "hello wor", "ld"),
        (["world", "lo w"], "hel", "lo w"),
        ("never", "hello world", None),
        ("worldly", "hello world", None),
        ([], "hello world", None),
    ],
)
def test_b003_b006_stop_strings(stop, text, reason):
    async def scenario(client: Client) -> None:
        for stream in (False, True):
            answer = await client.complete(prompt=IDS, max_tokens=4, stop=stop, stream=stream)
            choice = joined(answer.events)[0] if stream else answer.json["choices"][0]
            assert choice["text"] == text
            assert choice["finish_reason"] == ("length" if reason is None else "stop")
            if not stream:
                assert choice["stop_reason"] == reason

    serving(scenario)


def test_b024_streams_of_several_continuations():
    def reply(request: Any) -> list[list[int]]:
        return [request.prompt_ids[: index + 1] for index in range(request.params.n)]

    async def scenario(client: Client) -> None:
        fields = {"prompt": [IDS, IDS], "max_tokens": 5, "n": 4}
        whole = (await client.complete(**fields)).json["choices"]
        events = (await client.complete(**fields, stream=True)).events
        finishes = [
            choice["index"] for e in events[:-1] for choice in e["choices"] if choice["finish_reason"]
        ]
        assert sorted(finishes) == list(range(8))
        pieces = joined(events)
        for choice in whole:
            assert pieces[choice["index"]]["text"] == choice["text"]
        assert [choice["text"] for choice in whole[:4]] == [
            "",
            "he",
            "hell",
            "hello",
        ]  # the last token ends it

    serving(scenario, reply=reply)


def test_b021_the_context_to_the_token():
    async def scenario(client: Client) -> None:
        def ask(num_prompt: int, max_tokens: int | None) -> Any:
            return client.complete(prompt=[263] * num_prompt, max_tokens=max_tokens)

        for num_prompt, max_tokens, status in [
            (10, MAX_MODEL_LEN - 11, 200),
            (10, MAX_MODEL_LEN - 10, 200),
            (10, MAX_MODEL_LEN - 9, 400),
            (MAX_MODEL_LEN - 1, 1, 200),
            (MAX_MODEL_LEN - 1, 2, 400),
            (MAX_MODEL_LEN, 0, 200),
            (MAX_MODEL_LEN, 1, 400),
            (MAX_MODEL_LEN + 1, 0, 400),
            (MAX_MODEL_LEN, None, 400),
        ]:
            answer = await ask(num_prompt, max_tokens)
            assert answer.status == status, (num_prompt, max_tokens, answer.body)
            if status == 400:
                assert answer.error["code"] == "context_length_exceeded"
                assert f"max_model_len is {MAX_MODEL_LEN}" in answer.error["message"]
                assert f"{num_prompt} tokens" in answer.error["message"]
        short = await ask(MAX_MODEL_LEN - 3, None)  # the default is no more than what fits
        assert short.json["usage"]["completion_tokens"] == 3

    serving(scenario)


def test_b022_a_prompt_is_cut_only_where_that_was_asked_for():
    async def scenario(client: Client) -> None:
        long = [263] * MAX_MODEL_LEN + IDS
        assert (await client.complete(prompt=long)).error["param"] == "prompt"
        answer = await client.complete(
            prompt=long, truncate_prompt_tokens=3, return_token_ids=True, max_tokens=1
        )
        assert answer.json["choices"][0]["prompt_token_ids"] == IDS[-3:]
        assert answer.json["usage"]["prompt_tokens"] == 3
        text = await client.complete(
            prompt=TEXT, truncate_prompt_tokens=2, echo=True, max_tokens=0, logprobs=0
        )
        assert text.json["choices"][0]["text"] == "o world"
        assert text.json["choices"][0]["logprobs"]["tokens"] == ["o", " world"]

    serving(scenario)


def test_b035_a_text_that_can_fit_nowhere_is_refused_unread():
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt="x" * 3_000_000)
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
        assert not client.engine.fake.received[1:]

    serving(scenario)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [TEXT, ""], [IDS, []]])
def test_s019_b020_empty_prompts(prompt):
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt=prompt)
        assert answer.status == 400
        assert "is empty" in answer.error["message"]
        assert answer.error["param"].startswith("prompt")
        assert (await client.complete(prompt=TEXT, max_tokens=1)).status == 200

    serving(scenario)


@pytest.mark.parametrize("prompt", [" ", "\n\t ", "</s>", "<s></s>", "\x00"])
def test_s019_prompts_of_nothing_much(prompt):
    async def scenario(client: Client) -> None:
        assert (await client.complete(prompt=prompt, max_tokens=2)).status == 200

    serving(scenario)


@pytest.mark.parametrize(
    "prompt",
    [None, 5, True, {"a": 1}, [True], [1.5], [IDS, "a"], [[1], 2], [[["a"]]], [None], ["a", 3], [[True]]],
)
def test_prompts_of_no_kind(prompt):
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt=prompt)
        assert answer.status == 400
        assert answer.error["param"].startswith("prompt")

    serving(scenario)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31, 2**63, 2**64, 10**30])
def test_s017_tokens_that_do_not_exist(token):
    async def scenario(client: Client) -> None:
        neighbour = client.start("POST", "/v1/completions", {"prompt": IDS, "max_tokens": 50})
        for fields in (
            {"prompt": [1, token]},
            {"prompt": [[1], [token]]},
            {"prompt": IDS, "stop_token_ids": [token]},
            {"prompt": IDS, "stop_token_ids": [token], "min_tokens": 1},
            {"prompt": IDS, "logit_bias": {str(token): 1}},
            {"prompt": IDS, "logit_bias": {str(token): 1}, "min_tokens": 1},
        ):
            answer = await client.complete(**fields)
            assert answer.status == 400, (fields, answer.body)
            assert answer.error["param"].startswith(("prompt", "stop_token_ids", "logit_bias"))
        assert (await client.post("/detokenize", {"tokens": [token]})).status == 400
        assert (await neighbour.answer()).json["choices"][0]["text"].startswith("hello world")

    serving(scenario)


def test_b016_prompt_logprobs_of_every_token_but_the_first():
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt=TEXT, max_tokens=1, prompt_logprobs=2)
        first, *others = answer.json["choices"][0]["prompt_logprobs"]
        assert first is None
        assert [len(position) for position in others] == [2, 2, 2, 2]
        assert others[0]["263"] == {
            "logprob": pytest.approx(-0.693, abs=1e-3),
            "rank": 1,
            "decoded_token": "he",
        }
        refused = await client.complete(prompt=TEXT, prompt_logprobs=1, stream=True)
        assert refused.error["param"] == "prompt_logprobs"

    serving(scenario)


def test_b019_special_tokens_are_shown_by_name():
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt=[2, 5], max_tokens=2, logprobs=3)
        choice = answer.json["choices"][0]
        assert choice["logprobs"]["tokens"] == ["</s>", "!"]
        assert choice["text"] == "!"

    serving(scenario)


def test_a_seed_and_the_other_parameters_reach_the_engine():
    async def scenario(client: Client) -> None:
        given = {
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 7,
            "min_p": 0.25,
            "seed": -3,
            "presence_penalty": 1,
            "frequency_penalty": -1.5,
            "repetition_penalty": 1.25,
            "min_tokens": 1,
            "ignore_eos": True,
        }
        answer = await client.complete(
            prompt=IDS, n=2, max_tokens=9, stop=["a", "b"], stop_token_ids=[7], logit_bias={"5": 1}, **given
        )
        assert answer.status == 200, answer.body
        params = client.engine.fake.received[-1].request.params
        assert {name: getattr(params, name) for name in given} == given
        assert (params.n, params.max_tokens, params.stop) == (2, 9, ("a", "b"))
        assert (params.stop_token_ids, params.logit_bias) == ((7,), {5: 1.0})

    serving(scenario)


def test_return_token_ids_in_pieces():
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt=TEXT, max_tokens=4, return_token_ids=True, stream=True)
        first, *others = [event["choices"][0] for event in answer.events[:-1]]
        assert first["prompt_token_ids"] == [1, *IDS]
        assert all("prompt_token_ids" not in other for other in others)
        assert joined(answer.events)[0]["token_ids"] == [1, *IDS[:3]]

    serving(scenario)


def test_without_special_tokens_around_a_text():
    async def scenario(client: Client) -> None:
        answer = await client.complete(prompt=TEXT, add_special_tokens=False, return_token_ids=True)
        assert answer.json["choices"][0]["prompt_token_ids"] == IDS

    serving(scenario)
