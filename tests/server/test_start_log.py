"""What the log says while a server starts: each part with its seconds, and nothing long in silence."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from typing import TYPE_CHECKING

import pytest

from hybridserve.config.schema import EngineConfig
from hybridserve.engine.alternatives import plan_or_suggest
from hybridserve.models.hub import resolve_config
from hybridserve.server import logs, serve
from hybridserve.server.serve import _Serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def serving(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Serving]:
    """One that has not begun; "long" are some milliseconds."""
    monkeypatch.setattr(serve, "SLOW_PHASE_SECONDS", 0.05)
    monkeypatch.setattr(serve, "STILL_SLOW_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "hybridserve")
    with socket.socket() as listener:
        one = _Serving(EngineConfig(model="demo"), listener, None)
        yield one
        asyncio.run(one._engine.close())


async def until_said(caplog: pytest.LogCaptureFixture, start: str, times: int) -> None:
    async with asyncio.timeout(30):
        while sum(message.startswith(start) for message in caplog.messages) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_part_that_takes_long_says_so_again_and_again(serving, caplog):
    async def start() -> None:
        serving._show_phase("load", None)
        await until_said(caplog, "load: ", 3)
        serving._show_phase("load", 7.25)

    asyncio.run(start())
    *slow, last = caplog.messages
    assert len(slow) >= 3
    assert all(re.fullmatch(r"load: \d+ s so far", message) for message in slow)
    assert last == "load: 7.25 s"


def test_parts_beside_each_other_are_told_apart(serving, caplog):
    """The end of a short one does not silence a long one."""

    async def start() -> None:
        serving._show_phase("import", None)
        serving._show_phase("tokenizer", None)
        serving._show_phase("tokenizer", 0.01)
        await until_said(caplog, "import: ", 1)
        serving._show_phase("import", 1.0)

    asyncio.run(start())
    assert caplog.messages[0] == "tokenizer: 0.01 s"
    assert caplog.messages[-1] == "import: 1.00 s"
    assert not any(message.startswith("tokenizer: 0 s") for message in caplog.messages)


def test_what_takes_very_long_does_not_fill_the_log(serving, caplog, monkeypatch):
    monkeypatch.setattr(serve, "VERY_SLOW_SECONDS", 0.2)
    pauses = []

    async def start() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda pause, *_: pauses.append(pause), raising=False)
        for ago in (0.0, 10.0):
            serving._show_slow("load", loop.time() - ago)
        serving._slow.clear()

    asyncio.run(start())
    assert pauses == [0.05, 0.2]
    assert caplog.messages == ["load: 0 s so far", "load: 10 s so far"]


def test_minutes_of_import_are_a_line_each_few_seconds():
    assert serve.SLOW_PHASE_SECONDS <= 1
    assert logs.SLOW_SECONDS <= 1
    assert 2 <= serve.STILL_SLOW_SECONDS <= 5
    assert 2 <= logs.STILL_SLOW_SECONDS <= 5


def test_what_comes_before_the_event_loop_is_told_as_well(caplog, monkeypatch):
    monkeypatch.setattr(logs, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(logs, "STILL_SLOW_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "hybridserve")
    with logs.phase("import of the server"):
        deadline = time.monotonic() + 30
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    *slow, last = caplog.messages
    assert len(slow) >= 2
    assert set(slow) == {"import of the server: 0 s so far"}
    assert re.fullmatch(r"import of the server: \d+\.\d\d s", last)


def test_the_plan_is_short_and_whole_only_in_a_verbose_log(serving, caplog):
    config = EngineConfig(model="demo")
    hf_config, shape = resolve_config(config.model)
    table = plan_or_suggest(config, hf_config, shape=shape).table()
    serving._log_plan(table)
    caplog.set_level(logging.DEBUG, "hybridserve")
    serving._log_plan(table)
    short, whole = (message.splitlines() for message in caplog.messages)
    assert [line.split()[0] for line in short] == ["the", "weights", "arena", "fits", "limits"]
    assert [line[4:] for line in whole[1:]] == table.splitlines()


def test_a_short_part_is_one_line(serving, caplog):
    async def start() -> None:
        serving._show_phase("plan", None)
        serving._show_phase("plan", 0.5)
        await asyncio.sleep(0.2)

    asyncio.run(start())
    assert caplog.messages == ["plan: 0.50 s"]


def test_the_root_cause_is_last_in_the_log(serving, caplog):
    from hybridserve.frontend.errors import EngineDead

    serving._log_death("the engine has died", EngineDead("the engine failed: ValueError: x", "Traceback"))
    assert (
        caplog.messages[-1] == "the engine has died (--verbose shows where): the engine failed: ValueError: x"
    )
