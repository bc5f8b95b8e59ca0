"""`hybridserve inspect URL`: what a live server's cache does, in words, and what a mistake is told."""

from __future__ import annotations

import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from hybridserve.commands import inspect_server
from hybridserve.commands.inspect_server import CAUSES, Series, report
from hybridserve.core.prefix_misses import Miss
from hybridserve.core.prefix_nodes import Cause
from tests.harness import command_line
from tests.harness.serve_process import server

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "sk-of-a-user"
AUTH = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server on which two prompts have parted in the middle, and one was too short."""
    file = tmp_path_factory.mktemp("inspect") / "serve.yaml"
    file.write_text(f"model: demo\ncache: {{memory_bytes: 64MiB}}\nserver: {{api_keys: [{KEY}]}}\n")
    with server(file=file) as one:
        first = list(range(300, 400))
        for prompt in (first, first, first[:50] + list(range(900, 950)), [5, 6, 7]):
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
            assert one.post("/v1/completions", body, **AUTH)[0] == 200
        yield f"http://127.0.0.1:{one.port}"


def test_the_cache_of_a_live_server_in_words(capsys, url):
    status, out, err = command_line.run(capsys, ["inspect", url, "--api-key", KEY])
    assert (status, err) == (0, "")
    assert f"server    {url}: 0 sequences run, 0 wait" in out
    assert "prefixes  are kept by blocks of 16 tokens" in out
    assert "303 tokens since the server's start" in out
    assert "96 (31.7%) were there, 207 were computed" in out
    assert "ended at a prompt's end 100%" in out
    rows = dict(re.findall(r"^  (\w[\w ]*?) +([\d,]+) +[\d.]+%", out, re.MULTILINE))
    assert rows == {
        "never seen": "96",
        "no checkpoint": "48",
        "parted early": "48",
        "last block": "12",
        "prompt too short": "3",
    }
    assert re.search(r"^  parted early: put what all prompts share first", out, re.MULTILINE)
    assert "prompt too short: " not in out  # too few to speak of


def test_the_key_may_be_in_the_environment_and_the_url_end_in_v1(capsys, url, monkeypatch):
    monkeypatch.setenv("HYBRIDSERVE_API_KEY", KEY)
    status, out, _ = command_line.run(capsys, ["inspect", f"{url}/v1/"])
    assert status == 0
    assert f"server    {url}:" in out


@pytest.mark.parametrize("more", [[], ["--api-key", "wrong"]])
def test_without_the_key(capsys, url, more, monkeypatch):
    monkeypatch.delenv("HYBRIDSERVE_API_KEY", raising=False)
    status, out, err = command_line.run(capsys, ["inspect", url, *more])
    assert (status, out) == (2, "")
    assert err == (
        f"hybridserve: {url}: 401: the API key is missing or wrong; set HYBRIDSERVE_API_KEY or --api-key\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://127.0.0.1"], "ftp://127.0.0.1: is no URL of a server, such as http://127.0.0.1:8000"),
        (["http://127.0.0.1:99999"], "http://127.0.0.1:99999: Port out of range 0-65535"),
        (["http://me:secret@127.0.0.1"], "the URL holds more than a server and a path"),
        (["http://127.0.0.1:1", "--cache.block_size", "8"], "--cache.block_size: is a setting of an engine"),
        (["http://127.0.0.1:1", "--on", "demo"], "--on: http://127.0.0.1:1 is no adapter's directory"),
        (["demo", "--api-key", "x"], "--api-key: is for a URL"),
    ],
)
def test_mistakes(capsys, arguments, message):
    status, out, err = command_line.run(capsys, ["inspect", *arguments])
    assert (status, out) == (2, "")
    assert err.startswith(f"hybridserve: {message}")
    assert "secret" not in err


def test_nobody_listens(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    status, _, err = command_line.run(capsys, ["inspect", f"http://127.0.0.1:{port}"])
    assert (status, err) == (2, f"hybridserve: http://127.0.0.1:{port}: Connection refused\n")


class Other(BaseHTTPRequestHandler):
    """Answers all with `status` and `page`."""

    status: ClassVar[int] = 200
    page: ClassVar[bytes] = b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "page", "message"),
    [
        (404, b"", "is no server of hybridserve: it has no /metrics"),
        (200, b"", "is no server of hybridserve: its /metrics has no hybridserve_..."),
        (200, b"<html>hello</html>", "is no server of hybridserve"),
        (200, b'vllm:num_requests_running{engine="0"} 1.0\n', "is no server of hybridserve"),
        (200, b"\xff\xfe\x00", "is no server of hybridserve"),
        (200, b"hybridserve_engine_up 0.0\n", "its engine does not answer"),
        (200, b"hybridserve_engine_up 1.0\n", "does not tell why tokens are computed: an older version"),
        (500, b'{"error": {"message": "oh"}}', "/metrics: 500: oh"),
        (503, b"down", "/metrics: 503: down"),
    ],
)
def test_a_server_that_is_not_ours(capsys, monkeypatch, status, page, message):
    monkeypatch.setattr(Other, "status", status)
    monkeypatch.setattr(Other, "page", page)
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        result, out, err = command_line.run(capsys, ["inspect", f"http://127.0.0.1:{other.server_port}"])
        thread.join(10)
    assert (result, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_one_that_does_not_answer(capsys, monkeypatch):
    monkeypatch.setattr(inspect_server, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        status, _, err = command_line.run(capsys, ["inspect", url])
    assert (status, err) == (2, f"hybridserve: {url}: no answer in 0.2 s\n")


def page(**series: float | str) -> str:
    lines = ["hybridserve_engine_up 1.0", 'hybridserve_prefix_cache_missed_tokens_total{cause="new"} 0.0']
    return "\n".join([*lines, *(f"hybridserve_{name} {value}" for name, value in series.items())])


def test_every_cause_is_explained():
    assert set(CAUSES) == set(map(str, Miss))
    assert {*inspect_server.HITS} == {*map(str, Cause), "blocks"}
    for name in CAUSES:
        text = page(prefix_cache_queries_total=100) + (
            f'\nhybridserve_prefix_cache_missed_tokens_total{{cause="{name}"}} 100.0'
        )
        told = report("http://x", Series(text, "http://x"))
        assert CAUSES[name].name in told
        assert CAUSES[name].meaning in told
        assert (CAUSES[name].advice in told) or not CAUSES[name].advice


def test_what_is_said_where_there_is_nothing_or_no_cache_or_no_room():
    assert "prompts   none so far" in report("u", Series(page(), "u"))
    off = 'hybridserve_cache_config_info{block_size="16",prefix_caching="False"} 1.0\n'
    told = report("u", Series(off + page(prefix_cache_queries_total=50), "u"))
    assert "are not kept (cache.prefix_caching is false)" in told
    assert "cache.prefix_caching: true keeps what was computed" in told
    short = page(
        prefix_cache_queries_total=50, state_checkpoints_taken_total=5, state_checkpoints_skipped_total=3
    )
    assert "3 of 8 states found no room" in report("u", Series(short, "u"))


def test_the_memory_of_the_host():
    sizes = {"sequences": 2**20, "prefix_blocks": 2**20, "checkpoints": 0, "free": 2**21}
    lines = [f'hybridserve_host_cache_bytes{{kind="{kind}"}} {float(size)}' for kind, size in sizes.items()]
    told = report("u", Series("\n".join([page(), *lines]), "u"))
    assert "4 MiB: 25.0% of sequences that were swapped out, 25.0% K and V that are kept, 50.0% free" in told


def test_the_documentation_shows_what_is_said():
    """Whose lines, but for numbers, are those of a server that has something to say in each of them."""
    text = (Path(__file__).parents[2] / "docs/prefix-cache.md").read_text()
    shown = text.split("```")[3].partition("\n\n")[0].strip().splitlines()
    labelled = {
        "cache_config_info": {'block_size="16",checkpoint_interval="512"': 1},
        "cache_bytes": {
            f'kind="{kind}"': 2**20 for kind in ("kv_cached", "checkpoints", "fragmented", "free")
        },
        "host_cache_bytes": {'kind="free"': 2**32},
        "prefix_cache_hit_tokens_total": {'cause="prompt"': 40, 'cause="parting"': 20},
    }
    lines = [
        f"hybridserve_{name}{{{labels}}} {value}"
        for name, values in labelled.items()
        for labels, value in values.items()
    ]
    counts = page(prefix_cache_queries_total=100, prefix_cache_hits_total=60, prefix_cache_waits_total=3)
    told = report("http://127.0.0.1:8000", Series("\n".join([counts, *lines]), "u"))

    def without_numbers(line: str) -> str:
        return re.sub(r"\d[\d,.]*", "0", line)

    assert [*map(without_numbers, shown)] == [*map(without_numbers, told.splitlines()[: len(shown)])]


def test_it_needs_no_torch(url, monkeypatch):
    monkeypatch.setenv("HYBRIDSERVE_API_KEY", KEY)
    modules = command_line.imported_by(f"from hybridserve.cli import main; main(['inspect', '{url}'])")
    assert not {"torch", "numpy", "transformers", "fastapi", "prometheus_client"} & modules
