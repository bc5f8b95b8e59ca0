"""What several ranks cost rank 0 besides the model: schedule, build and encode a step, broadcast it, gather
logits. Microseconds and bytes, as JSON.

The model is scripted: 64 sequences that have 4,096 tokens each decode, and no layer is computed. They do so
twice: once rank 0 alone, then with the other ranks, processes that receive every step, decode it, and take
part in one all-reduce of hidden states and one gather of logits. The times of exchanges are those of gloo on
this machine; between them, schedule, build and encode find cold caches, as they do after a model has run.

Run: python benchmarks/tp.py [--ranks 2]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec, StateTensor
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.scheduler import Scheduler
from hybridserve.distributed.groups import Groups
from hybridserve.distributed.process_group import Store, connect_store, open_store
from hybridserve.distributed.topology import Topology
from hybridserve.engine.channel import Channel, Kind
from hybridserve.engine.input_builder import InputBuilder
from hybridserve.engine.wire import decode_step, encode_step

if TYPE_CHECKING:
    from collections.abc import Callable

ADDRESS = "127.0.0.1"
NUM_SEQUENCES, NUM_PROMPT, NUM_STEPS, NUM_WARM = 64, 4096, 300, 20
HIDDEN, VOCAB = 8192, 65536  # Jamba Large
EXCHANGES = ("broadcast", "all_reduce", "gather")
RESULT = Path(__file__).parent / "results" / "tp.json"


def jamba_large_layout() -> CacheLayout:
    """One of eight ranks': 72 layers, one of eight attends; bfloat16, the SSM state float32."""
    kv = PagedKVSpec(num_kv_heads=1, head_dim=128, dtype="bfloat16")
    state = StateSpec((StateTensor("conv", (2048, 3), "bfloat16"), StateTensor("ssm", (2048, 16), "float32")))
    return CacheLayout.build([kv if i % 8 == 4 else state for i in range(72)], 16, 16 << 30)


def connect(store: Store, topology: Topology) -> tuple[Groups, Channel]:
    groups = Groups.connect(store, topology, ADDRESS, torch.device("cpu"), 60.0, has_adapters=False)
    return groups, Channel(groups.control, topology.rank)


def exchange(groups: Groups, topology: Topology) -> tuple[float, float]:
    """Seconds of an all-reduce of hidden states and of a gather of logits, both of 64 rows."""
    hidden = torch.zeros(NUM_SEQUENCES, HIDDEN, dtype=torch.bfloat16)
    logits = torch.zeros(NUM_SEQUENCES, VOCAB // topology.tensor, dtype=torch.bfloat16)
    begin = time.perf_counter()
    groups.tp.all_reduce(hidden)
    reduced = time.perf_counter()
    groups.tp.gather(logits)
    return reduced - begin, time.perf_counter() - reduced


def follow(topology: Topology, port: int) -> None:
    """What the other ranks do."""
    groups, channel = connect(connect_store(ADDRESS, port), topology)
    while (message := channel.receive()).kind == Kind.STEP:
        decode_step(message.payload)
        exchange(groups, topology)


def lead(topology: Topology) -> dict[str, object]:
    store = open_store(ADDRESS)
    command = [sys.executable, __file__, "--ranks", str(topology.size), "--follow"]
    others = [
        subprocess.Popen([*command, f"{rank}:{store.port}"], env={**os.environ, "OMP_NUM_THREADS": "1"})
        for rank in range(1, topology.size)
    ]
    torch.set_num_threads(1)
    groups, channel = connect(store, topology)
    alone, payload_bytes = run_steps(lambda payload: [])

    def with_ranks(payload: bytearray) -> list[float]:
        begin = time.perf_counter()
        channel.send(Kind.STEP, payload)
        return [time.perf_counter() - begin, *exchange(groups, topology)]

    between, _ = run_steps(with_ranks)
    channel.send(Kind.CLOSE)
    for other in others:
        other.wait()
    return {
        "num_ranks": topology.size,
        "num_sequences": NUM_SEQUENCES,
        "tokens_a_sequence": NUM_PROMPT,
        "num_steps": NUM_STEPS,
        "payload_bytes": payload_bytes,
        "cpu_us_median": microseconds(statistics.median(alone.pop("cpu"))),
        "cpu_us_median_between_exchanges": microseconds(statistics.median(between.pop("cpu"))),
        "wall_us_median": {name: microseconds(statistics.median(taken)) for name, taken in alone.items()},
        "wall_us_median_between_exchanges": {
            name: microseconds(statistics.median(taken)) for name, taken in between.items()
        },
        "wall_us_p90_between_exchanges": {
            name: microseconds(statistics.quantiles(taken, n=10)[-1]) for name, taken in between.items()
        },
    }


def run_steps(send: Callable[[bytearray], list[float]]) -> tuple[dict[str, list[float]], int]:
    """Seconds of each part of each step, and the largest payload. `send` returns those of EXCHANGES, if any
    took place."""
    scheduler = Scheduler(
        jamba_large_layout(), max_num_seqs=NUM_SEQUENCES, max_num_batched_tokens=1 << 18, max_model_len=8192
    )
    builder = InputBuilder(block_size=16, seed=0)
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=NUM_STEPS + 100, ignore_eos=True)
    for index in range(NUM_SEQUENCES):
        scheduler.add(Request(f"request-{index}", list(range(NUM_PROMPT)), params))
    seconds: dict[str, list[float]] = {}
    payload_bytes = 0
    for number in range(1 + NUM_WARM + NUM_STEPS):
        busy = time.thread_time()
        times = [time.perf_counter()]
        step = scheduler.schedule()
        assert step is not None
        times.append(time.perf_counter())
        built = builder.build(step, scheduler.requests)
        times.append(time.perf_counter())
        payload = encode_step(built.input)
        times.append(time.perf_counter())
        busy = time.thread_time() - busy
        exchanged = send(payload)
        sampled = {name: 7 for sequence in step.sequences for name in sequence.samples}
        begin = time.perf_counter()
        scheduler.update(step.step_id, sampled)
        update = time.perf_counter() - begin
        if number > NUM_WARM:  # prompts, and the first steps after them, are not what is measured
            spans = [end - start for start, end in itertools.pairwise(times)]
            parts = zip(("schedule", "build", "encode", "update", "cpu"), (*spans, update, busy), strict=True)
            for name, value in (*parts, *zip(EXCHANGES, exchanged, strict=False)):
                seconds.setdefault(name, []).append(value)
            payload_bytes = max(payload_bytes, len(payload))
    return seconds, payload_bytes


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow:
        rank, port = map(int, args.follow.split(":"))
        follow(Topology(args.ranks, 1, rank), port)
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "benchmark": "tp",
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **lead(Topology(args.ranks, 1, 0)),
    }
    text = json.dumps(report, indent=2)
    RESULT.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
