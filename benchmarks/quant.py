"""What a format of the weights gains: speed, resident bytes and load time, against bfloat16 in the same run.

    python benchmarks/quant.py --formats int8,int8-w8a8 --workloads W1,W2,W3 --json results.json

The engines take turns, so that they see the same weather; medians of the repeats.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from machine import describe
from models import build
from runs import OPTIONS, WARM_UP, run_engine
from workloads import WORKLOADS, num_scored

from hybridserve import LLM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PLAIN = "bf16"


def load(path: Path, format_name: str, kernels: Mapping[str, str]) -> LLM:
    options: dict[str, Any] = {} if format_name == PLAIN else {"quantization.format": format_name}
    return LLM(path, **OPTIONS, **options, **kernels)


def load_seconds(
    path: Path, names: Sequence[str], kernels: Mapping[str, str], repeats: int
) -> dict[str, float]:
    """Of a whole engine, the file being in memory."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats + 1):  # the first reads the file
        for name in names:
            start = time.perf_counter()
            load(path, name, kernels).close()
            times[name].append(time.perf_counter() - start)
            gc.collect()
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="jamba-100m")
    parser.add_argument("--formats", default="int8,int8-w8a8")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gemm", default="auto", help="kernels.gemm of all engines")
    parser.add_argument("--moe", default="auto", help="kernels.moe of all engines")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.dtype = "bfloat16"
    path = build(args.model, args.dtype)
    names = [PLAIN, *args.formats.split(",")]
    kernels = {"kernels.gemm": args.gemm, "kernels.moe": args.moe}
    seconds = load_seconds(path, names, kernels, args.repeats)
    engines = {name: load(path, name, kernels) for name in names}
    results: dict[str, dict[str, Any]] = {}
    for name, llm in engines.items():
        run_engine(llm, WARM_UP)
        plan = llm.plan
        results[name] = {
            "gemm": plan.backends["gemm"].name,
            "moe": plan.backends["moe"].name,
            "note": plan.quantization and plan.quantization.note,
            "weight_bytes": plan.weight_bytes,
            "load_seconds": seconds[name],
        }
    for workload in args.workloads.split(","):
        make = WORKLOADS[workload]
        taken: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(args.repeats):
            for name, llm in engines.items():
                taken[name].append(run_engine(llm, make(repeat))[0])
        for name in names:
            results[name][workload] = num_scored(workload, make(0)) / statistics.median(taken[name])
    show(args.model, args.workloads.split(","), results)
    if args.json:
        report = describe(args) | {"benchmark": "quant", "results": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def show(model: str, workloads: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> None:
    columns = [*workloads, "weight_bytes", "load_seconds"]
    print(f"{model}, {torch.get_num_threads()} threads; a format's value, and its ratio to {PLAIN}")
    print(f"{'':12}" + "".join(f"{column:>22}" for column in columns))
    for name, found in results.items():
        cells = [f"{found[column]:,.1f} ({found[column] / results[PLAIN][column]:.2f})" for column in columns]
        print(f"{name:12}" + "".join(f"{cell:>22}" for cell in cells))
    for name, found in results.items():
        note = f"; {found['note']}" if found["note"] else ""
        print(f"{name}: gemm {found['gemm']}, moe {found['moe']}{note}")


if __name__ == "__main__":
    main()
