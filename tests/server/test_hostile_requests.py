"""Requests by somebody who has read about the holes of other servers: tensors in disguise, and numbers from
the ends of the range of every field that takes whole ones."""

from __future__ import annotations

import base64
import io
import pickle  # noqa: TID251 - to write what must never be read
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.frontend import protocol
from hybridserve.server.app import _ROUTES
from hybridserve.server.protocol import MAX_COUNT, ChatRequest, CompletionRequest
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.asgi import Client

HELLO = [{"role": "user", "content": "hello"}]
PATHS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


def ask(client: Client, path: str, **fields: Any) -> Any:
    base = {"prompt": "hello"} if path == "/v1/completions" else {"messages": HELLO}
    return client.post(path, {**base, "max_tokens": 1, **fields})


def num_requests(client: Client) -> int:
    return sum(isinstance(message, protocol.Add) for message in client.engine.fake.received)


class _Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def tensors_in_disguise(marker: Path) -> list[str]:
    """A pickle, and one in the zip file that torch writes, in base 64."""
    raw = pickle.dumps(_Touch(marker))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", raw)
        file.writestr("archive/version", "3")
    return [base64.b64encode(data).decode() for data in (raw, archive.getvalue())]


def test_the_disguise_would_work(tmp_path: Path) -> None:
    plain, _ = tensors_in_disguise(tmp_path / "marker")
    pickle.loads(base64.b64decode(plain))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("path", PATHS)
def test_s005_no_tensor_comes_in_a_request(path: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    async def scenario(client: Client) -> None:
        for data in tensors_in_disguise(marker):
            for name in ("prompt_embeds", "input_embeds", "multi_modal_data", "custom_logit_processor"):
                for value in (data, [data], {"data": data}):
                    answer = await ask(client, path, **{name: value})
                    assert (answer.status, answer.error["param"]) == (400, name)
            for kind in ("input_tensor", "image_embeds", "image_url", "input_audio", "file"):
                part = {"type": kind, kind: {"data": data, "url": f"data:application/x;base64,{data}"}}
                answer = await client.chat(messages=[{"role": "user", "content": [part]}])
                assert (answer.status, answer.error["param"]) == (400, "messages[0].content")
        assert num_requests(client) == 0
        assert not marker.exists()

    serving(scenario)


@pytest.mark.parametrize("count", [-1, 21, 4096, 4097, 2**31, 2**63, 10**30])
def test_s015_more_probabilities_than_anybody_computes(count: int) -> None:
    """Refused before the prompt is read, and whatever its length."""

    async def scenario(client: Client) -> None:
        ids = [5] * 2000
        for path, fields in (
            ("/v1/completions", {"prompt": ids, "logprobs": count}),
            ("/v1/completions", {"prompt": ids, "logprobs": count, "echo": True}),
            ("/v1/completions", {"prompt": ids, "logprobs": count, "echo": True, "max_tokens": 0}),
            ("/v1/completions", {"prompt": ids, "prompt_logprobs": count}),
            ("/v1/chat/completions", {"logprobs": True, "top_logprobs": count}),
            ("/v1/chat/completions", {"prompt_logprobs": count}),
        ):
            answer = await ask(client, path, **fields)
            assert answer.status == 400, fields
            assert answer.error["param"] in fields
            assert answer.error["param"].endswith("logprobs")
        assert num_requests(client) == 0
        assert (await ask(client, "/v1/completions", logprobs=20, echo=True)).status == 200

    serving(scenario)


@pytest.mark.parametrize("token", [-1, 4096, 2**31, 2**63])
def test_s017_tokens_that_do_not_exist_are_not_allowed(token: int) -> None:
    async def scenario(client: Client) -> None:
        for path in PATHS:
            for more in ({}, {"min_tokens": 1}):
                answer = await ask(client, path, allowed_token_ids=[5, token], **more)
                assert (answer.status, answer.error["param"].partition("[")[0]) == (400, "allowed_token_ids")
        assert num_requests(client) == 0

    serving(scenario)


ENDS = (-1, 0, -(2**31), 2**31 - 1, 2**31, -(2**63), 2**63 - 1, 2**63, 2**64, -(10**30), 10**30)
LEAST = {"top_k": -1}
"""Of those that may be negative."""


def whole_numbers(schema: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """(name, whether it is a list) of the fields of a body that take whole numbers."""
    for name, field in schema["properties"].items():
        for kind in (field, *field.get("anyOf", ())):
            if kind.get("type") == "integer":
                yield name, False
            if kind.get("type") == "array" and kind.get("items", {}).get("type") == "integer":
                yield name, True


def test_s018_the_fields_are_found() -> None:
    found = dict(whole_numbers(CompletionRequest.model_json_schema()))
    assert found["n"] is found["seed"] is False
    assert found["prompt"] is found["stop_token_ids"] is True
    assert len(found) >= 12


@pytest.mark.parametrize("path", PATHS)
def test_s018_the_ends_of_every_whole_number(path: str) -> None:
    """200 or 400, never anything else; what reaches the engine is in range, and harms nobody beside it."""

    async def scenario(client: Client) -> None:
        beside = {"prompt": [263, 688], "max_tokens": 40}
        alone = (await client.complete(**beside)).json["choices"]
        neighbour = client.start("POST", "/v1/completions", beside)
        for name, is_list in whole_numbers(PATHS[path].model_json_schema()):
            for value in ENDS:
                more = {"max_tokens": None} if name == "max_completion_tokens" else {}  # they mean the same
                answer = await ask(client, path, **more, **{name: [value] if is_list else value})
                assert answer.status in (200, 400), (name, value, answer.body)
                if answer.status == 400:
                    assert name in str(answer.error["param"]), (name, value, answer.body)
                else:
                    assert name == "seed" or LEAST.get(name, 0) <= value <= MAX_COUNT, (name, value)
        assert (await neighbour.answer()).json["choices"] == alone

    serving(scenario)


def test_s018_and_of_the_other_bodies() -> None:
    async def scenario(client: Client) -> None:
        for route in _ROUTES:
            if route.body is None or route.path in PATHS:
                continue
            for name, is_list in whole_numbers(route.body.model_json_schema()):
                for value in ENDS:
                    answer = await client.post(route.path, {name: [value] if is_list else value})
                    assert answer.status in (200, 400), (route.path, name, value)

    serving(scenario)
