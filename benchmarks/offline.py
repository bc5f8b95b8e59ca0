"""Offline generation: workloads W1-W4 through the engine and through transformers' `generate`, in one run.

    python benchmarks/offline.py --dtype bfloat16 --workloads W1,W2,W3 --json benchmarks/results/offline.json

Prints tokens/s (median of the repeats), the ratio to transformers (static batch, padded on the left), and
where the engine's time goes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from models import build
from workloads import WORKLOADS, Workload, num_scored

from hybridserve import LLM, SamplingParams

PHASES = ("schedule", "build", "forward", "sample", "update")


def run_engine(llm: LLM, workload: Workload) -> tuple[float, dict[str, float]]:
    """Seconds of the whole run, and of each phase of its steps."""
    prompts = [prompt for prompt, _ in workload]
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in workload]
    before = llm.stats()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    for output, (_, wanted) in zip(outputs, workload, strict=True):
        if len(output.outputs[0].token_ids) != wanted:
            raise RuntimeError("the engine did not generate what the workload asks for")
    after = llm.stats()
    return seconds, {phase: after[f"{phase}_seconds"] - before[f"{phase}_seconds"] for phase in PHASES}


def run_transformers(model: Any, workload: Workload) -> float:
    """Seconds of one static batch, padded on the left, to the longest output."""
    longest = max(len(prompt) for prompt, _ in workload)
    ids = torch.zeros(len(workload), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(workload):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    count = max(output for _, output in workload)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="jamba-100m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--workloads", default="W1,W2,W3,W4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-repeats", type=int, default=1, help="0 leaves transformers out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = build(args.model, args.dtype)
    llm = LLM(path, max_num_seqs=64, memory_bytes="1GiB", max_model_len=4096)
    run_engine(llm, [([1] * 32, 4)] * 2)
    peer = None
    if args.peer_repeats:
        from transformers import AutoModelForCausalLM

        peer = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
        run_transformers(peer, [([1] * 32, 4)])
    results = []
    print(f"{args.model} {args.dtype}, {torch.get_num_threads()} threads")
    print(f"{'':4} {'engine':>9} {'peer':>9} {'ratio':>6}  share of the engine's time")
    for name in args.workloads.split(","):
        make = WORKLOADS[name]
        runs, times = [], []
        for repeat in range(args.repeats):  # in turn, so that both see the same weather
            runs.append(run_engine(llm, make(repeat)))
            if peer is not None and repeat < args.peer_repeats:
                times.append(run_transformers(peer, make(repeat)))
        seconds = statistics.median(run[0] for run in runs)
        engine = num_scored(name, make(0)) / seconds
        phases = {phase: statistics.median(run[1][phase] for run in runs) / seconds for phase in PHASES}
        other = num_scored(name, make(0)) / statistics.median(times) if times else None
        shares = ", ".join(f"{phase} {share:.1%}" for phase, share in phases.items())
        compared = f"{other:9.1f} {engine / other:6.2f}" if other else f"{'-':>9} {'-':>6}"
        print(f"{name:4} {engine:9.1f} {compared}  {shares}", flush=True)
        results.append(
            {
                "workload": name,
                "engine": engine,
                "transformers": other,
                "phases": phases,
                "transformers_seconds": times,
                "seconds": [r[0] for r in runs],
            }
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(describe(args) | {"results": results}, indent=2) + "\n")


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "benchmark": "offline",
        "model": args.model,
        "dtype": args.dtype,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
    }


if __name__ == "__main__":
    main()
