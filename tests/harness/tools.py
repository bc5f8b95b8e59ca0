"""Models that call tools: a chat template in Jamba's manner, tokenizers with and without its markers as
special tokens, and scripts of what such a model writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybridserve
from hybridserve.text import Tokenizer
from tests.harness.structured import save_byte_tokenizer
from tests.harness.web import EOS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hybridserve.engine.messages import EngineRequest

DEMO = Path(hybridserve.__file__).parent / "models" / "demo"
MARKERS = ("<tool_calls>", "</tool_calls>")

TEMPLATE = """\
{{ bos_token }}{% if tools %}<tools>
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}</tools>
{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}\
{% if message.tool_calls %}<tool_calls>[{% for call in message.tool_calls %}\
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}{{ ", " if not loop.last }}\
{% endfor %}]</tool_calls>{% endif %}{% if message.tool_call_id %} (of {{ message.tool_call_id }}){% endif %}\
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like outside",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]


def save_tokenizer(path: Path, kind: str = "special", template: str = TEMPLATE) -> str:
    """A directory with a tokenizer. `special`: each byte is a token, and so is each marker, a special one;
    `plain`: the demo's, to which the markers are text."""
    shutil.copy(DEMO / "tokenizer_config.json", path)
    if kind == "special":
        save_byte_tokenizer(path, MARKERS)
    else:
        shutil.copy(DEMO / "tokenizer.json", path)
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(path)


def says(directory: str, *texts: str) -> Callable[[EngineRequest], Sequence[Sequence[int]]]:
    """What `FakeEngine` is to reply: a text for each continuation, the last one for all that are left."""
    tokenizer = Tokenizer(directory)

    def reply(request: EngineRequest) -> list[list[int]]:
        shown = [texts[min(index, len(texts) - 1)] for index in range(request.params.n)]
        return [[*tokenizer.encode(text, add_special_tokens=False), EOS] for text in shown]

    return reply


def call_text(*calls: tuple[str, str], opening: str = "[", closing: str = "]") -> str:
    """As Jamba writes calls of (name, JSON text of arguments)."""
    listed = ",\n".join(f'    {{"name": {json.dumps(name)}, "arguments": {text}}}' for name, text in calls)
    return f"{MARKERS[0]}{opening}\n{listed}\n{closing}{MARKERS[1]}"


def joined(events: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together by OpenAI's rules; checks those rules on the way."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        if event == "[DONE]" or not event["choices"]:
            continue
        (piece,) = event["choices"]
        delta = piece["delta"]
        if piece["index"] not in choices:
            assert delta == {"role": "assistant", "content": ""}
            choices[piece["index"]] = {"content": "", "calls": [], "finish_reason": None, "logprobs": []}
            continue
        choice = choices[piece["index"]]
        assert choice["finish_reason"] is None, "something came after the end"
        assert "role" not in delta
        choice["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            assert len(delta["tool_calls"]) == 1
            assert "content" not in delta
            if call["index"] == len(choice["calls"]):
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                choice["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert call["index"] == len(choice["calls"]) - 1
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                choice["calls"][-1]["arguments"] += call["function"]["arguments"]
        if piece["logprobs"]:
            choice["logprobs"] += piece["logprobs"]["content"]
        choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
    return choices


def of_whole(answer: Any) -> dict[int, dict[str, Any]]:
    """The choices of an answer, in the form of `joined`."""
    return {
        choice["index"]: {
            "content": choice["message"]["content"] or "",
            "calls": [
                {"id": call["id"], **call["function"]} for call in choice["message"].get("tool_calls", [])
            ],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
            "logprobs": choice["logprobs"]["content"] if choice["logprobs"] else [],
        }
        for choice in answer["choices"]
    }


def without_ids(choices: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """To be compared: ids are never the same twice."""
    return {
        index: {
            **choice,
            "calls": [{key: call[key] for key in ("name", "arguments")} for call in choice["calls"]],
        }
        for index, choice in choices.items()
    }
