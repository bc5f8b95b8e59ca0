"""What HTTP adds to the engine, and what one HTTP process can do by itself.

    python benchmarks/serving.py --json benchmarks/results/serving.json

- startup: from `hybridserve serve demo` to ready, by phase.
- latency: /health/live while bodies of 5 MB and prompts of 20 MB come, for an engine that costs nothing.
- ceiling: tokens a second, one an event, that one HTTP process on one core streams of that engine.
- overhead: 64 requests at once on a seeded Jamba, streamed over HTTP and by `LLM.generate`, in turn.

The client counts events and reads no JSON. It, the HTTP process and the engine share the machine's cores, but
that `ceiling` gives the HTTP process one of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from machine import describe
from models import build
from scripted_engine import STEPS
from structured import trained

from hybridserve import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
SERVE = [sys.executable, "-m", "hybridserve", "serve"]
SCRIPTED = [sys.executable, str(HERE / "scripted_engine.py"), "serve", "demo"]
ANY_PORT = ["--port", "0"]
NUM_STREAMS = 64
PACES = (125, 190, 250, 375, 500, 0)
"""Steps a second of the engine without cost: each brings a token to each of the streams."""
MB = 10**6


class Server:
    """A server in a process of its own, ready."""

    def __init__(self, command: list[str], **environment: str) -> None:
        begin = time.perf_counter()
        paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, **environment},
        )
        self.log: list[str] = []
        self.port = self._wait_listening()
        threading.Thread(target=self._read, daemon=True).start()
        while self.get("/health/ready") != 200:
            time.sleep(0.02)
        self.start_seconds = time.perf_counter() - begin

    def _wait_listening(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                return int(match[1])
        raise RuntimeError("the server ended:\n" + "\n".join(self.log))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextmanager
def serving(command: list[str], **environment: str) -> Iterator[Server]:
    server = Server(command, **environment)
    try:
        yield server
    finally:
        server.close()


async def stream_all(port: int, bodies: list[dict[str, Any]]) -> tuple[float, int]:
    """Seconds until the last of the streams has ended, and how many events came, but for [DONE]."""

    async def stream(body: dict[str, Any]) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        num_events, tail = 0, b""
        while block := await reader.read(2**16):
            num_events += (tail[-5:] + block).count(b"data: ")
            tail = block
            if num_events == 0 and b" 200 " not in block[:20]:
                raise RuntimeError(block.decode())
        writer.close()
        return num_events - 1

    begin = time.perf_counter()
    counts = await asyncio.gather(*map(stream, bodies))
    return time.perf_counter() - begin, sum(counts)


def with_tokenizer(name: str, dtype: str) -> Path:
    """A model with a tokenizer of its size, so that ids become text."""
    model, file = build(name, dtype), trained(8192)
    path = model.with_name(f"{model.name}-text")
    if not path.exists():
        shutil.copytree(model, path)
        shutil.copy(file, path / "tokenizer.json")
    return path


def measure_overhead(model: str, dtype: str, repeats: int) -> dict[str, Any]:
    path = with_tokenizer(model, dtype)
    options = {"max_num_seqs": NUM_STREAMS, "max_model_len": 1024, "cache.memory_bytes": "1GiB"}
    rng = random.Random(64)
    lengths = [(rng.randint(32, 256), rng.randint(16, 128)) for _ in range(NUM_STREAMS)]
    prompts = [[1, *(rng.randrange(300, 8192) for _ in range(length - 1))] for length, _ in lengths]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in lengths]
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        for prompt, (_, count) in zip(prompts, lengths, strict=True)
    ]
    num_tokens = sum(count for _, count in lengths)
    command = [*SERVE, str(path), *ANY_PORT]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    offline, online = [], []
    llm = LLM(path, max_num_seqs=NUM_STREAMS, max_model_len=1024, memory_bytes="1GiB")
    with llm, serving(command) as server:
        for repeat in range(repeats + 1):
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - begin
            if sum(len(output.outputs[0].token_ids) for output in outputs) != num_tokens:
                raise RuntimeError("the engine did not generate what it was asked for")
            streamed, num_events = asyncio.run(stream_all(server.port, bodies))
            if repeat:  # the first is for warming up
                offline.append(seconds)
                online.append(streamed)
                print(f"overhead: offline {seconds:.2f} s, over HTTP {streamed:.2f} s", flush=True)
    return {
        "num_requests": NUM_STREAMS,
        "num_tokens": num_tokens,
        "num_events": num_events,
        "offline_seconds": offline,
        "http_seconds": online,
        "ratio": statistics.median(online) / statistics.median(offline),
    }


def measure_ceiling(seconds: float) -> dict[str, Any]:
    """The fastest pace at which nearly each token had an event of its own, and what a core did at each."""
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    for pace in PACES:
        with serving([*SCRIPTED, *ANY_PORT], **{STEPS: str(pace)}) as server:
            process = psutil.Process(server.process.pid)
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores[:1])
            for other in (psutil.Process(), *process.children()):
                for thread in other.threads():
                    os.sched_setaffinity(thread.id, cores[1:] or cores)
            count = int(seconds * (pace or PACES[-2]))
            body = {"prompt": "Once", "max_tokens": count, "ignore_eos": True, "stream": True}
            asyncio.run(stream_all(server.port, [{**body, "max_tokens": 16}] * NUM_STREAMS))
            cpu = sum(process.cpu_times()[:2])
            taken, num_events = asyncio.run(stream_all(server.port, [body] * NUM_STREAMS))
            cpu = sum(process.cpu_times()[:2]) - cpu
        row = {
            "steps_a_second": pace,
            "tokens_a_second": NUM_STREAMS * count / taken,
            "events_a_second": num_events / taken,
            "cpu_share": cpu / taken,
            "cpu_microseconds_an_event": cpu / num_events * 1e6,
        }
        rows.append(row)
        print("ceiling:", ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return {
        "num_streams": NUM_STREAMS,
        "paces": rows,
        "events_a_second": max(row["events_a_second"] for row in rows),
    }


class Probe:
    """Asks /health/live again and again on a connection that it keeps."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._stop = threading.Event()
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            begin = time.perf_counter()
            self._connection.request("GET", "/health/live")
            self._connection.getresponse().read()
            self.seconds.append(time.perf_counter() - begin)

    def stop(self) -> dict[str, float]:
        self._stop.set()
        self._thread.join()
        self._connection.close()
        ordered = sorted(self.seconds)
        return {
            "num_probes": len(ordered),
            "p50_ms": ordered[len(ordered) // 2] * 1e3,
            "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
            "max_ms": ordered[-1] * 1e3,
        }


def measure_latency() -> dict[str, Any]:
    text = "All work and no play makes Jack a dull boy. "
    message = {"role": "user", "content": "hi"}
    loads = {
        "nothing": None,
        "body of 5 MB": {"prompt": "Once", "max_tokens": 1, "user": text * (5 * MB // len(text))},
        "prompt of 5 MB": {"prompt": text * (5 * MB // len(text)), "max_tokens": 1},
        "prompt of 20 MB": {"prompt": text * (20 * MB // len(text)), "max_tokens": 1},
        "5 MB of messages": {"messages": [message] * (5 * MB // 36), "max_tokens": 1},
        "5 MB of ids": {"prompt": [1234] * (5 * MB // 5), "max_tokens": 1},
    }
    report: dict[str, Any] = {}
    with serving([*SCRIPTED, *ANY_PORT, "--server.limits.body_bytes", "64MiB"], **{STEPS: "100"}) as server:
        for name, body in loads.items():
            data = json.dumps(body).encode()
            path = "/v1/chat/completions" if body and "messages" in body else "/v1/completions"
            probe = Probe(server.port)
            statuses = []
            begin = time.perf_counter()
            while time.perf_counter() - begin < 3 or not statuses:
                if body is None:
                    time.sleep(3)
                    statuses.append(0)
                    continue
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
                connection.request("POST", path, data)
                answer = connection.getresponse()
                answer.read()
                statuses.append(answer.status)
                connection.close()
            report[name] = {**probe.stop(), "num_requests": len(statuses), "statuses": sorted(set(statuses))}
            print(f"latency: {name}:", report[name], flush=True)
    return report


def measure_startup(repeats: int) -> dict[str, Any]:
    seconds = []
    for _ in range(repeats):
        with serving([*SERVE, "demo", *ANY_PORT]) as server:
            seconds.append(server.start_seconds)
            time.sleep(0.2)
            log = list(server.log)
    phases = [line for line in log if re.search(r": [0-9.]+ s$|ready in", line)]
    print("startup:", [round(each, 2) for each in seconds], *phases, sep="\n    ", flush=True)
    return {"seconds": seconds, "log": phases}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="startup,latency,ceiling,overhead")
    parser.add_argument("--model", default="jamba-100m", help="of `overhead`")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5, help="of each pace of `ceiling`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measures = {
        "startup": lambda: measure_startup(args.repeats),
        "latency": measure_latency,
        "ceiling": lambda: measure_ceiling(args.seconds),
        "overhead": lambda: measure_overhead(args.model, args.dtype, args.repeats),
    }
    report: dict[str, Any] = {**describe(args), "benchmark": "serving"}
    for part in args.parts.split(","):
        report[part] = measures[part]()
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
