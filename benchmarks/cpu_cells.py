"""What `cpu.py` measures, one cell a process: functions of options, which return what JSON can hold."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from adapters import adaptable_modules, mixed_throughput
from limits import floor_seconds, head_parameters, product_rates, read_bandwidth
from models import build
from resident import resident_weights
from runs import load_engine, load_transformers, run_engine, run_transformers
from where import Clock, Recorder, host_work, shares
from workloads import WORKLOADS, num_scored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import SimpleNamespace

BATCH = 64
"""Sequences of the cell `host`."""

SECONDS = 2.0
"""That each measurement of a limit may take."""


def checkpoint(args: SimpleNamespace) -> Path:
    """int8 weights are made of the bfloat16 checkpoint's while loading."""
    return build(args.model, "float32" if args.dtype == "float32" else "bfloat16")


def options(args: SimpleNamespace) -> dict[str, Any]:
    return {"quantization.format": "int8"} if args.dtype == "int8" else {}


def limits(args: SimpleNamespace) -> dict[str, Any]:
    """For weights as large as the model's."""
    from hybridserve.config.loader import load_config
    from hybridserve.engine.planner import make_plan

    path = checkpoint(args)
    plan = make_plan(load_config(path, None, options(args)), path)
    bandwidth = read_bandwidth(plan.weight_bytes, SECONDS)
    rates = product_rates({"bfloat16": "bf16"}.get(args.dtype, args.dtype), SECONDS)
    return {
        "weight_bytes": plan.weight_bytes,
        "bandwidths": bandwidth,
        "product_rates": rates,
        "bandwidth": max(bandwidth.values()),
        "macs": max(rates.values()),
    }


def engine(args: SimpleNamespace) -> dict[str, Any]:
    """A workload's rate, and how near to the limits that is."""
    path = checkpoint(args)
    llm = load_engine(path, **options(args))
    make = WORKLOADS[args.workload]
    seconds, floors, computed = [], [], []
    for repeat in range(args.repeats):
        with Recorder(llm) as recorder:
            seconds.append(run_engine(llm, make(repeat))[0])
        head = head_parameters(path)
        floors.append(floor_seconds(llm.plan, head, recorder.steps, args.bandwidth, args.macs))
        computed.append(sum(step.num_tokens for step in recorder.steps))
    median = statistics.median(seconds)
    return {
        "tokens_per_second": num_scored(args.workload, make(0)) / median,
        "of_limit": statistics.median(floors) / median,
        "limit": num_scored(args.workload, make(0)) / statistics.median(floors),
        "tokens_computed": computed,
        "seconds": seconds,
        "backends": {op: choice.name for op, choice in llm.plan.backends.items()},
    }


def transformers(args: SimpleNamespace) -> dict[str, Any]:
    """The same through `generate`."""
    model = load_transformers(checkpoint(args), getattr(torch, args.dtype))
    make = WORKLOADS[args.workload]
    seconds = [run_transformers(model, make(repeat)) for repeat in range(args.repeats)]
    rate = num_scored(args.workload, make(0)) / statistics.median(seconds)
    return {"tokens_per_second": rate, "seconds": seconds}


def where(args: SimpleNamespace) -> dict[str, Any]:
    """Shares of a workload's time; steps run call by call, for operators to be seen."""
    clock = Clock()
    clock.watch_all()
    llm = load_engine(checkpoint(args), **options(args) | {"kernels.graphs": "never"})
    clock.seconds.clear()
    with Recorder(llm, clock) as recorder:
        seconds, _ = run_engine(llm, WORKLOADS[args.workload](0))
    return {"shares": shares(seconds, recorder.recorded, clock.seconds), "seconds": seconds}


def host(args: SimpleNamespace) -> dict[str, Any]:
    """Milliseconds of a decode step of many sequences."""
    clock = Clock()
    clock.watch_all()
    llm = load_engine(checkpoint(args), **options(args))
    with Recorder(llm, clock) as recorder:
        run_engine(llm, [([1, 300 + row], 32) for row in range(BATCH)])
    return host_work(recorder.recorded, BATCH)


def adapters(args: SimpleNamespace) -> dict[str, Any]:
    """W2 with 8 adapters mixed, and without any, in turn."""
    path = checkpoint(args)
    return mixed_throughput(path, adaptable_modules(path), "dense", args.repeats, **options(args))


def memory(args: SimpleNamespace) -> dict[str, Any]:
    return resident_weights(checkpoint(args), options(args))


def start(args: SimpleNamespace) -> dict[str, Any]:
    """Seconds from a command to its first character: of `generate demo`, its kernels being built, and in turn
    with it of a bare `import torch`, as Python does it and with its collector off, which is how the command
    does. Two tokens are asked for: the first may be no character yet. Byte code is kept, as users have it."""
    torch_alone = "import torch; print('.', flush=True)"
    commands = {
        "generate demo": ["-m", "hybridserve", "generate", "demo", "--prompt", "ROMEO:", "--max_tokens", "2"],
        "import torch": ["-c", torch_alone],
        "import torch, no collector": ["-c", f"import gc; gc.disable(); {torch_alone}"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(args.repeats + 1):  # the first builds, compiles and reads files
            for name, command in commands.items():
                seconds[name].append(_first_character([sys.executable, *command], environment))
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    return {
        "seconds": {name: each[1:] for name, each in seconds.items()},
        "medians": medians,
        "beside_torch": medians["generate demo"] - medians["import torch, no collector"],
    }


def _first_character(command: list[str], environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{command} ended with status {process.returncode}")
    return seconds


CELLS: dict[str, Callable[[SimpleNamespace], dict[str, Any]]] = {
    each.__name__: each for each in (limits, engine, transformers, where, host, adapters, memory, start)
}
