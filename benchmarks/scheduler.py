"""How long the scheduler takes to decide: 256 running and 1,000 waiting requests. Milliseconds, as JSON.

Run: python benchmarks/scheduler.py
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time

from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec, StateSpec, StateTensor
from hybridserve.core.request import Request, SamplingParams
from hybridserve.core.scheduler import Scheduler

NUM_RUNNING, NUM_WAITING, NUM_PROMPT, NUM_STEPS = 256, 1000, 512, 400


def jamba_mini_layout(arena_bytes: int) -> CacheLayout:
    """AI21's Jamba Mini: 32 layers, one of eight attends; bfloat16, the SSM state float32."""
    kv = PagedKVSpec(num_kv_heads=8, head_dim=128, dtype="bfloat16")
    state = StateSpec((StateTensor("conv", (8192, 3), "bfloat16"), StateTensor("ssm", (8192, 16), "float32")))
    return CacheLayout.build([kv if i % 8 == 4 else state for i in range(32)], 16, arena_bytes)


def measure(depth: int, arena_gib: int, *, prefix_caching: bool) -> dict[str, float]:
    """Decode 256 sequences with `depth` steps in flight; the smaller the arena, the more is preempted. No two
    prompts begin alike: what the prefix cache costs where it is of no use."""
    scheduler = Scheduler(
        jamba_mini_layout(arena_gib << 30),
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        prefix_caching=prefix_caching,
    )
    params = SamplingParams(max_tokens=3000, ignore_eos=True)
    for index in range(NUM_RUNNING + NUM_WAITING):
        scheduler.add(Request(f"request-{index}", [index, *range(1, NUM_PROMPT)], params))
    schedule_seconds, update_seconds, in_flight = [], [], []

    def update() -> None:
        step = in_flight.pop(0)
        sampled = {name: 7 for sequence in step.sequences for name in sequence.samples}
        begin = time.perf_counter()
        scheduler.update(step.step_id, sampled)
        update_seconds.append(time.perf_counter() - begin)

    while len(schedule_seconds) < NUM_STEPS:
        begin = time.perf_counter()
        step = scheduler.schedule()
        seconds = time.perf_counter() - begin
        if step is not None:
            in_flight.append(step)
            if step.num_tokens == scheduler.num_running:  # the ramp of prefills is over
                schedule_seconds.append(seconds)
        if step is None or len(in_flight) == depth:
            update()
    return {
        "arena_gib": arena_gib,
        "steps_in_flight": depth,
        "prefix_caching": prefix_caching,
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "num_preemptions": scheduler.counters.num_preemptions,
        "num_compacted_slabs": scheduler.cache.compactor.counters.num_compacted_slabs,
        "schedule_ms_median": round(statistics.median(schedule_seconds) * 1e3, 3),
        "schedule_ms_p99": round(statistics.quantiles(schedule_seconds, n=100)[-1] * 1e3, 3),
        "schedule_ms_max": round(max(schedule_seconds) * 1e3, 3),
        "update_ms_median": round(statistics.median(update_seconds) * 1e3, 3),
    }


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    runs = [
        measure(depth, arena, prefix_caching=caching)
        for caching in (False, True)
        for arena in (24, 8)
        for depth in (1, 2)
    ]
    report = {
        "benchmark": "scheduler",
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "runs": runs,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
