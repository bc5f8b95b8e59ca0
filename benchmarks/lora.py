"""What adapters cost: throughput beside the base model, and what swapping does to those who run.

    python benchmarks/lora.py --dtype bfloat16 --json benchmarks/results/lora.json

- throughput: W2 with every request on one of 8 adapters at random, or all on one, against the base model in
  the same engine, in turn. Targets: `dense` is attention, Mamba and dense MLPs; `experts` routers and experts
  as well.
- zipf: 64 adapters, 8 on the device, requests by Zipf's law, so many at a time. Hit rate (requests that
  needed no load) and time to the first token, against all 64 on the device.
- gaps: 8 sequences decode while others, of one token each, make adapters be loaded from disk. The time
  between two tokens of those that decode: the longest while a load is on its way, against the median.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from adapters import NUM_MIXED, adaptable_modules, build_adapters, create_core, mixed_throughput
from machine import describe
from models import build

from hybridserve import SamplingParams
from hybridserve.engine.messages import EngineRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hybridserve.engine.core import EngineCore
    from hybridserve.layers.lora import AdaptableModule

NUM_REGISTERED = 64
NUM_RESIDENT = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="jamba-100m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--parts", default="throughput,zipf,gaps")
    parser.add_argument("--targets", default="dense,experts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="of the part zipf")
    parser.add_argument("--concurrency", type=int, default=16, help="of the part zipf")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = build(args.model, args.dtype)
    modules = adaptable_modules(path)
    print(f"{args.model} {args.dtype}, {torch.get_num_threads()} threads")
    results: dict[str, Any] = {}
    for part in args.parts.split(","):
        if part == "throughput":
            results[part] = [throughput(args, path, modules, name) for name in args.targets.split(",")]
        else:
            results[part] = {"zipf": zipf, "gaps": gaps}[part](args, path, modules)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({**describe(args), "benchmark": "lora", "results": results}, indent=2) + "\n"
        )


def throughput(
    args: argparse.Namespace, path: Path, modules: Mapping[str, AdaptableModule], targets: str
) -> dict[str, Any]:
    found = mixed_throughput(path, modules, targets, args.repeats)
    base, shares = statistics.median(found["rates"]["base"]), found["shares"]
    print(
        f"throughput, {targets:8} base {base:7.1f} tok/s; one adapter {shares['one']:.1%}, {NUM_MIXED} mixed "
        f"{shares['mixed']:.1%}",
        flush=True,
    )
    return found


# ---- many adapters, few places


def zipf(args: argparse.Namespace, path: Path, modules: Mapping[str, AdaptableModule]) -> dict[str, Any]:
    adapters = build_adapters(path, modules, "dense", NUM_REGISTERED)
    names = list(adapters)
    weights = [1 / rank**args.exponent for rank in range(1, len(names) + 1)]
    rng = random.Random(0)
    asked = rng.choices(names, weights, k=args.requests)
    prompts = [[1, *(rng.randrange(300, 8192) for _ in range(rng.randint(31, 127)))] for _ in asked]
    found = {}
    for what, max_loaded in (("all resident", NUM_REGISTERED), ("8 resident", NUM_RESIDENT)):
        core = create_core(path, {"adapters": adapters, "max_loaded": max_loaded})
        if max_loaded == NUM_REGISTERED:
            serve(core, [[1, 300]] * len(names), names, len(names), 1)
        before = core.gauges()
        times = serve(core, prompts, asked, args.concurrency, 16)
        after = core.gauges()
        core.close()
        loads = after["num_adapter_loads"] - before["num_adapter_loads"]
        quantiles = statistics.quantiles(times, n=100)
        found[what] = {
            "hit_rate": 1 - loads / len(asked),
            "ttft_p50": quantiles[49],
            "ttft_p99": quantiles[98],
            "host_hits": after["num_adapter_host_hits"] - before["num_adapter_host_hits"],
            "disk_reads": after["num_adapter_disk_reads"] - before["num_adapter_disk_reads"],
        }
        print(
            f"zipf, {what:12} hit rate {found[what]['hit_rate']:.1%}, first token p50 "
            f"{quantiles[49] * 1e3:.0f} ms, p99 {quantiles[98] * 1e3:.0f} ms",
            flush=True,
        )
    return found


def serve(
    core: EngineCore, prompts: Sequence[list[int]], adapters: Sequence[str], concurrency: int, num_tokens: int
) -> list[float]:
    """Seconds to the first token of each request, `concurrency` of them at any time."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    waiting = list(enumerate(zip(prompts, adapters, strict=True)))[::-1]
    running, times = 0, []
    while waiting or running:
        while waiting and running < concurrency:
            index, (prompt, adapter) = waiting.pop()
            core.add(request(f"r{index}", prompt, params, adapter))
            running += 1
        for output in core.step():
            if output.metrics is not None:
                running -= 1
                times.append((output.metrics.first_token or 0.0) - output.metrics.arrival)
    return times


def request(request_id: str, prompt: list[int], params: SamplingParams, adapter: str | None) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_ids=prompt, params=params, adapter=adapter, arrival=time.monotonic()
    )


# ---- does a load hold up those who run?


def gaps(
    args: argparse.Namespace, path: Path, modules: Mapping[str, AdaptableModule]
) -> list[dict[str, Any]]:
    return [gaps_of(path, build_adapters(path, modules, name, 16), name) for name in args.targets.split(",")]


def gaps_of(path: Path, adapters: Mapping[str, Path], targets: str) -> dict[str, Any]:
    names = list(adapters)
    core = create_core(path, {"adapters": adapters, "max_loaded": NUM_RESIDENT, "host_bytes": 1})
    long = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
    for index in range(8):
        core.add(request(f"run{index}", [1, 300 + index], long, [None, *names[:3]][index % 4]))
    short = SamplingParams(temperature=0, max_tokens=1)
    quiet: list[float] = []
    loading: list[float] = []
    last, count, next_load = 0.0, 0, 20
    while any(name.startswith("run") for name in core.scheduler.requests):
        count += 1
        if count == next_load:  # the first 20 steps have loads of their own
            core.add(request(f"load{count}", [1], short, names[3 + count % (len(names) - 3)]))
        was_loading = core.adapters.num_loading > 0
        outputs = core.step()
        now = time.perf_counter()
        is_loading = was_loading or core.adapters.num_loading > 0
        if is_loading:
            next_load = count + 10
        if count > 20 and any(output.request_id == "run0" for output in outputs):
            (loading if is_loading else quiet).append(now - last)
        last = now
    num_loads = core.gauges()["num_adapter_loads"]
    core.close()
    median = statistics.median(quiet + loading)
    found = {
        "targets": targets,
        "num_loads": num_loads,
        "median": median,
        "longest_while_loading": max(loading),
        "longest_otherwise": max(quiet),
        "ratio": max(loading) / median,
    }
    print(
        f"gaps, {targets:8} {num_loads} loads; between tokens: median {median * 1e3:.1f} ms, longest while "
        f"loading {max(loading) * 1e3:.1f} ms ({found['ratio']:.2f}x), otherwise {max(quiet) * 1e3:.1f} ms",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
