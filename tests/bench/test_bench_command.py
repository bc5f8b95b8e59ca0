"""`hybridserve bench` as it is typed: against a server of these tests, and against the demo model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridserve.cli import main
from tests.harness.bench_targets import DONE, Reply, completion, openai, stub_server, usage_event

ROOT = Path(__file__).parents[2]
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # it may have been ignored where the tests were started
os.execv(sys.executable, [sys.executable, "-m", "hybridserve", *sys.argv[1:]])
"""


def answer(path, body):
    """As many tokens as were asked for."""
    count = body.get("max_tokens", 3)
    prompt = body.get("prompt") or body["messages"][-1]["content"].split()
    pieces = [completion("x", number + 1) for number in range(count)]
    return [*pieces, usage_event(len(prompt), count), DONE]


@pytest.fixture
def server():
    with stub_server(openai(answer, a=1, b=1)) as stub:
        yield stub


@pytest.fixture
def bench(capsys, monkeypatch):
    """Runs the command; returns its exit status and what it says on standard output and standard error."""
    monkeypatch.delenv("HYBRIDSERVE_API_KEY", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as status:
            main(["bench", *map(str, arguments)])
        shown = capsys.readouterr()
        return status.value.code, shown.out, shown.err

    return run


def test_a_url(bench, server, tmp_path):
    out = tmp_path / "out.json"
    status, text, err = bench(
        *(server.url, "--workload", "20x6", "--num-requests", 9, "--concurrency", 3, "--warmup", 2),
        *("--json", out, "--slo", "ttft=60s"),
    )
    assert (status, err) == (0, "")
    assert re.search(r"^requests +9 ", text, re.MULTILINE)
    found = json.loads(out.read_text())
    summary = found["summary"]
    assert (summary["num_ok"], summary["num_prompt_tokens"], summary["num_output_tokens"]) == (9, 180, 54)
    assert summary["goodput"]["share"] == 1.0
    assert found["load"] == {"kind": "closed", "concurrency": 3}
    assert found["counts"] == "told by the server"
    assert len(found["requests"]) == 9
    posted = [body for _, _, body in server.requests if body]
    assert len(posted) == 1 + 2 + 9  # one to see what the server can do
    measured = [body["prompt"] for body in posted[3:]]
    assert not any(body["prompt"] in measured for body in posted[:3])


def test_conversations_with_adapters(bench, server, tmp_path):
    out = tmp_path / "out.json"
    arguments = ("--workload", "5x2", "--send", "chat", "--turns", 3, "--num-requests", 30, "--warmup", 0)
    status, _, _ = bench(server.url, *arguments, "--adapters", "a,b,base", "--json", out)
    assert status == 0
    found = json.loads(out.read_text())
    counts = {name: part["num_ok"] for name, part in found["adapters"].items()}
    assert sum(counts.values()) == 30
    bodies = [body for path, _, body in server.requests if path == "/v1/chat/completions"][1:]
    assert {body["model"] for body in bodies} == {"stub", "a", "b"}
    assert sorted(len(body["messages"]) for body in bodies) == [1] * 10 + [3] * 10 + [5] * 10


def test_an_open_loop_of_a_file(bench, server, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 2}\n{"turns": ["two", "three"], "adapter": "b"}\n')
    status, text, _ = bench(server.url, "--workload", path, "--rate", 50, "--arrivals", "constant")
    assert status == 0
    assert "50 a second (constant)" in text
    assert re.search(r"^requests +3 ", text, re.MULTILINE)


def test_duration(bench, server):
    server.respond = slow(server.respond)
    status, text, _ = bench(server.url, "--workload", "3x3", "--concurrency", 2, "--duration", 0.5)
    assert status == 0
    assert float(re.search(r"^seconds +([\d.]+)", text, re.MULTILINE)[1]) >= 0.5


def slow(respond):
    def slowly(*given) -> Reply:
        reply = respond(*given)
        reply.pause = 0.02
        return reply

    return slowly


def test_picture(bench, server, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    assert bench(server.url, "--plot", path)[0] == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_some_failures_are_told_and_all_fail_the_command(bench, server):
    good, number = server.respond, iter(range(1000))

    def respond(path, headers, body):
        if body is not None and next(number) in (3, 5):
            return Reply([b'{"error": {"message": "busy"}}'], 429, "application/json")
        return good(path, headers, body)

    server.respond = respond
    status, text, err = bench(server.url, "--workload", "3x3", "--num-requests", 10)
    assert (status, err) == (0, "")
    assert re.search(r"^requests +8 ", text, re.MULTILINE)
    assert "2  HTTP 429: busy" in text

    rehearsed = iter([True, True])
    server.respond = lambda path, headers, body: (
        good(path, headers, body)
        if body is None or next(rehearsed, False)
        else Reply([b'{"error": {"message": "busy"}}'], 429, "application/json")
    )
    status, text, err = bench(server.url, "--workload", "3x3", "--num-requests", 4)
    assert (status, err) == (1, "hybridserve: no request succeeded: HTTP 429: busy\n")
    assert re.search(r"^failed +4", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--slo", "ttf=5ms"], "--slo: 'ttf' is unknown; did you mean ttft?"),
        (["--workload", "W7"], "--workload: 'W7' is unknown"),
        (["--workload", "missing.jsonl"], "missing.jsonl: No such file"),
        (["--adapters", "a,c"], "--adapters: 'c' is not served; there is a, b, base"),
        (["--adapters", ","], "--adapters: names nothing"),
        (["--adapter-mix", "zipf"], "--adapter-mix: needs --adapters"),
        (["--adapters", "a", "--adapter-mix", "zpif"], "--adapter-mix: 'zpif' is neither"),
        (["--rate", "3", "--concurrency", "3"], "--concurrency: is a closed loop"),
        (["--arrivals", "constant"], "--arrivals: is for an open loop"),
        (["--think", "3"], "--think: is for conversations"),
        (["--turns", "2"], "--turns: is for sharegpt"),
        (["--model", "nope"], "serves no 'nope'; there is stub, a, b"),
        (["--num-requests", "0"], "0 is not at least 1"),
        (["--rate", "0"], "0 is not above 0"),
        (["--temperature", "-1"], "temperature: "),
        (["--json", "missing/out.json"], "missing is not a directory"),
        (["--plot", "out.doc"], "its ending must be one of"),
        (["--block-size", "16"], "--cache.block_size: is a setting of an engine"),
        (["--api-key", "a\nb"], "--api-key: holds characters that no header can"),
        (["--workloda", "W1"], "did you mean --workload?"),
    ],
)
def test_mistakes_are_one_line_and_send_nothing(bench, server, arguments, complaint):
    status, out, err = bench(server.url, *arguments)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
    assert not any(body for _, _, body in server.requests)


@pytest.mark.parametrize("option", ["--model", "--api-key"])
def test_what_is_for_a_url_alone(bench, option):
    status, _, err = bench("demo", option, "x")
    assert (status, err) == (2, f"hybridserve: {option}: is for a URL\n")


def test_a_bad_line_of_a_file(bench, server, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": 7}\n')
    status, _, err = bench(server.url, "--workload", path)
    assert (status, err) == (
        2,
        f"hybridserve: {path}:2: prompt: is neither text nor a list of token ids, or empty\n",
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [([], "adapter: 'c' is not served; there is a, b"), (["--adapters", "a"], "adapter: 'c' is not served")],
)
def test_a_file_with_an_unknown_adapter(bench, server, tmp_path, arguments, complaint):
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "fine", "adapter": "a"}\n{"prompt": "not", "adapter": "c"}\n')
    status, _, err = bench(server.url, "--workload", path, *arguments)
    assert status == 2
    assert complaint in err
    assert not any(body for _, _, body in server.requests)


def test_a_file_with_adapters_takes_no_others(bench, server, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "fine", "adapter": "a"}\n')
    status, _, err = bench(server.url, "--workload", path, "--adapters", "b")
    assert (status, err) == (2, f"hybridserve: --adapters: lines of {path} name their own\n")


def test_the_key_of_the_environment(bench, server, monkeypatch, tmp_path):
    monkeypatch.setenv("HYBRIDSERVE_API_KEY", "sesame")
    out = tmp_path / "out.json"
    status, text, err = bench(server.url, "--workload", "3x3", "--num-requests", 2, "--json", out)
    assert status == 0
    assert {headers.get("authorization") for _, headers, _ in server.requests} == {"Bearer sesame"}
    assert "sesame" not in text + err + out.read_text()
    bench(server.url, "--workload", "3x3", "--num-requests", 2, "--api-key", "other")
    assert server.requests[-1][1]["authorization"] == "Bearer other"


def test_ctrl_c_reports_what_has_ended(server):
    server.respond = slow(server.respond)
    arguments = ("bench", server.url, "--workload", "3x3", "--num-requests", "100000")
    command = [sys.executable, "-c", INTERRUPTIBLE, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(server.requests) < 60 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert "interrupted: what was under way is not counted" in out
    assert int(re.search(r"^requests +(\d+)", out, re.MULTILINE)[1]) > 5


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_a_url_needs_no_torch(server):
    code = (
        "import sys\nfrom hybridserve.cli import main\n"
        f"try:\n    main(['bench', {server.url!r}, '--num-requests', '2'])\nexcept SystemExit as error:\n"
        "    assert not error.code\nprint(*sys.modules, file=sys.stderr)"
    )
    done = run_python(code)
    assert not {"torch", "numpy", "transformers", "matplotlib", "rich"} & set(done.stderr.split())


@pytest.mark.parametrize("command", ["bench", "chat"])
def test_help_needs_little(command):
    code = (
        f"import sys\nfrom hybridserve.cli import main\ntry:\n    main(['{command}', '--help'])\n"
        "except SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    )
    done = run_python(code)
    assert "--api_key" in done.stdout
    assert not {"torch", "numpy", "transformers", "asyncio", "rich"} & set(done.stderr.split())


def test_the_demo_model(bench, tmp_path):
    out = tmp_path / "out.json"
    arguments = ("--workload", "12x4", "--turns", 2, "--num-requests", 8, "--adapters", "base,shakespeare")
    status, _, err = bench("demo", *arguments, "--json", out)
    assert (status, err) == (0, "")
    found = json.loads(out.read_text())
    assert found["target"]["plan"]["max_model_len"] == 4096
    summary = found["summary"]
    assert (summary["num_ok"], summary["num_failed"], summary["num_output_tokens"]) == (8, 0, 32)
    assert sorted(each["num_prompt_tokens"] for each in found["requests"]) == [12] * 4 + [28] * 4
    assert set(found["adapters"]) == {"base", "shakespeare"}
    assert summary["num_estimated"] == 0
    assert 0 < summary["ttft"]["p50"] <= summary["e2e"]["p50"]
