"""What the log says while a server starts: each part with its seconds, and nothing long in silence."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import TYPE_CHECKING

import pytest

from hybridserve.config.schema import EngineConfig
from hybridserve.server import serve
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
