"""Recipes about the edges of text: what a stop string may hold back, special tokens among the likely ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.text import Tokenizer
from tests.harness.asgi import serving
from tests.harness.fake_engine import VOCAB_SIZE
from tests.harness.tools import DEMO

if TYPE_CHECKING:
    from tests.harness.asgi import Client

HELLO = [{"role": "user", "content": "hello"}]
STOPS = ["</think>", "<end", "\n\nUser:"]


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_b004_only_what_may_be_a_stop_string_is_held_back(kind: str) -> None:
    """After every token of a stream: all the text but the longest end that a stop string begins with."""
    text = "a < b </thinner> <en <<end of\n\nUse </thi"
    tokenizer = Tokenizer(DEMO)
    ids = tokenizer.encode(text, add_special_tokens=False)
    cut = text[: text.index("<end")]

    async def scenario(client: Client) -> None:
        fields: dict[str, Any] = {"stop": STOPS, "stream": True, "return_token_ids": True, "max_tokens": 200}
        ask = (
            client.complete(prompt="x", **fields)
            if kind == "completions"
            else client.chat(messages=HELLO, **fields)
        )
        shown, seen, num_held = "", list[int](), set[int]()
        for event in (await ask).events[:-1]:
            (piece,) = event["choices"]
            shown += piece["text"] if kind == "completions" else piece["delta"].get("content", "")
            seen += piece.get("token_ids", [])
            if piece["finish_reason"] is not None:
                assert (piece["stop_reason"], shown) == ("<end", cut)
                break
            said = tokenizer.decode(seen)
            ends = [length for length in range(9) for stop in STOPS if said.endswith(stop[:length])]
            assert shown == said[: len(said) - max(ends)]
            num_held.add(max(ends))
        assert max(num_held) > 3
        assert 0 in num_held

    serving(scenario, reply=lambda request: [ids])


@pytest.mark.parametrize("stream", [False, True])
def test_b017_special_tokens_among_the_likely_ones(stream: bool) -> None:
    """The drawn token is an ordinary one; the likely ones next to it are the special tokens 0, 1 and 2."""
    names = ["<pad>", "<s>", "</s>"]

    async def scenario(client: Client) -> None:
        fields: dict[str, Any] = {"max_tokens": 2, "stream": stream}
        answer = await client.complete(prompt="x", logprobs=4, **fields)
        assert answer.status == 200, answer.body
        (choice,) = answer.events[0]["choices"] if stream else answer.json["choices"]
        last = choice["logprobs"]["top_logprobs"][0]
        assert list(last)[-3:] == names
        assert all(value < 0 for value in last.values())
        answer = await client.chat(messages=HELLO, logprobs=True, top_logprobs=4, **fields)
        assert answer.status == 200, answer.body
        choices = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json["choices"]
        scored = next(choice["logprobs"] for choice in choices if choice["logprobs"])["content"][0]
        assert [each["token"] for each in scored["top_logprobs"]][-3:] == names
        assert bytes(scored["top_logprobs"][-1]["bytes"]) == b"</s>"

    serving(scenario, reply=lambda request: [[VOCAB_SIZE - 1] * 2])
