"""Uses a server for minutes as clients do that are in a hurry, change their minds and ask for nonsense, while
adapters come and go; then looks at what is left of it: nothing may be.

Every answer is checked as well: its shape, that each continuation ends once, that a schema was kept, and that
a greedy one says what the same request said while nobody else was there. The server is `hybridserve serve` on
the demo model, in a process of its own, with one thing added: SIGUSR1 makes it tell what it holds.

Run: python benchmarks/soak.py [--minutes 10] [--seed 0] [--clients 16]
Writes JSON, and exits with 1 if anything is left or was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import psutil

from hybridserve.bench.http_client import HttpClient, HttpFailure

ROOT = Path(__file__).parents[1]
ADAPTERS = ROOT / "hybridserve" / "models" / "demo" / "adapters"
SOURCES = ("shakespeare", "scripture", "python")
NAMES = ("one", "two", "three", "four", "five")
"""Of adapters; more than fit on the device, and each with another content from time to time."""
MAX_SEQUENCES, QUEUE = 16, 48
WARM_SECONDS = 10.0
IDLE_SECONDS = 30.0
MAX_GROWTH = 16 * 2**20
"""Bytes of resident memory, from the second third to the last, that are put down to allocators."""
ZERO_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_blocks_used",
    "state_slots_used",
    "kv_cache_usage_perc",
    'cache_bytes{kind="kv_live"}',
    'cache_bytes{kind="state_live"}',
    "num_swapped_out",
    'host_cache_bytes{kind="sequences"}',
    "adapter_sequences_running",
    "adapter_sequences_waiting",
)
PROMPTS = ("for the", "the people of the", "And he said", "def main(", "客单价 is", "a")
MESSAGES = [{"role": "user", "content": "what is the time?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "tea": {"type": "boolean"}},
    "required": ["name", "tea"],
    "additionalProperties": False,
}
NONSENSE: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"n": 10**6},
    {"prompt": ""},
    {"max_tokens": 10**6},
    {"guided_json": {}},
    {"logit_bias": {"99999999": 1}},
    {"structured_outputs": {"regex": "("}},
    {"model": "nobody"},
)


class Broken(Exception):
    """What a server must not do."""


@dataclass
class Findings:
    statuses: Counter[str] = field(default_factory=Counter)
    num_left: int = 0
    """Requests whose client hung up."""
    num_tokens: int = 0
    num_compared: int = 0
    faults: list[str] = field(default_factory=list)


# ---- the server, and what it holds


def serve_watched(path: str) -> int:
    """In the server's process."""
    from hybridserve.config.loader import load_config
    from hybridserve.server import serve as module
    from hybridserve.server.logs import set_up_logging

    class Watched(module._Serving):
        async def run(self) -> int:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, lambda: telling.append(loop.create_task(self._tell())))
            telling: list[asyncio.Task[None]] = []
            return await super().run()

        async def _tell(self) -> None:
            client = self._engine._client
            assert client is not None
            view = await self._engine.view()
            infos = await self._engine.list_adapters()
            held = {
                "sequences": self._service.num_sequences,
                "names": len(client._names),
                "streams": len(client._streams),
                "aborted": len(client._aborted),
                "calls": len(client._calls),
                "texts": len(client._processor._tracked),
                "requests in the engine": len(view.requests),
                "references to adapters": sum(info.num_refs for info in infos),
            }
            tasks = len(asyncio.all_tasks()) - 1
            print(json.dumps({"held": held, "tasks": tasks}), flush=True)

    module._Serving = Watched  # type: ignore[misc]
    set_up_logging("text", verbose=False)
    return module.serve(load_config(file=path))


class Server:
    def __init__(self, folder: Path) -> None:
        file = folder / "soak.yaml"
        file.write_text(
            f"model: demo\nmax_model_len: 1024\nscheduler: {{max_num_seqs: {MAX_SEQUENCES}}}\n"
            "cache: {memory_bytes: 48MiB, host_swap_bytes: 16MiB}\n"
            f"lora: {{allow_runtime_loading: true, roots: [{ADAPTERS}], max_loaded: 3}}\n"
            f"server: {{port: 0, max_queue: {QUEUE}}}\n"
        )
        command = [sys.executable, __file__, "--serve", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment, cwd=ROOT
        )
        self.watched = psutil.Process(self.process.pid)
        self.engine: psutil.Process
        self.port = 0

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + 90
        while "ready in" not in (text := self._read_log()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Broken(f"it does not start:\n{text}")
            await asyncio.sleep(0.1)
        self.port = int(text.partition("http://127.0.0.1:")[2].split()[0].rstrip(";"))
        (self.engine,) = self.watched.children()

    def _read_log(self) -> str:
        return Path(self.log.name).read_text()

    def client(self) -> HttpClient:
        return HttpClient("127.0.0.1", self.port, is_secure=False, headers={})

    async def tell(self) -> dict[str, Any]:
        """What it holds, by its own account and by the system's."""
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGUSR1)
        told: dict[str, Any] = json.loads(await asyncio.to_thread(self.process.stdout.readline))
        told["children"] = len(self.watched.children(recursive=True))
        told["files"] = [process.num_fds() for process in (self.watched, self.engine)]
        return told

    def memory(self) -> tuple[int, int]:
        """Resident bytes of (the server, the engine)."""
        return self.watched.memory_info().rss, self.engine.memory_info().rss

    def end(self) -> int:
        """Its exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


# ---- clients


class Traffic:
    """Random requests, the same ones for the same seed; when they come is for the machine to say."""

    def __init__(self, server: Server, findings: Findings, expected: dict[str, str], seed: int) -> None:
        self._server = server
        self._findings = findings
        self._expected = expected
        self._seed = seed

    async def run(self, num_clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        work = [self._ask_until(end, index) for index in range(num_clients)]
        await asyncio.gather(*work, self._change_adapters_until(end))

    async def _ask_until(self, end: float, index: int) -> None:
        rng = random.Random(f"{self._seed} {index}")
        client = self._server.client()
        while time.monotonic() < end:
            path, body = _request(rng)
            patience = rng.uniform(0.0, 0.8) if rng.random() < 0.3 else None
            try:
                async with asyncio.timeout(patience):
                    status, answer = await ask(client, path, body)
                self._check(path, body, status, answer)
            except TimeoutError:
                self._findings.num_left += 1
            except (Broken, HttpFailure, KeyError, ValueError) as error:
                self._findings.faults.append(f"{type(error).__name__}: {error} ({json.dumps(body)[:300]})")
            if rng.random() < 0.05:
                client.close()
        client.close()

    async def _change_adapters_until(self, end: float) -> None:
        rng = random.Random(f"{self._seed} adapters")
        client = self._server.client()
        while time.monotonic() < end:
            name = rng.choice(NAMES)
            if rng.random() < 0.6:
                body = {"lora_name": name, "lora_path": rng.choice(SOURCES)}
                status, answer = await ask(client, "/v1/load_lora_adapter", body)
                is_fine = status == 200
            else:
                status, answer = await ask(client, "/v1/unload_lora_adapter", {"lora_name": name})
                is_fine = status in (200, 404)
            self._findings.statuses[f"adapters {status}"] += 1
            if not is_fine:
                self._findings.faults.append(f"adapters: {status} {answer}")
            await asyncio.sleep(rng.uniform(0.0, 0.2))
        client.close()

    def _check(self, path: str, body: dict[str, Any], status: int, answer: Any) -> None:
        self._findings.statuses[f"{status}"] += 1
        if status in (400, 404, 429):
            if set(answer) != {"error"}:
                raise Broken(f"an error of another shape: {answer}")
            if status == 400 and not body.get("user"):
                raise Broken(f"refused: {answer}")
            return
        if status != 200:
            raise Broken(f"status {status}: {answer}")
        if body.get("user"):
            raise Broken("nonsense was served")
        texts = texts_of(answer, body.get("stream", False))
        if sorted(texts) != list(range(body.get("n", 1))):
            raise Broken(f"continuations {sorted(texts)}")
        self._findings.num_tokens += answer["usage"]["completion_tokens"]
        for text in texts.values():
            if "structured_outputs" in body and set(json.loads(text)) != {"name", "tea"}:
                raise Broken(f"the schema was not kept: {text[:100]}")
            if (expected := self._expected.get(key_of(path, body))) is not None:
                self._findings.num_compared += 1
                if text != expected:
                    raise Broken(f"it says {text!r}, alone it says {expected!r}")


def _request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """`user` marks what is to be refused: it has no other effect."""
    if rng.random() < 0.5:
        path, body = "/v1/chat/completions", {"messages": MESSAGES}
    else:
        path, body = "/v1/completions", {"prompt": rng.choice(PROMPTS) * rng.choice((1, 1, 1, 60))}
    body |= {"max_tokens": rng.choice((1, 4, 16, 64, 200)), "n": rng.choice((1, 1, 1, 2, 4))}
    kind = rng.random()
    if kind < 0.25:
        body |= {"temperature": 0, "max_tokens": 16}
    elif kind < 0.4:
        body |= {"structured_outputs": {"json": SCHEMA}, "max_tokens": 200}
    elif kind < 0.5:
        body |= {"stop": [" ", "e"], "logprobs": True if "messages" in body else 2}
    elif kind < 0.6:
        body = {"prompt": rng.choice(PROMPTS), **rng.choice(NONSENSE), "user": "nonsense"}
        path = "/v1/completions"
    if "model" not in body and rng.random() < 0.5:
        body["model"] = rng.choice(NAMES)
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return path, body


def key_of(path: str, body: dict[str, Any]) -> str:
    """What makes the answer, of a request to the base model; adapters change their content meanwhile."""
    asked = {name: value for name, value in body.items() if not name.startswith("stream") and name != "n"}
    return f"{path} {json.dumps(asked, sort_keys=True)}"


def texts_of(answer: dict[str, Any], is_stream: bool) -> dict[int, str]:
    """By index. Raises Broken where one has not ended just once."""
    texts: dict[int, str] = {}
    ended: Counter[int] = Counter()
    for event in answer["events"] if is_stream else [answer]:
        if "error" in event:
            raise Broken(f"a stream failed: {event}")
        for choice in event["choices"]:
            said = choice.get("delta") or choice.get("message") or choice
            index = choice["index"]
            texts[index] = texts.get(index, "") + (said.get("content") or said.get("text") or "")
            ended[index] += choice["finish_reason"] is not None
    if set(ended.values()) != {1}:
        raise Broken(f"continuations ended so often: {dict(ended)}")
    return texts


async def ask(client: HttpClient, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """(status, JSON); of a stream, its events and the usage that the last one has."""
    data = b"" if body is None else json.dumps(body).encode()
    async with client.request("GET" if body is None else "POST", path, data) as response:
        raw = await response.read()
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        is_json = response.headers.get("content-type") == "application/json"
        return response.status, json.loads(raw) if is_json else raw.decode()
    *blocks, done, rest = raw.decode().split("\n\n")
    if (done, rest) != ("data: [DONE]", ""):
        raise Broken(f"a stream ends in {done[:100]!r}")
    events = [json.loads(block.removeprefix("data: ")) for block in blocks]
    return response.status, {"events": events, "usage": events[-1].get("usage")}


# ---- what is left


async def wait_idle(server: Server) -> dict[str, Any]:
    """What the server holds when it has nothing to do, or after so long."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        told = await server.tell()
        await read_gauges(server, told)
        if time.monotonic() > deadline or not (any(told["held"].values()) or any(told["gauges"].values())):
            return told
        await asyncio.sleep(0.2)


async def read_gauges(server: Server, told: dict[str, Any]) -> None:
    """Adds those that are zero where nobody asks for anything, and how many adapters there are."""
    client = server.client()
    _, page = await ask(client, "/metrics")
    client.close()
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    values = {name.removeprefix("hybridserve_"): float(value) for name, value in lines}
    told["adapters"] = values["adapters"]
    told["empty slabs"] = {
        kind: values[f'slabs{{kind="{kind}"}}'] - values[kept]
        for kind, kept in (("kv", "kv_blocks_cached"), ("state", "state_checkpoints"))
    }
    told["gauges"] = {name: value for name, value in values.items() if name.startswith(ZERO_GAUGES)}


async def unload_all(server: Server) -> None:
    client = server.client()
    for name in NAMES:
        await ask(client, "/v1/unload_lora_adapter", {"lora_name": name})
    client.close()


async def fill(server: Server) -> int:
    """The status of a request for exactly as many sequences as have room: 429 if one was forgotten."""
    client = server.client()
    body = {"prompt": "a", "n": MAX_SEQUENCES + QUEUE, "max_tokens": 1}
    status, _ = await ask(client, "/v1/completions", body)
    client.close()
    return status


async def watch_memory(server: Server, samples: list[tuple[float, int, int]]) -> None:
    begin = time.monotonic()
    while True:
        samples.append((time.monotonic() - begin, *server.memory()))
        await asyncio.sleep(1.0)


def growth(values: list[int]) -> int:
    """From the middle third to the last, by their medians."""
    third = len(values) // 3
    return int(median(values[-third:]) - median(values[third : 2 * third]))


def slope(samples: list[tuple[float, int, int]], column: int) -> float:
    """Bytes a minute, through the last two thirds."""
    late = samples[len(samples) // 3 :]
    fit = linear_regression([each[0] / 60 for each in late], [each[column] for each in late])
    return fit.slope


async def soak(server: Server, seconds: float, seed: int, num_clients: int) -> dict[str, Any]:
    await server.wait_ready()
    findings = Findings()
    expected = await answers_alone(server)
    await Traffic(server, Findings(), {}, -1 - seed).run(num_clients, WARM_SECONDS)
    await unload_all(server)
    before = await wait_idle(server)
    samples: list[tuple[float, int, int]] = []
    watching = asyncio.create_task(watch_memory(server, samples))
    begin = time.monotonic()
    await Traffic(server, findings, expected, seed).run(num_clients, seconds)
    duration = time.monotonic() - begin
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    await unload_all(server)
    after = await wait_idle(server)
    filled = await fill(server)
    grown = [growth([sample[column] for sample in samples]) for column in (1, 2)]
    faults = [*findings.faults[:20], *compare(before, after, grown)]
    if filled != 200:
        faults.append(f"there is no room for as many as there should be: {filled}")
    return {
        "seconds": round(duration, 1),
        "requests": dict(sorted(findings.statuses.items())),
        "hung_up": findings.num_left,
        "tokens": findings.num_tokens,
        "compared": findings.num_compared,
        "before": before,
        "after": after,
        "rss_mib_at_start": [round(value / 2**20, 1) for value in samples[0][1:]],
        "rss_mib_at_end": [round(value / 2**20, 1) for value in samples[-1][1:]],
        "rss_growth_mib": [round(value / 2**20, 2) for value in grown],
        "rss_mib_per_minute": [round(slope(samples, column) / 2**20, 3) for column in (1, 2)],
        "faults": faults,
    }


async def answers_alone(server: Server) -> dict[str, str]:
    """What greedy requests to the base model say while nobody else is there."""
    client = server.client()
    expected = {}
    for prompt in PROMPTS:
        for repeat in (1, 60):
            body = {"prompt": prompt * repeat, "max_tokens": 16, "temperature": 0}
            _, answer = await ask(client, "/v1/completions", body)
            expected[key_of("/v1/completions", body)] = answer["choices"][0]["text"]
    body = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    _, answer = await ask(client, "/v1/chat/completions", body)
    expected[key_of("/v1/chat/completions", body)] = answer["choices"][0]["message"]["content"]
    client.close()
    return expected


def compare(before: dict[str, Any], after: dict[str, Any], grown: list[int]) -> list[str]:
    faults = [f"still held: {name}: {count}" for name, count in after["held"].items() if count]
    faults += [f"not zero: {name}: {value}" for name, value in after["gauges"].items() if value]
    # What nobody asks for any more stays for later prompts, and each slab that is held holds something of it.
    faults += [
        f"more slabs than units: {kind}: {num}" for kind, num in after["empty slabs"].items() if num > 0
    ]
    for name in ("tasks", "children", "files", "adapters"):
        if after[name] != before[name]:
            faults.append(f"{name}: {before[name]} before, {after[name]} after")
    for who, size in zip(("the server", "the engine"), grown, strict=True):
        if size > MAX_GROWTH:
            faults.append(f"{who} has grown by {size / 2**20:.1f} MiB")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_watched(options.serve)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            result = asyncio.run(soak(server, options.minutes * 60, options.seed, options.clients))
            status = server.end()
        finally:
            server.kill()
        if status != 0:
            result["faults"].append(f"after SIGTERM it exits with {status}")
        if "Traceback" in (log := Path(folder, "log").read_text()) or "ERROR" in log:
            result["faults"].append(f"in its log: {log[-2000:]}")
    print(json.dumps({"python": platform.python_version(), "seed": options.seed, **result}, indent=1))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
