"""What a reader needs to place a benchmark's numbers: commit, versions, and the machine that ran it."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import argparse

FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
)
"""Of a CPU, those that a kernel asks for."""


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Of a run with the options `model` and `dtype`."""
    return {
        "model": args.model,
        "dtype": args.dtype,
        "commit": _output("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
    }


def machine() -> dict[str, Any]:
    """The load is that of the last minute: what else runs is part of the machine."""
    compiler = shutil.which(os.environ.get("CC", "cc").split()[0])
    return {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "features": [name for name in FEATURES if name in _cpuinfo("flags").split()],
        "caches": _caches(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "not told",
        "load": [round(load, 2) for load in os.getloadavg()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "compiler": _output(compiler, "--version").partition("\n")[0] if compiler else "none",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _cpuinfo(field: str) -> str:
    lines = _read("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _caches() -> dict[str, str]:
    """Of the first core, by level: L1 is that of data."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    found = {folder: {name: _read(folder / name) for name in ("level", "type", "size")} for folder in folders}
    return {f"L{each['level']}": each["size"] for each in found.values() if each["type"] != "Instruction"}


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
