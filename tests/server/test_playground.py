"""The page at / and what it is told of the engine, without a browser."""

from __future__ import annotations

import asyncio
import base64
import re
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest

from hybridserve.core.slabs import SlabKind
from hybridserve.server.playground.files import FILES
from hybridserve.server.playground.state import ARENA_KINDS
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from tests.harness.asgi import Client

STATIC = files("hybridserve.server.playground").joinpath("static")
PROMPT = {"prompt": "hello", "max_tokens": 30}
KEY = "sk-user-1"


def test_every_file_is_served_as_it_is_and_told_to_trust_nothing_else():
    async def scenario(client: Client) -> None:
        for path, name in FILES.items():
            answer = await client.get(path)
            assert (answer.status, answer.body) == (200, STATIC.joinpath(name).read_bytes()), path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert "http" not in policy
            assert "*" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            again = await client.get(path, [("if-none-match", answer.headers["etag"])])
            assert (again.status, again.body) == (304, b"")
            assert "content-length" not in again.headers
            assert again.headers["content-security-policy"] == policy
            assert (await client.get(path, [("if-none-match", '"other"')])).status == 200

    serving(scenario)


def test_nothing_else_of_the_package_is_served():
    async def scenario(client: Client) -> None:
        for path in ("/playground/files.py", "/playground/../files.py", "/playground/fonts", "/index.html"):
            assert (await client.get(path)).status == 404

    serving(scenario)


def test_all_that_is_in_the_folder_is_served_but_licences():
    def walk(folder, prefix=""):
        for entry in folder.iterdir():
            yield from walk(entry, f"{prefix}{entry.name}/") if entry.is_dir() else [prefix + entry.name]

    assert {name for name in walk(STATIC) if "LICENSE" not in name} == set(FILES.values())


@pytest.mark.parametrize("name", [name for name in FILES.values() if name.endswith((".html", ".js", ".css"))])
def test_no_file_names_another_host_or_makes_markup_of_text(name):
    text = STATIC.joinpath(name).read_text()
    if "vendor" not in name:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\bstyle=|<style", text
        )
        assert "localStorage" not in text
        assert not re.search(r"https?://(?!www\.w3\.org)", text)
        assert not re.search(r"\bon(click|load|error|input)=", text)
        assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    named = set(re.findall(r'"(/playground/[^"]+)"', text)) - {"/playground/state"}
    assert named <= FILES.keys()


def test_the_state_is_for_users():
    async def scenario(client: Client) -> None:
        assert (await client.get("/")).status == 200
        assert (await client.get("/playground/main.js")).status == 200
        assert (await client.get("/playground/state")).status == 401
        answer = await client.get("/playground/state", [("authorization", f"Bearer {KEY}")])
        assert answer.status == 200
        assert KEY not in answer.body.decode()

    serving(scenario, server={"api_keys": [KEY]})


def test_the_engine_at_a_glance():
    async def scenario(client: Client) -> None:
        client.engine.hold()  # or they may have ended before anybody looks
        calls = [
            client.start("POST", "/v1/completions", {**PROMPT, "model": name}) for name in ("tiny", "law")
        ]
        async with asyncio.timeout(30):
            while (state := (await client.get("/playground/state")).json)["engine"]["num_running"] < 2:
                client.service._view._until = 0.0
        assert (state["status"], state["model"]) == ("ok", "tiny")
        engine = state["engine"]
        assert engine["num_running"] == 2
        kinds = base64.b64decode(engine["arena"]["slabs"])
        assert list(kinds) == [SlabKind.NULL, *[SlabKind.KV, SlabKind.STATE] * 2]
        assert engine["arena"]["num_slabs"] == 5
        # which of the two came first, nobody knows
        assert {(each["adapter"], each["max_tokens"]) for each in engine["requests"]} == {
            (None, 30),
            ("law", 30),
        }
        assert len(engine["requests"]) == 2
        assert "hello" not in str(state)
        assert [each["name"] for each in engine["adapters"]] == ["law"]
        assert engine["arena"]["bytes_by_kind"].keys() == set(ARENA_KINDS)
        client.engine.go_on()
        for call in calls:
            assert (await call.answer()).status == 200
        client.service._view._until = 0.0
        after = (await client.get("/playground/state")).json["engine"]
        assert after["num_generated_tokens"] == 60
        assert after["first_token"]["count"] == 2
        assert after["seconds"] > engine["seconds"]

    serving(scenario, served_name="tiny", adapters=("law",), step_seconds=0.01)


def test_many_watchers_are_one_question():
    async def scenario(client: Client) -> None:
        first = [client.start("GET", "/playground/state") for _ in range(20)]
        states = [(await call.answer()).json for call in first]
        assert all(state == states[0] for state in states)
        asked = [message for message in client.engine.fake.received if type(message).__name__ == "GetView"]
        assert len(asked) == 1

    serving(scenario)


def test_there_may_be_no_engine():
    async def scenario(client: Client) -> None:
        client.engine.die()
        state = await client.get("/playground/state")
        assert state.json == {"status": "dead", "model": "demo", "engine": None}
        assert (await client.get("/")).status == 200

    serving(scenario)
