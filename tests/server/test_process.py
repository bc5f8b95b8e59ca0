"""The real server: `hybridserve serve demo` as a process, over a socket, with signals and faults."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.processes import end, is_running, wait_until
from tests.harness.serve_process import ROOT, Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "sk-of-a-user"
SECRET = "xylophone-secret"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a key, and adapters that may be loaded."""
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    adapters = ROOT / "hybridserve" / "models" / "demo" / "adapters"
    path.write_text(
        "model: demo\nserved_name: tiny\nmax_model_len: 2048\n"
        f"lora: {{allow_runtime_loading: true, roots: [{adapters}], max_loaded: 2}}\n"
        f"server: {{api_keys: [{KEY}], admin_keys: [sk-admin]}}\nscheduler: {{max_num_seqs: 16}}\n"
    )
    with server("--log-format", "json", "--verbose", file=path) as one:
        yield one
        one.signal(signal.SIGTERM)
        assert one.wait_exit() == 0
        check_log(one)


def check_log(one: Server) -> None:
    """JSON lines, the start told in few of them, nothing secret."""
    records = [json.loads(line) for line in one.log]
    starting = [record["message"] for record in records if record["level"] == "info"]
    assert 6 <= len([message for message in starting if not message.endswith(" so far")]) <= 15
    assert any(re.fullmatch(r"load: \d+\.\d\d s", message) for message in starting)
    assert any(re.match(r"ready in .* http://127.0.0.1:\d+ serves tiny", message) for message in starting)
    text = "\n".join(one.log)
    assert SECRET not in text
    assert KEY not in text
    assert "sk-admin" not in text


AUTH = {"authorization": f"Bearer {KEY}"}
ADMIN = {"authorization": "Bearer sk-admin"}
LONG = {"prompt": "for the", "max_tokens": 1500, "ignore_eos": True}


def test_it_generates_what_the_library_does(shared):
    from hybridserve import LLM, SamplingParams

    params = {"temperature": 0, "max_tokens": 12, "logprobs": 1}
    messages = [{"role": "user", "content": "what is the time?"}]
    with LLM("demo", max_model_len=2048, max_num_seqs=16) as llm:
        (expected,) = llm.generate("for the", SamplingParams(**params))
        (chat,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
    status, answer = shared.post("/v1/completions", {"prompt": "for the", **params}, **AUTH)
    assert status == 200
    choice = answer["choices"][0]
    assert choice["text"] == expected.outputs[0].text
    theirs = [next(iter(position.values())).logprob for position in expected.outputs[0].logprobs]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(theirs, abs=1e-4)
    assert answer["usage"]["completion_tokens"] == len(expected.outputs[0].token_ids)
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    _, said = shared.post("/v1/chat/completions", body, **AUTH)
    assert said["choices"][0]["message"]["content"] == chat.outputs[0].text
    assert said["prompt_token_ids"] == chat.prompt_token_ids
    assert said["prompt_token_ids"].count(1) == 1


def test_b026_a_seed_whoever_else_is_there(shared):
    body = {"prompt": "for the", "max_tokens": 20, "seed": 5, "n": 2}
    _, alone = shared.post("/v1/completions", body, **AUTH)
    busy = ("/v1/completions", {**LONG, "max_tokens": 100})
    others = [threading.Thread(target=shared.post, args=busy, kwargs=AUTH) for _ in range(2)]
    for thread in others:
        thread.start()
    _, together = shared.post("/v1/completions", body, **AUTH)
    for thread in others:
        thread.join()
    texts = [[choice["text"] for choice in answer["choices"]] for answer in (alone, together)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_an_adapter_is_loaded_used_and_unloaded(shared):
    names = lambda: [card["id"] for card in json.loads(shared.get("/v1/models", **AUTH)[1])["data"]]  # noqa: E731
    assert names() == ["tiny"] or "bard" not in names()
    body = {"lora_name": "bard", "lora_path": "shakespeare"}
    assert shared.post("/v1/load_lora_adapter", body, **AUTH)[0] == 403
    status, answer = shared.post("/v1/load_lora_adapter", body, **ADMIN)
    assert (status, answer["lora_name"]) == (200, "bard"), answer
    assert "bard" in names()
    ask = {"prompt": "for the", "temperature": 0, "max_tokens": 20}
    _, base = shared.post("/v1/completions", ask, **AUTH)
    _, bard = shared.post("/v1/completions", {**ask, "model": "bard"}, **AUTH)
    assert base["choices"][0]["text"] != bard["choices"][0]["text"]
    for path in ("../../demo", "/etc", "nowhere", "shakespeare\x00"):
        status, answer = shared.post("/v1/load_lora_adapter", {**body, "lora_path": path}, **ADMIN)
        assert status == 400, answer
    for name in ("../x", "a b", "x" * 100, "tiny", "demo"):
        assert shared.post("/v1/load_lora_adapter", {**body, "lora_name": name}, **ADMIN)[0] == 400
    status, answer = shared.post("/v1/unload_lora_adapter", {"lora_name": "bard"}, **ADMIN)
    assert (status, answer["still_in_use"]) == (200, False)
    assert shared.post("/v1/completions", {**ask, "model": "bard"}, **AUTH)[0] == 404


def test_b009_memory_is_free_within_a_second_of_a_hang_up(shared):
    response = shared.request("POST", "/v1/completions", {**LONG, "stream": True}, **AUTH)
    response.read(10)
    assert gauge(shared, "state_slots_used") == 1
    response.close()
    assert wait_until(lambda: gauge(shared, "state_slots_used") == 0, 1.5)
    assert gauge(shared, "kv_blocks_used") == gauge(shared, "num_requests_running") == 0


def gauge(one: Server, name: str) -> float:
    page = one.get("/metrics", **AUTH)[1].decode()
    return next(
        float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"hybridserve_{name} ")
    )


def test_s031_nothing_of_a_prompt_is_in_the_log(shared):
    shared.post("/v1/completions", {"prompt": SECRET, "max_tokens": 2, "user": SECRET}, **AUTH)
    shared.post("/v1/completions", {"prompt": SECRET, SECRET.replace("-", "_"): 1}, **AUTH)
    shared.post("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "n": 0}, **AUTH)
    assert SECRET not in "\n".join(shared.log)  # and again when the server has ended


def test_s001_nothing_but_the_port_listens(shared):
    inodes = set()
    for pid in (shared.process.pid, shared.engine_pid):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(descriptor.readlink()))
    listening = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{shared.process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes and (table[:3] == "udp" or fields[3] == "0A"):
                listening.append((table, int(fields[1].partition(":")[2], 16)))
    assert listening == [("tcp", shared.port)]


def test_the_server_holds_no_torch(shared):
    maps = Path(f"/proc/{shared.process.pid}/maps").read_text()
    assert "/torch/" not in maps
    assert "/torch/" in Path(f"/proc/{shared.engine_pid}/maps").read_text()


def dearest_bodies() -> dict[str, tuple[str, bytes, int]]:
    """Of about 5 MB, each of other parts, with the route that reads them and the status that it answers."""
    completions, chat = "/v1/completions", "/v1/chat/completions"
    ask, talk = {"prompt": "a", "max_tokens": 1}, {"messages": [{"role": "user", "content": "a"}]}
    long = {"role": "user", "content": "b " * 400}
    properties = {f"p{i}": {} for i in range(400_000)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    some = {"name": "f", "description": "d " * 2_000_000, "parameters": {"type": "object"}}
    bodies = {
        "a text that is taken": (completions, ask | {"user": "u" * 5_000_000}, 200),
        "as many strings as are taken": (completions, ask | {"metadata": many_strings(14_000, 340)}, 200),
        "a long text": (completions, ask | {"prompt": "word " * 1_000_000}, 400),
        "ids": (completions, ask | {"prompt": [5] * 900_000}, 400),
        "as many messages as are read": (chat, {"messages": [long] * 5_900}, 400),
        "a tool's long description": (chat, talk | {"tools": [{"type": "function", "function": some}]}, 400),
        "lists of lists": (completions, ask | {"prompt": [[5]] * 800_000}, 413),
        "strings": (completions, ask | {"prompt": ["a"] * 800_000}, 413),
        "messages": (chat, {"messages": [{"role": "user", "content": "hi"}] * 120_000}, 413),
        "objects": (completions, ask | {"metadata": {f"{i}": {"a": []} for i in range(240_000)}}, 413),
        "biases": (completions, ask | {"logit_bias": {f"{i}": 1 for i in range(380_000)}}, 413),
        "properties": (chat, talk | {"tools": [{"type": "function", "function": function}]}, 413),
    }
    made = {name: (path, json.dumps(body).encode(), status) for name, (path, body, status) in bodies.items()}
    return made | {"garbage": (completions, b'{"prompt": "' + b"x" * 5_000_000, 400)}


def many_strings(count: int, length: int) -> dict[str, str]:
    return {f"{i}": "m" * length for i in range(count)}


@pytest.mark.slow
def test_b035_a_large_body_does_not_stop_the_others(shared):
    """Each moment counts alike: a stall of a second weighs as much as the hundred questions that it kept from
    being asked. Reading what is refused with 413 takes one to five of them."""
    waits: list[float] = []
    statuses: list[int] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            begin = time.monotonic()
            statuses.append(shared.get("/health/live")[0])
            waits.append(time.monotonic() - begin)
            time.sleep(0.005)

    def longest() -> float:
        """Of 99 % of the time that was polled, the longest that an answer took."""
        left = sum(waits) * 0.01
        for wait in sorted(waits, reverse=True):
            left -= wait
            if left < 0:
                return wait
        return 0.0

    answered: dict[str, int] = {}
    bodies = dearest_bodies()
    polling = threading.Thread(target=poll)
    polling.start()
    try:
        for name, (path, body, _) in bodies.items():
            connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=60)
            with contextlib.closing(connection):
                connection.request("POST", path, body, AUTH)
                answered[name] = connection.getresponse().status
    finally:
        stop.set()
        polling.join()
    assert answered == {name: status for name, (_, _, status) in bodies.items()}
    assert set(statuses) == {200}
    assert longest() < 1.0, "seconds; 0.1 on a machine that does nothing else"


def test_requests_of_a_thousand_clients(shared):
    """More than run at once; each gets its own answer."""
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        body = {"prompt": [5 + index], "max_tokens": 3, "return_token_ids": True}
        _, answer = shared.post("/v1/completions", body, **AUTH)
        answers[index] = answer["choices"][0]["prompt_token_ids"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: [5 + index] for index in range(64)}


def stream_of(one: Server, **fields: Any) -> http.client.HTTPResponse:
    response = one.request("POST", "/v1/completions", {**LONG, "stream": True, **fields})
    assert response.status == 200
    response.read(20)
    return response


def test_b037_sigterm_lets_what_runs_finish():
    with server() as one:
        streams = [stream_of(one, max_tokens=150) for _ in range(4)]
        one.signal(signal.SIGTERM)
        assert wait_until(lambda: one.get("/health/ready")[0] == 503, 2)
        assert one.get("/health/live")[0] == 200
        assert one.post("/v1/completions", {"prompt": "a"})[0] == 503
        for response in streams:
            rest = response.read()
            assert b'"finish_reason":"length"' in rest
            assert rest.endswith(b"data: [DONE]\n\n")
        pid = one.engine_pid
        assert one.wait_exit() == 0
        assert not is_running(pid)


@pytest.mark.slow
def test_b037_what_does_not_finish_in_time_is_told_so():
    with server("--drain-seconds", "0.5") as one:
        response = stream_of(one, max_tokens=4000)
        begin = time.monotonic()
        one.signal(signal.SIGTERM)
        rest = response.read()
        assert b'"message":"the server is being stopped"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert one.wait_exit() == 0
        assert not [line for line in one.log if " ERROR " in line]
        assert 0.4 < time.monotonic() - begin < 8


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_b036_a_second_signal_does_not_wait(number, status):
    with server() as one:
        response = stream_of(one, max_tokens=4000)
        pid = one.engine_pid
        one.signal(number)
        assert wait_until(lambda: one.get("/health/ready")[0] == 503, 2)
        one.signal(number)
        assert b'"message":"the server is being stopped"' in response.read()
        assert one.wait_exit(8) == status
        assert not is_running(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_b036_a_signal_while_loading(number, status):
    with server(ready=False) as one:
        one.wait_listening()
        assert one.get("/health/ready")[0] in (0, 503)
        pid = one.engine_pid
        try:
            one.signal(number)
            assert one.wait_exit(8) == status
            assert wait_until(lambda: not is_running(pid))
        finally:
            end(pid)
        assert "Traceback" not in "\n".join(one.log)


def test_b034_the_engine_is_killed():
    with server() as one:
        response = stream_of(one, max_tokens=4000)
        os.kill(one.engine_pid, signal.SIGKILL)
        assert wait_until(lambda: one.get("/health/ready")[0] == 503, 1)
        rest = response.read()
        assert b'"code":"engine_failed"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert one.wait_exit(10) == 1
        assert any("SIGKILL" in line for line in one.log)


@pytest.mark.slow
def test_b034_the_engine_hangs():
    with server("--heartbeat-seconds", "1") as one:
        pid = one.engine_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert one.get("/health/ready")[0] == 200
            assert wait_until(lambda: one.get("/health/ready")[0] == 503, 5)
            assert one.wait_exit(10) == 1
            assert wait_until(lambda: not is_running(pid))
        finally:
            end(pid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-here"], "nothing-here"),
        (["demo", "--host", "0.0.0.0"], "server.host: '0.0.0.0' lets other machines in"),
        (["demo", "--max-num-seqs", "0"], "scheduler.max_num_seqs"),
        (["demo", "--port", "99999"], "server.port"),
        (["demo", "--api-key", "a b"], "server.api_keys"),
        (["demo", "--host", "192.0.2.1", "--insecure"], "192.0.2.1:8000"),
        (["demo", "--cache.memory_bytes", "1KiB"], "memory_bytes"),
        (["demo", "--log-format", "xml"], "log_format"),
        (["demo", "--server.limits.n", "0"], "server.limits.n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_one_line(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "hybridserve", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert message in last
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken():
    with server(ready=False) as one:
        one.wait_listening()
        done = subprocess.run(
            [sys.executable, "-m", "hybridserve", "serve", "demo", "--port", str(one.port)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        *log, said = done.stderr.splitlines()
        assert done.returncode == 2
        assert f"127.0.0.1:{one.port}: Address already in use" in said
        assert all(" INFO " in line for line in log)
