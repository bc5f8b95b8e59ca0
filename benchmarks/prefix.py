"""What the prefix cache saves, and what it costs where there is nothing to save.

    python benchmarks/prefix.py --json benchmarks/results/prefix.json

- W4: 32 requests at once, 512 shared tokens and 16 of their own, 16 generated. Prompt tokens computed and
  output tokens/s, cache on against off.
- different: as W4, but no two prompts have anything in common.
- chat: 8 turns of 200 tokens, 64 generated in each. Tokens computed in each turn.
- trace: five conversations that share a system prompt, some more lively than others. Hit rate with half the
  memory that all would take, against that of an oracle that forgets nothing.
- swap: 4 prompts of 2,000 tokens, 48 generated; every third step one of those that run gives way. Output
  tokens/s where it is swapped against where it is computed again, with the cache off and on.

Cache on and off (swap: swapped and computed again) take turns within a repeat, the first changing, so that
both see the same weather; the ratio is the median of the repeats'. The trace needs no model: it is planned
with the model's sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from machine import describe
from models import build
from workloads import WORKLOADS, Workload

from hybridserve import LLM, SamplingParams
from hybridserve.core.request import Request, RequestStatus
from hybridserve.core.scheduler import Scheduler
from hybridserve.engine.messages import EngineRequest

if TYPE_CHECKING:
    from hybridserve.core.cache_spec import CacheLayout

SEED = 20


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def run(llm: LLM, workload: Workload) -> tuple[float, float]:
    """Seconds, and tokens computed that were no draws."""
    before = llm.stats()["num_computed_tokens"]
    start = time.perf_counter()
    llm.generate([prompt for prompt, _ in workload], [params(count) for _, count in workload])
    seconds = time.perf_counter() - start
    drawn = sum(count - 1 for _, count in workload)  # the last is not computed
    return seconds, llm.stats()["num_computed_tokens"] - before - drawn


def different(repeat: int) -> Workload:
    rng = random.Random(9000 + repeat)
    return [([rng.randrange(300, 8192) for _ in range(528)], 16) for _ in range(32)]


def compare(on: LLM, off: LLM, make: Any, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for repeat in range(repeats):
        pair = [("on", on), ("off", off)]
        for name, llm in pair if repeat % 2 else pair[::-1]:
            runs[name].append(run(llm, make(repeat)))
    num_output = sum(count for _, count in make(0))
    seconds = {name: [each[0] for each in all_] for name, all_ in runs.items()}
    ratios = [off / on for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    computed = {name: statistics.median(each[1] for each in all_) for name, all_ in runs.items()}
    return {
        "speed": statistics.median(ratios),
        "speeds": ratios,
        "tokens_per_second": {name: num_output / statistics.median(all_) for name, all_ in seconds.items()},
        "prompt_tokens_computed": computed,
        "fewer": computed["off"] / computed["on"],
    }


def chat(llm: LLM, num_turns: int = 8, length: int = 200, answer: int = 64) -> list[dict[str, int]]:
    rng = random.Random(SEED)
    said: list[int] = []
    turns = []
    for _ in range(num_turns):
        said = said + [rng.randrange(300, 8192) for _ in range(length)]
        before = llm.stats()["num_computed_tokens"]
        output = llm.generate([said], params(answer))[0]
        computed = int(llm.stats()["num_computed_tokens"] - before)
        turns.append({"new": length + answer, "computed": computed, "all": len(said) + answer})
        said = said + output.outputs[0].token_ids
    return turns


def make_trace(seed: int = SEED) -> list[tuple[int, list[int], int]]:
    """(conversation, what is said, tokens of the answer), in the order in which they come."""
    rng = random.Random(seed)
    weights = [8, 4, 2, 1, 1]
    turns = []
    for _ in range(60):
        session = rng.choices(range(5), weights)[0]
        said = [rng.randrange(300, 8192) for _ in range(rng.randint(40, 160))]
        turns.append((session, said, rng.randint(20, 100)))
    return turns


class Replay(NamedTuple):
    hit_rate: float
    possible: float
    """Of prompt tokens, those in whole blocks that had been computed before, ever."""
    num_bytes: int
    """In use, at most."""


def replay(layout: CacheLayout, interval: int, num_slabs: int, *, window: int) -> Replay:
    """Play the trace. A conversation begins again, with the same system prompt, when it is longer than
    `window` tokens."""
    scheduler = Scheduler(
        replace(layout, num_slabs=num_slabs),
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        prefix_caching=True,
        checkpoint_interval=interval,
    )
    rng = random.Random(1)
    system = [rng.randrange(300, 8192) for _ in range(512)]
    said: dict[int, list[int]] = {}
    most = num_seen = 0
    seen: set[tuple[int, ...]] = set()
    for number, (session, words, answer) in enumerate(make_trace()):
        before = said.get(session, system)
        if len(before) > window:
            before = system
        prompt = before + words
        request = Request(f"r{number}", prompt, params(answer))
        size = layout.block_size
        num_seen += max(
            (end for end in range(size, len(prompt), size) if tuple(prompt[:end]) in seen), default=0
        )
        scheduler.add(request)
        while scheduler.has_work:
            step = scheduler.schedule()
            assert step is not None
            draws = [name for sequence in step.sequences for name in sequence.samples]
            scheduler.update(step.step_id, {name: rng.randrange(300, 8192) for name in draws})
        said[session] = all_ = prompt + request.output_ids
        seen |= {tuple(all_[:end]) for end in range(size, len(all_), size)}
        most = max(most, scheduler.cache.usage().num_bytes)
    counters = scheduler.cache.prefix.counters
    num_queried = counters.num_queried_tokens
    return Replay(sum(counters.hit_tokens.values()) / num_queried, num_seen / num_queried, most)


def trace(layout: CacheLayout, interval: int) -> dict[str, Any]:
    unbounded = replay(layout, interval, 1 << 20, window=4096)
    num_slabs = unbounded.num_bytes // 2 // layout.slab_bytes + 1  # one is the null slab
    half = replay(layout, interval, num_slabs, window=4096)
    return {
        "oracle": half.possible,
        "unbounded": unbounded.hit_rate,
        "half": half.hit_rate,
        "share": half.hit_rate / half.possible,
        "bytes": unbounded.num_bytes,
        "num_slabs": num_slabs,
    }


def give_way(llm: LLM, repeat: int, *, num_prompts: int = 4, every: int = 3) -> float:
    """Output tokens/s. Who gives way has drawn a token since the last time, so that all come to an end."""
    rng = random.Random(7000 + repeat)
    core, count = llm._core, 48
    for number in range(num_prompts):
        prompt = [rng.randrange(300, 8192) for _ in range(2000)]
        core.add(EngineRequest(request_id=f"swap{number}", prompt_ids=prompt, params=params(count)))
    drawn: dict[str, int] = {}
    start, num_steps = time.perf_counter(), 0
    while core.has_work:
        num_steps += 1
        if num_steps % every == 0:
            running = [r for r in core.scheduler.requests.values() if r.status is RequestStatus.RUNNING]
            ready = [r for r in running if len(r.output_ids) > drawn.get(r.id, 0)]
            if ready:
                chosen = rng.choice(ready)
                drawn[chosen.id] = len(chosen.output_ids)
                core.scheduler.preempt(chosen)
        core.step()
    return num_prompts * count / (time.perf_counter() - start)


def swap(path: Path, options: dict[str, Any], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cache in (False, True):
        engines = {
            kind: LLM(path, prefix_caching=cache, preemption=kind, host_swap_bytes="1GiB", **options)
            for kind in ("swap", "recompute")
        }
        speeds: dict[str, list[float]] = {kind: [] for kind in engines}
        for llm in engines.values():
            run(llm, [([1] * 32, 4)] * 2)
        for repeat in range(repeats):
            kinds = list(engines)
            for kind in kinds if repeat % 2 else kinds[::-1]:
                speeds[kind].append(give_way(engines[kind], repeat))
        ratios = [a / b for a, b in zip(speeds["swap"], speeds["recompute"], strict=True)]
        gauges = {kind: llm.stats() for kind, llm in engines.items()}
        found["on" if cache else "off"] = {
            "speed": statistics.median(ratios),
            "speeds": ratios,
            "tokens_per_second": {kind: statistics.median(each) for kind, each in speeds.items()},
            "num_preemptions": {kind: each["num_preemptions"] for kind, each in gauges.items()},
            "num_computed_tokens": {kind: each["num_computed_tokens"] for kind, each in gauges.items()},
            "num_swaps_out": gauges["swap"]["num_swaps_out"],
            "num_swap_bytes": gauges["swap"]["num_swap_bytes"],
        }
        for llm in engines.values():
            llm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="jamba-100m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="W4,different,chat,trace,swap")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = build(args.model, args.dtype)
    wanted = args.only.split(",")
    options: dict[str, Any] = {"max_num_seqs": 64, "memory_bytes": "1GiB", "max_model_len": 4096}
    on, off = LLM(path, **options), LLM(path, prefix_caching=False, **options)
    block, interval = on.plan.layout.block_size, on.plan.checkpoint_interval
    results: dict[str, Any] = {"block_size": block, "checkpoint_interval": interval}
    print(f"{args.model} {args.dtype}, {torch.get_num_threads()} threads, a state every {interval} tokens")
    for llm in (on, off):
        run(llm, [([1] * 32, 4)] * 2)
    for name, make in (("W4", WORKLOADS["W4"]), ("different", different)):
        if name in wanted:
            results[name] = found = compare(on, off, make, args.repeats)
            print(
                f"{name}: {found['fewer']:.1f}x fewer prompt tokens computed, {found['speed']:.3f}x output "
                f"tokens/s ({found['tokens_per_second']['on']:.1f} against "
                f"{found['tokens_per_second']['off']:.1f}; of each repeat "
                f"{', '.join(f'{speed:.3f}' for speed in found['speeds'])})",
                flush=True,
            )
    if "chat" in wanted:
        results["chat"] = turns = chat(on)
        bound = all(turn["computed"] <= turn["new"] + block + interval for turn in turns)
        print(
            f"chat: computed {[turn['computed'] for turn in turns]} of {[turn['all'] for turn in turns]} "
            f"tokens; {'within' if bound else 'NOT within'} new tokens, a block and an interval"
        )
    if "trace" in wanted:
        results["trace"] = found = trace(on.plan.layout, interval)
        print(
            f"trace: hit rate {found['half']:.3f} with half the memory, {found['unbounded']:.3f} with all, "
            f"{found['oracle']:.3f} of an oracle: {found['share']:.3f} of that"
        )
    if "swap" in wanted:
        results["swap"] = swap(path, options, args.repeats)
        for cache, found in results["swap"].items():
            print(
                f"swap, cache {cache}: {found['speed']:.2f}x output tokens/s "
                f"({found['tokens_per_second']['swap']:.1f} against "
                f"{found['tokens_per_second']['recompute']:.1f} computed again)",
                flush=True,
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = describe(args) | {"benchmark": "prefix", "results": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
