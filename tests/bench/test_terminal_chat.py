"""`hybridserve chat`: through a pipe, and on a terminal with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridserve.cli import main
from tests.harness.bench_targets import DONE, Reply, event, openai, stub_server, usage_event

ROOT = Path(__file__).parents[2]


def echo(path, body):
    """Says who answers, and how many messages it was told."""
    text = f"{body['model']} heard {len(body['messages'])}: {body['messages'][-1]['content']}"
    pieces = [event(choices=[{"index": 0, "delta": {"content": word + " "}}]) for word in text.split()]
    return [*pieces, usage_event(7, len(pieces)), DONE]


@pytest.fixture
def server():
    with stub_server(openai(echo, a=1, b=1)) as stub:
        yield stub


@pytest.fixture
def chat(capsys, monkeypatch):
    """Feeds lines to the command; returns its exit status and what it says."""
    monkeypatch.delenv("HYBRIDSERVE_API_KEY", raising=False)

    def run(*arguments: object, lines: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        with pytest.raises(SystemExit) as status:
            main(["chat", *map(str, arguments)])
        shown = capsys.readouterr()
        return status.value.code, shown.out, shown.err

    return run


def test_a_line_in_and_an_answer_out(chat, server):
    status, out, err = chat(server.url, lines="hello\n\nand you?\n")
    assert (status, err) == (0, "")
    assert out == "stub heard 1: hello \nstub heard 3: and you? \n"
    body = server.requests[-1][2]
    assert body["messages"][1] == {"role": "assistant", "content": "stub heard 1: hello "}
    assert "max_tokens" not in body
    assert "temperature" not in body


def test_reset_and_system(chat, server):
    lines = "one\n/reset\ntwo\n/system Be brief.\nthree\n/system none\nfour\n"
    _, out, err = chat(server.url, "--system", "You are kind.", lines=lines)
    assert out.splitlines() == [
        "stub heard 2: one ",
        "stub heard 2: two ",
        "stub heard 4: three ",
        "stub heard 5: four ",
    ]
    assert err == "Be brief.\n(nothing)\n"
    told = [body["messages"][0]["content"] for _, _, body in server.requests if body]
    assert told == ["You are kind.", "You are kind.", "Be brief.", "two"]


def test_adapters(chat, server):
    _, out, err = chat(
        server.url, "--adapter", "b", lines="one\n/adapter a\ntwo\n/adapter\n/adapter base\nthree\n"
    )
    assert out == "b heard 1: one \na heard 3: two \nstub heard 5: three \n"
    assert err == "  base\n* a\n  b\n"


def test_parameters(chat, server):
    lines = '/params temperature=0.5 max-tokens=9\none\n/params temperature= stop="x"\ntwo\n/params\n'
    _, _, err = chat(server.url, "--top-p", "0.25", lines=lines)
    first, second = (body for _, _, body in server.requests if body)
    assert (first["temperature"], first["max_tokens"], first["top_p"]) == (0.5, 9, 0.25)
    assert "temperature" not in second
    assert (second["stop"], second["max_tokens"]) == ("x", 9)
    assert err.splitlines()[-1] == "top_p=0.25 max_tokens=9 stop=x"


def test_exit_ends_it(chat, server):
    assert chat(server.url, lines="/exit\nhello\n") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "lines", "complaint"),
    [
        (["--adapter", "c"], "", "adapter: 'c' is unknown; there is a, b"),
        ([], "/adapter c\n", "adapter: 'c' is unknown; there is a, b"),
        ([], "/rest\n", "/rest: unknown; did you mean /reset?"),
        ([], "/what\n", "/what: unknown; see /help"),
        ([], "/params heat=1\n", "params: 'heat=1' is no NAME=X"),
        ([], "/params temprature=1\n", "did you mean temperature=?"),
        ([], "/params temperature=-1\n", "temperature: -1"),
        ([], "/params temperature=hot\n", "temperature: 'hot'"),
        (["--temperature", "-1"], "", "temperature: -1"),
    ],
)
def test_mistakes(chat, server, arguments, lines, complaint):
    status, out, err = chat(server.url, *arguments, lines=lines + "never sent\n")
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
    assert not any(body for _, _, body in server.requests)


def test_a_request_that_fails_ends_a_pipe(chat, server):
    good = server.respond
    server.respond = lambda path, headers, body: (
        good(path, headers, body)
        if body is None
        else Reply([b'{"error": {"message": "too long"}}'], 400, "application/json")
    )
    assert chat(server.url, lines="one\ntwo\n") == (1, "", "hybridserve: HTTP 400: too long\n")


def test_the_demo_model(chat):
    arguments = ("--adapter", "shakespeare", "--max-tokens", 4, "--temperature", 0)
    status, out, err = chat("demo", *arguments, lines="Who is there?\nAnd who?\n")
    assert (status, err) == (0, "")
    assert out.strip()


TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # it may have been ignored where the tests were started
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal whose Ctrl-C this process hears
os.execv(sys.executable, [sys.executable, "-m", "hybridserve", *sys.argv[1:]])
"""


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.fd, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(slave)
        self.shown = ""

    def until_after(self, keys: str, text: str) -> None:
        """What follows from keys. Typed again where nothing does: a signal that comes after readline has
        shown its prompt and before it waits for keys is heard only with the next."""
        for _ in range(20):
            self.type(keys)
            with contextlib.suppress(AssertionError):
                self.until(text, 3.0)
                return
        raise AssertionError(f"{text!r} never came, but {self.shown!r}")

    def until(self, text: str, seconds: float = 60.0) -> str:
        """What is shown up to this text."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} never came, but {self.shown!r}"
            if select.select([self.fd], [], [], 1.0)[0]:
                self.shown += os.read(self.fd, 4096).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


def test_a_terminal(server):
    good, started = server.respond, []

    def respond(path, headers, body):
        reply = good(path, headers, body)
        if body is not None and "forever" in body["messages"][-1]["content"]:
            started.append(body)
            return Reply([event(choices=[{"index": 0, "delta": {"content": "on and "}}])] * 2000, pause=0.05)
        return reply

    server.respond = respond
    terminal = Terminal("chat", server.url)
    try:
        terminal.until("> ")
        terminal.until_after("\x03", "(Ctrl-D leaves)")  # at the prompt it leaves nothing
        terminal.until("> ")
        terminal.type("go on forever\n")
        terminal.until("on and on and")
        terminal.type("\x03")
        terminal.until("(stopped)")
        terminal.until("> ")
        terminal.type("/wrong\n")
        terminal.until("/wrong: unknown")
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("stub heard 3: hello")
        terminal.until("tokens, first after")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)
    last = server.requests[-1][2]["messages"]
    assert last[1]["content"].startswith("on and on and")
    deadline = time.monotonic() + 5
    while not server.num_hung_up and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.num_hung_up == 1  # what was stopped is not computed any more
